"""Settings of a cluster: frozen dataclasses, composed, checked at construction. Torch-free.

What one engine needs is `sonar.config.EngineConfig`; the HTTP API's own settings are `cluster.api.settings`. Every time
is in seconds. Read by the head; the parts an agent needs reach it in messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from cluster.store.settings import StoreConfig
from sonar.config import EngineConfig
from sonar.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_NAME_LENGTH = 100
DEFAULT_CONTROL_PORT = 2243
TOKEN_FILE = "join.token"  # in a head's folder, unless it is told another place


def check_name(kind: str, name: str) -> None:
    """Raises `ConfigError` unless a name can be part of ids, file names and labels."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise ConfigError(
            f"{kind}={name[:200]!r}; use letters, digits, '.', '_' and '-', at most {MAX_NAME_LENGTH}", param=kind
        )


@dataclass(frozen=True)
class DeploymentConfig:
    """A model with its settings.

    Attributes:
        name: its id, and the name of its replicas, "<name>-<index>".
        engine_config: of each replica; `parallel` gives its ranks, and how many replicas its data-parallel groups are.
        ranks_per_host: at most so many ranks of a replica on one host; 0 = as many as fit, which on hosts without
            accelerators is all.
        served_name: what clients call the model; empty = name. May hold slashes.
        engine: which engine an agent starts, a key of its table of engines.
        max_queued: requests the head holds while no replica has room; one more is refused with `CapacityError`.
        queue_timeout_s: a request that no replica has taken for so long ends with an error; also one that has begun and
            waits for a replica to be re-formed.
        prefill_replicas: of the replicas, those with the lowest numbers compute prompts for the others, which decode;
            0: each does both. Needs `engine_config.kv_transfer`.
        remote_prefill_tokens: a prompt of which fewer tokens than this could come from another replica is computed
            where it is decoded.
    """

    name: str
    engine_config: EngineConfig
    replicas: int = 1
    ranks_per_host: int = 0
    served_name: str = ""
    engine: str = "sonar"
    max_queued: int = 1024
    queue_timeout_s: float = 600.0
    prefill_replicas: int = 0
    remote_prefill_tokens: int = 128

    def __post_init__(self) -> None:
        check_name("deployment", self.name)
        check_name("engine", self.engine)
        for name, low in (("replicas", 0), ("ranks_per_host", 0), ("max_queued", 1), ("prefill_replicas", 0)):
            if not low <= getattr(self, name) <= 10_000:
                raise ConfigError(f"{name}={getattr(self, name)}; choose {low} to 10000", param=name)
        if not self.queue_timeout_s > 0:
            raise ConfigError(f"queue_timeout_s={self.queue_timeout_s}; must be above 0", param="queue_timeout_s")
        if self.remote_prefill_tokens < 1:
            raise ConfigError(
                f"remote_prefill_tokens={self.remote_prefill_tokens}; must be at least 1", param="remote_prefill_tokens"
            )
        self._check_pools()

    def _check_pools(self) -> None:
        count = self.prefill_replicas
        if count and self.replicas and count >= self.replicas:
            raise ConfigError(
                f"prefill_replicas={count} of replicas={self.replicas}: none is left to decode; raise replicas",
                param="prefill_replicas",
            )
        if count and self.engine_config.kv_transfer == "none":
            raise ConfigError(
                f"prefill_replicas={count} without a way for KV blocks: set kv_transfer of the engine to 'nixl', or to "
                "'shm' when all replicas run on one host",
                param="prefill_replicas",
            )

    def is_prefill(self, replica_id: str) -> bool:
        """Whether a replica of this deployment computes prompts for the others. Its number may be beyond `replicas`."""
        return self.prefill_replicas > 0 and int(replica_id.rpartition("-")[2]) < self.prefill_replicas

    @property
    def num_replicas(self) -> int:
        """Replicas to run: as many as asked for, each as often as it has data-parallel groups of its own."""
        return self.replicas * self.engine_config.parallel.num_replicas

    @property
    def model(self) -> str:
        """The name clients use."""
        return self.served_name or self.name


@dataclass(frozen=True)
class Timeouts:
    """How long the head waits, and for what. None bounds a whole start: a slow load that makes progress goes on.

    Attributes:
        heartbeat_interval_s: between an agent's heartbeats.
        heartbeat_timeout_s: silence of a host's agent and all its leads, after which the host is lost.
        start_s: from StartWorker until the process runs and its lead is connected.
        load_stall_s: without progress in a replica's start. Long, because a phase that says nothing in between (weights
            from a slow file system) must not be taken for a hang.
        hang_s: without news from a ready replica's engine loop, which speaks at least once a second between steps, and
            says when a step will take long: then it has four times what it expects.
        drain_s: for open requests, when a replica or the head stops.
        kill_grace_s: between SIGTERM and SIGKILL.
        adopt_s: for hosts and leads to say what runs of an earlier head's, before it is started anew.
        head_loss_s: that workers go on without a head, before their agents end them.
        fence_s: for the exit reports of a killed replica, before its ranks are taken for dead without them.
    """

    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 3.0
    start_s: float = 60.0
    load_stall_s: float = 1800.0
    hang_s: float = 10.0
    drain_s: float = 30.0
    kill_grace_s: float = 5.0
    fence_s: float = 10.0
    adopt_s: float = 5.0
    head_loss_s: float = 600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 1e6:
                raise ConfigError(f"{name}={value}; must be above 0", param=name)
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s} is below two intervals of "
                f"{self.heartbeat_interval_s}: one late heartbeat would lose a host; raise it",
                param="heartbeat_timeout_s",
            )


@dataclass(frozen=True)
class RestartPolicy:
    """What follows the end of a replica that nobody asked for.

    The first restart is at once; the n-th failure in a row waits backoff_s * 2^(n-2), at most backoff_max_s. A replica
    that served for stable_s starts counting anew. After crash_limit failures in a row it counts as failed and is tried
    again each retry_s (0: never), so that a mended host heals the cluster.
    """

    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    crash_limit: int = 5
    stable_s: float = 10.0
    retry_s: float = 300.0

    def __post_init__(self) -> None:
        if self.crash_limit < 1:
            raise ConfigError(f"crash_limit={self.crash_limit}; must be at least 1", param="crash_limit")
        for name in ("backoff_s", "backoff_max_s", "stable_s", "retry_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(f"{name}={getattr(self, name)}; must be 0 or above", param=name)

    def delay_s(self, failures: int) -> float:
        """Wait before the start that follows this many failures in a row."""
        if failures <= 1:
            return 0.0
        return float(min(self.backoff_max_s, self.backoff_s * 2 ** min(failures - 2, 30)))


@dataclass(frozen=True)
class TlsFiles:
    """HTTPS: PEM files of the certificate (with its chain) and of its private key."""

    certificate: Path
    private_key: Path

    def __post_init__(self) -> None:
        for name, path in vars(self).items():
            if not path.is_file():
                raise ConfigError(f"{name}={str(path)!r} is no file; give one in PEM form", param=name)


@dataclass(frozen=True)
class NodesConfig:
    """Hosts that a cluster waits for before it places anything.

    Attributes:
        expected: their node ids. min: how many there have to be, whatever their names.
        join_timeout_s: after it the missing are named, and the cluster goes on without them.
        exit_when_missing: the head ends then instead.
    """

    expected: tuple[str, ...] = ()
    min: int = 0
    join_timeout_s: float = 120.0
    exit_when_missing: bool = False

    def __post_init__(self) -> None:
        for name in self.expected:
            check_name("expected", name)
        if not 0 <= self.min <= 100_000:
            raise ConfigError(f"min={self.min}; choose 0 to 100000", param="min")
        if not 0 < self.join_timeout_s < 1e6:
            raise ConfigError(f"join_timeout_s={self.join_timeout_s}; must be above 0", param="join_timeout_s")


@dataclass(frozen=True)
class NetworkConfig:
    """Where the head listens. Port 0 takes a free one; control is for agents and leads, never for clients.

    tls: HTTPS instead of HTTP."""

    http_host: str = "127.0.0.1"
    http_port: int = 2242
    control_host: str = "127.0.0.1"
    control_port: int = DEFAULT_CONTROL_PORT
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        for name in ("http_port", "control_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ConfigError(f"{name}={getattr(self, name)} is no port; choose 0 to 65535", param=name)


@dataclass(frozen=True)
class ClusterConfig:
    """Everything a head is started with.

    Attributes:
        state_dir: the head's own folder (mode 700): store, token, logs.
        token_file: the join token; None = `join.token` in state_dir. Created when absent.
        keep_workers_s: how long this host's own agent and workers go on when the head is killed; 0: they die with it.
    """

    state_dir: Path
    deployments: tuple[DeploymentConfig, ...] = ()
    network: NetworkConfig = field(default_factory=NetworkConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    token_file: Path | None = None
    nodes: NodesConfig = field(default_factory=NodesConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    keep_workers_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep_workers_s < 1e6:
            raise ConfigError(f"keep_workers_s={self.keep_workers_s}; must be 0 or above", param="keep_workers_s")
        for kind, names in (
            ("deployment", [d.name for d in self.deployments]),
            ("served_name", [d.model for d in self.deployments]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"{kind} {twice[0]!r} is given twice; names are unique", param=kind)

    @property
    def token_path(self) -> Path:
        """Where the join token lies."""
        return self.token_file or self.state_dir / TOKEN_FILE
