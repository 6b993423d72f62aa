"""What the routes share, and how a request finds its model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cluster.api.errors import ApiError
from cluster.api.live_answers import LiveAnswers
from cluster.api.metrics import ApiMetrics
from cluster.api.prompts import PromptBuilder
from cluster.api.readiness import Readiness
from cluster.api.settings import ApiSettings
from cluster.api.tokenizers import TokenizerPool
from cluster.gateway import Gateway, ServedModel
from sonar.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """The parts of one application."""

    gateway: Gateway
    settings: ApiSettings
    tokenizers: TokenizerPool
    prompts: PromptBuilder
    metrics: ApiMetrics
    readiness: Readiness
    answers: LiveAnswers

    def model(self, name: str) -> ServedModel:
        """The served model of this name.

        Raises:
            ApiError: 404 that lists what is served.
        """
        models = self.gateway.models()
        for model in models:
            if model.name == name:
                return model
        served = ", ".join(model.name for model in models) or "none"
        raise ApiError(
            404, f"the model {name[:200]!r} is not served; served: {served}", param="model", code="model_not_found"
        )

    async def tokenizer(self, model: ServedModel) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ApiError: 503, for what is wrong with its files is not the client's fault.
        """
        try:
            return await self.tokenizers.get(model.path)
        except Exception:
            logger.exception("the tokenizer of %s cannot be loaded", model.name)
            raise self._not_ready(f"the tokenizer of {model.name} cannot be loaded") from None

    def check_ready(self, model: ServedModel) -> None:
        """Raise a 503 unless a replica of the model takes requests, or will again: then they wait for it."""
        if not model.ready and not model.is_recovering:
            raise self._not_ready(f"no replica of {model.name} takes requests now; try again later")

    def _not_ready(self, message: str) -> ApiError:
        headers = {"Retry-After": str(self.settings.retry_after_s)}
        return ApiError(503, message, param="model", code="model_not_ready", headers=headers)
