"""`cluster.toml`: the one file that describes a cluster, read into the settings of its head.

Knows the file's tables and which dataclass each fills; the dataclasses own defaults and checks, `cluster.toml_tables`
owns types and error texts. docs/operations.md lists the keys. Called by `sonar head`, `sonar plan` and `sonar check`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.api.settings import ApiSettings
from cluster.config import (
    ClusterConfig,
    DeploymentConfig,
    NetworkConfig,
    NodesConfig,
    RestartPolicy,
    Timeouts,
    TlsFiles,
)
from cluster.security import read_key_file
from cluster.store.settings import StoreConfig
from cluster.toml_tables import Table
from sonar.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from sonar.errors import ConfigError

AUTO = "auto"
KEEP_WORKERS_S = 30.0
_TOP = ("state_dir", "network", "http", "security", "nodes", "store", "timeouts", "restart", "deployment")
_HTTP_API = (
    "cors_origins",
    "max_body_bytes",
    "max_choices",
    "body_timeout_s",
    "send_timeout_s",
    "retry_after_s",
    "resumable_streams",
    "resume_window_s",
)
_HTTP_OWN = ("host", "port", "certificate", "private_key", "trust_request_chat_template")
_PARALLEL = {
    "tp": "tp_size",
    "pp": "pp_size",
    "dp": "dp_size",
    "ep": "ep_size",
    "redundant_experts": "redundant_experts",
    "rebalance_steps": "rebalance_steps",
}
_DEPLOYMENT = (
    "name",
    "model",
    "replicas",
    "ranks_per_host",
    "served_name",
    "max_queued",
    "queue_timeout_s",
    "runtime",
    "prefill_replicas",
    "remote_prefill_tokens",
)
_SECTIONS = ("engine", "cache", "scheduler")
_ENGINE_ELSEWHERE = ("model", "cache", "scheduler", "parallel")


@dataclass(frozen=True)
class HeadSettings:
    """What the file says.

    Attributes:
        config: `network.control_host` may still be "auto".
        api: without the version of the program.
        head_runs_workers: the head's own host is one of the cluster's.
    """

    config: ClusterConfig
    api: ApiSettings
    head_runs_workers: bool


def read_cluster_file(file: Path, default_state_dir: Callable[[int], Path]) -> HeadSettings:
    """Reads and checks the file.

    Args:
        default_state_dir: HTTP port -> the head's folder where the file names none.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; the text names the place and a remedy.
    """
    top = Table(file, "", _load(file))
    top.check_keys(_TOP)
    http, security, nodes = top.table("http"), top.table("security"), top.table("nodes")
    security.check_keys(("token_file", "api_key_file"))
    network = _network(top.table("network"), http)
    deployments = tuple(_deployment(table) for table in top.tables("deployment"))
    if not deployments:
        top.fail("deployment", "is missing: nothing to serve; write [[deployment]] with name and model")
    try:
        config = ClusterConfig(
            state_dir=top.get("state_dir", Path, default_state_dir(network.http_port)),
            deployments=deployments,
            network=network,
            timeouts=top.table("timeouts").build(Timeouts),
            restart=top.table("restart").build(RestartPolicy),
            token_file=security.get("token_file", Path, None),
            nodes=_nodes(nodes),
            keep_workers_s=nodes.get("keep_workers_s", float, KEEP_WORKERS_S),
            store=_store(top.table("store")),
        )
    except ConfigError as error:
        raise _in_file(file, error) from error
    key_file = security.get("api_key_file", Path, None)
    keys = read_key_file(key_file) if key_file is not None else ()
    api = http.build(
        ApiSettings,
        {key: key for key in (*_HTTP_API, "trust_request_chat_template")},
        api_keys=keys,
    )
    return HeadSettings(config, api, nodes.get("head_runs_workers", bool, True))


def _load(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; give the cluster's file", param="config") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{file} is no TOML: {error}; see docs/operations.md for an example", param="config"
        ) from error


def _in_file(file: Path, error: ConfigError) -> ConfigError:
    """An error that does not name the file yet."""
    text = error.message if error.message.startswith(str(file)) else f"{file}: {error.message}"
    return ConfigError(text, param=error.param)


def _network(network: Table, http: Table) -> NetworkConfig:
    network.check_keys(("host", "control_port"))
    http.check_keys((*_HTTP_OWN, *_HTTP_API))
    host = http.get("host", str, "127.0.0.1")
    port = http.get("port", int, NetworkConfig.http_port)
    certificate, key = http.get("certificate", Path, None), http.get("private_key", Path, None)
    if (certificate is None) != (key is None):
        http.fail("certificate" if key is None else "private_key", "belongs with the other: HTTPS needs both files")
    tls = None
    if certificate is not None and key is not None:
        tls = http.build(TlsFiles, {"certificate": "certificate", "private_key": "private_key"})
    known = {"host": "control_host", "control_port": "control_port"}
    config = network.build(NetworkConfig, known, http_host=host, http_port=port, tls=tls)
    return config if network.has("host") else dataclasses.replace(config, control_host=AUTO)


def _nodes(table: Table) -> NodesConfig:
    names = [field.name for field in dataclasses.fields(NodesConfig)]
    table.check_keys((*names, "head_runs_workers", "keep_workers_s"))
    return table.build(NodesConfig, {name: name for name in names})


def _store(table: Table) -> StoreConfig:
    names = [field.name for field in dataclasses.fields(StoreConfig)]
    table.check_keys(names)
    return table.build(StoreConfig, {name: name for name in names})


def _deployment(table: Table) -> DeploymentConfig:
    table.check_keys((*_DEPLOYMENT, *_PARALLEL, *_SECTIONS))
    for key in ("name", "model"):
        if not table.has(key):
            table.fail(key, "is missing; every deployment has a name and a model")
    fields = [field.name for field in dataclasses.fields(EngineConfig) if field.name not in _ENGINE_ELSEWHERE]
    section = table.table("engine")
    section.check_keys(fields)
    engine = section.build(
        EngineConfig,
        {name: name for name in fields},
        model=_model(table),
        cache=table.table("cache").build(CacheConfig),
        scheduler=table.table("scheduler").build(SchedulerConfig),
        parallel=table.build(ParallelConfig, _PARALLEL),
    )
    known = {key: key for key in _DEPLOYMENT if key not in ("model", "runtime")} | {"runtime": "engine"}
    return table.build(DeploymentConfig, known, engine_config=engine)


def _model(table: Table) -> str:
    """A path that begins with "./", "../" or "~" is made absolute; it has to lead to the same files on every host."""
    model: str = table.get("model", str, "")
    return str(table.path(model)) if model.startswith(("./", "../", "~")) else model
