"""The API's Prometheus metrics, in the registry it is handed. Label values come from closed sets: route templates and
the names of served models, so a client cannot make the tables grow."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
_TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class ApiMetrics:
    """Owns the API's collectors; one instance a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "sonar_http_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self.open_requests = Gauge("sonar_http_open_requests", "HTTP requests being answered", registry=registry)
        model = ["model"]
        self._ttft = Histogram(
            "sonar_ttft_seconds",
            "From a sequence's arrival to its first token event",
            model,
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self._itl = Histogram(
            "sonar_itl_seconds",
            "Between two token events of a sequence",
            model,
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self._e2e = Histogram(
            "sonar_e2e_seconds",
            "From a sequence's arrival to its end",
            model,
            buckets=_E2E_BUCKETS,
            registry=registry,
        )
        self._prompt = Histogram(
            "sonar_prompt_tokens", "Prompt tokens of a sequence", model, buckets=_TOKEN_BUCKETS, registry=registry
        )
        self._cached = Counter(
            "sonar_cached_prompt_tokens", "Prompt tokens from the prefix cache", model, registry=registry
        )
        self._output = Histogram(
            "sonar_output_tokens", "Output tokens of a sequence", model, buckets=_TOKEN_BUCKETS, registry=registry
        )
        self._finished = Counter(
            "sonar_sequences_finished", "Sequences by how they ended", ["model", "reason"], registry=registry
        )

    def of_model(self, model: str) -> GenerationMetrics:
        """The collectors of one served model, labels resolved (a look-up a token would cost more than the sum)."""
        return GenerationMetrics(self, model)


class GenerationMetrics:
    """What is measured of the sequences of one model."""

    def __init__(self, metrics: ApiMetrics, model: str) -> None:
        self._ttft = metrics._ttft.labels(model)
        self._itl = metrics._itl.labels(model)
        self._e2e = metrics._e2e.labels(model)
        self._prompt = metrics._prompt.labels(model)
        self._cached = metrics._cached.labels(model)
        self._output = metrics._output.labels(model)
        self._finished = metrics._finished
        self._model = model

    def first_event(self, seconds: float) -> None:
        """A sequence's first event came this long after its arrival."""
        self._ttft.observe(seconds)

    def next_event(self, seconds: float) -> None:
        """A later event came this long after the one before."""
        self._itl.observe(seconds)

    def ended(self, reason: str, seconds: float, num_prompt: int, num_cached: int, num_output: int) -> None:
        """A sequence is over, for whatever reason."""
        self._finished.labels(self._model, reason).inc()
        self._e2e.observe(seconds)
        self._prompt.observe(num_prompt)
        self._cached.inc(num_cached)
        self._output.observe(num_output)
