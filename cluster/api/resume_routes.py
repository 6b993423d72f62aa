"""GET and DELETE /v1/streams/{id}: go on reading a stream, or end it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answer_reader import AnswerReader
from cluster.api.errors import invalid
from cluster.api.resume import check_number, event_number, resume_headers
from cluster.api.services import Services


def resume_router(services: Services) -> APIRouter:
    """The two routes."""
    router = APIRouter(tags=["streams"])

    @router.get("/v1/streams/{id}")
    async def follow(request: Request) -> Response:
        """The events of a resumable stream after `after`, or after the header `Last-Event-ID`; live while it runs."""
        headers = resume_headers(request)
        answer_id = request.path_params["id"]
        last = headers.last_event
        if last is not None and last.answer_id != answer_id:
            raise invalid(f"Last-Event-ID is of {last.answer_id[:200]!r}, not of this stream", param="Last-Event-ID")
        number = last.number if last is not None else event_number(request.query_params.get("after", "0"))
        answer = await services.answers.find(headers.owner, answer_id)
        check_number(answer, number)
        return AnswerReader(answer, number, services.settings)

    @router.delete("/v1/streams/{id}", status_code=204)
    async def give_up(request: Request) -> Response:
        """Ends a resumable stream and forgets it."""
        answer = await services.answers.find(resume_headers(request).owner, request.path_params["id"])
        services.answers.give_up(answer)
        return Response(status_code=204)

    return router
