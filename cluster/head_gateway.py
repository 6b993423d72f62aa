"""The gateway that the HTTP API calls: request tables behind async iterators, and the canary behind `/ready`.

A thin shell over `cluster.requests`; knows no HTTP and no sockets. Made by the head.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from cluster.gateway import GenerateRequest, ServedModel
from cluster.requests import RequestTable
from cluster.state import ClusterState
from sonar.errors import UserError
from sonar.messages import FinishReason, TokenEvent
from sonar.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Before every request of a client: an overloaded service is slow, and still works.
PROBE_PRIORITY = -(2**31)


class HeadGateway:
    """Implements `cluster.gateway.Gateway`.

    Args:
        models: what is deployed now.
    """

    def __init__(self, table: RequestTable, models: Callable[[], list[ServedModel]]) -> None:
        self._table = table
        self._models = models
        self._num_probes = 0

    def models(self) -> list[ServedModel]:
        return self._models()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        # What an earlier head accepted is not refused for want of room in the queue.
        stream = self._table.open(request, ignore_limit=request.emitted_token_ids is not None)
        try:
            while True:
                event = await stream.next()
                yield event
                if event.finish is not None:
                    return
        finally:
            if not stream.is_finished:
                self._table.abort(request.request_id)

    def abort(self, request_id: str, finish: FinishReason = FinishReason.ABORT) -> None:
        self._table.abort(request_id, finish)

    async def probe(self, model: str, timeout_s: float) -> bool:
        """Computes one real token. Token 0 is in every vocabulary; a prompt of one fills no block and is not cached."""
        self._num_probes += 1
        request = GenerateRequest(
            request_id=f"probe-{self._num_probes}",
            model=model,
            prompt_token_ids=[0],
            sampling=SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True),
            priority=PROBE_PRIORITY,
        )
        try:
            stream = self._table.open(request, ignore_limit=True)
        except UserError as error:
            logger.info("probe of %s: %s", model, error)
            return False
        try:
            async with asyncio.timeout(timeout_s):
                event = await stream.next()
                while event.finish is None:
                    event = await stream.next()
        except TimeoutError:
            return False
        finally:
            if not stream.is_finished:
                self._table.abort(request.request_id)
        return event.finish is FinishReason.LENGTH


def served_models(state: ClusterState, table: RequestTable, created_unix_s: int) -> list[ServedModel]:
    """What is deployed now; a model is ready while a replica takes requests."""
    models = []
    for config in state.deployments.values():
        routes = [r for r in table.routes() if r.deployment == config.name and not r.is_draining]
        replicas = [r for r in state.replicas.values() if r.deployment == config.name]
        coming = [r for r in replicas if r.is_recovering]
        models.append(
            ServedModel(
                name=config.model,
                path=config.engine_config.model,
                max_model_len=min(
                    [route.ready.max_model_len for route in routes] or [r.max_model_len for r in coming],
                    default=config.engine_config.scheduler.max_model_len,
                ),
                created_unix_s=created_unix_s,
                ready=bool(routes),
                is_recovering=bool(coming) and not routes,
                note="" if routes else next((r.note for r in replicas if r.note), ""),
            )
        )
    return models
