"""Blocking calls from a loop, for what must not be left behind in a thread when its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def finish_in_thread(function: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, but a cancelled caller goes on only when the call has returned: what it uses can then be
    closed. The call has a deadline of its own."""
    call = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise
