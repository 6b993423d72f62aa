"""Whether the service works: a real token from every served model within the last interval.

A token of real traffic counts; only an idle model is probed, and only when somebody asks. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cluster.api.settings import ApiSettings
from cluster.api.tokenizers import TokenizerPool
from cluster.gateway import Gateway, ServedModel

logger = logging.getLogger(__name__)

# A failure is remembered this long, so that eager pollers do not multiply probes; never longer than the interval.
FAILURE_MEMORY_S = 1.0


class Readiness:
    """Owns the evidence: when each model last gave a token, and why it last failed to.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        gateway: Gateway,
        tokenizers: TokenizerPool,
        settings: ApiSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._tokenizers = tokenizers
        self._settings = settings
        self._clock = clock
        self._last_token_s: dict[str, float] = {}
        self._last_failure: dict[str, tuple[float, str]] = {}
        self._probes: dict[str, asyncio.Task[str]] = {}

    def saw_token(self, model: str) -> None:
        """A token of this served model has come through the router."""
        self._last_token_s[model] = self._clock()

    async def reasons(self) -> dict[str, str]:
        """Why the service is not ready, by model ("" for the whole); empty when it is."""
        models = self._gateway.models()
        if not models:
            return {"": "no model is deployed"}
        found = await asyncio.gather(*(self._reason(model) for model in models))
        return {model.name: reason for model, reason in zip(models, found, strict=True) if reason}

    async def _reason(self, model: ServedModel) -> str:
        if not model.ready:
            return "no replica takes requests" + (f": {model.note}" if model.note else "")
        now = self._clock()
        interval = self._settings.ready_interval_s
        if now - self._last_token_s.get(model.name, -interval) < interval:
            return ""
        failed_s, reason = self._last_failure.get(model.name, (-FAILURE_MEMORY_S, ""))
        if reason and now - failed_s < min(FAILURE_MEMORY_S, interval):
            return reason
        probe = self._probes.get(model.name)
        if probe is None:
            probe = asyncio.create_task(self._probe(model))
            self._probes[model.name] = probe
            probe.add_done_callback(lambda _: self._probes.pop(model.name, None))
        # Shielded: a poller that gives up must not fail the others.
        return await asyncio.shield(probe)

    async def _probe(self, model: ServedModel) -> str:
        """Fetch a token; the reason why none came, or nothing."""
        timeout_s = self._settings.ready_timeout_s
        try:
            # The gateway keeps the time itself; the outer limit is for one that does not.
            async with asyncio.timeout(timeout_s * 1.5 + 1):
                await self._tokenizers.get(model.path)
                came = await self._gateway.probe(model.name, timeout_s)
            reason = "" if came else f"no token came within {timeout_s:g} s"
        except TimeoutError:
            reason = f"the probe did not return within {timeout_s * 1.5 + 1:g} s"
        except Exception:
            logger.exception("probe of %s failed", model.name)
            reason = "the probe failed; the server's log has the details"
        if reason:
            self._last_failure[model.name] = (self._clock(), reason)
        else:
            self.saw_token(model.name)
        return reason
