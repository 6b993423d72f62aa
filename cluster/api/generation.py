"""Drives choices through the gateway: events in, pieces out; several choices run at the same time.

Owns the promise that every request it started is over when it returns: finished, or aborted at the gateway. Knows
nothing of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from cluster.api.choice import Choice, Piece
from cluster.api.errors import ApiError
from cluster.api.metrics import GenerationMetrics
from cluster.gateway import Gateway
from sonar.messages import FinishReason, TokenEvent

# How long the gateway may take to acknowledge the end of a request whose text met a stop string.
STOP_DEADLINE_S = 5.0

# Updates that wait for a slow reader, per choice; when the queue is full its choices wait too.
MAX_PENDING_UPDATES = 16

Update = tuple[Choice, Piece]


def run_choices(
    gateway: Gateway, choices: Sequence[Choice], metrics: GenerationMetrics
) -> AsyncGenerator[list[Update]]:
    """Yield what is there whenever something is: pieces of any of the choices, in each choice's order.

    Ends after the last choice's last event. Closing it early, or an error of any choice, aborts every open one.

    Raises:
        ApiError, CapacityError and whatever else the gateway raises.
    """
    runs = [_run_choice(gateway, choice, metrics) for choice in choices]
    return runs[0] if len(runs) == 1 else _merged(runs)


async def _merged(runs: Sequence[AsyncGenerator[list[Update]]]) -> AsyncGenerator[list[Update]]:
    """The updates of several choices, each in a task of its own; those that wait are yielded together."""
    queue: asyncio.Queue[list[Update] | Exception | None] = asyncio.Queue(MAX_PENDING_UPDATES * len(runs))
    # Not a TaskGroup: it would wrap the error that is raised from here, and none may span a yield. `finally` ends them.
    tasks = [asyncio.create_task(_pump(run, queue)) for run in runs]
    try:
        num_open = len(tasks)
        while num_open:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            updates: list[Update] = []
            for item in items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    updates += item
            if updates:
                yield updates
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(run: AsyncGenerator[list[Update]], queue: asyncio.Queue[list[Update] | Exception | None]) -> None:
    """Move a choice's updates into the queue, then None, or the error that ended it."""
    last: Exception | None = None
    try:
        async with aclosing(run):
            async for updates in run:
                await queue.put(updates)
    except Exception as error:  # noqa: BLE001 - handed over whole to whoever reads the queue
        last = error
    await queue.put(last)


async def _run_choice(gateway: Gateway, choice: Choice, metrics: GenerationMetrics) -> AsyncGenerator[list[Update]]:
    """Yield a choice's pieces, the last one with `finish`. Closing it early aborts the request."""
    request = choice.request
    events = gateway.generate(request)
    last_event_s = 0.0
    is_told = False
    try:
        async for event in events:
            now = time.monotonic()
            if last_event_s:
                metrics.next_event(now - last_event_s)
            else:
                metrics.first_event(now - request.arrival_s)
            last_event_s = now
            is_told = event.finish is not None
            piece = choice.feed(event)
            if piece.finish is not None and not is_told:
                gateway.abort(request.request_id, FinishReason.STOP)
                is_told = True
            yield [(choice, piece)]
            if piece.finish is not None:
                if event.finish is None:
                    await _drain(events)
                return
        is_told = True
        raise ApiError(500, "the engine's answer ended without a final event", code="generation_failed")
    finally:
        if not is_told:
            gateway.abort(request.request_id)
        if isinstance(events, AsyncGenerator):
            await events.aclose()
        _observe_end(choice, metrics)


async def _drain(events: AsyncIterator[TokenEvent]) -> None:
    """Wait for the terminal event of a request that was told to stop, so that the gateway closes it as such."""
    try:
        async with asyncio.timeout(STOP_DEADLINE_S):
            async for event in events:
                if event.finish is not None:
                    return
    except TimeoutError:
        return


def _observe_end(choice: Choice, metrics: GenerationMetrics) -> None:
    reason = choice.finish.value if choice.finish is not None else "unfinished"
    request = choice.request
    seconds = time.monotonic() - request.arrival_s
    metrics.ended(reason, seconds, len(request.prompt_token_ids), choice.num_cached_tokens, choice.num_tokens)
