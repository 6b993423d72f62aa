"""`sonar head --config cluster.toml`: the head of a cluster of many hosts.

Reads the file, chooses the address that agents connect to, shows the one line that other hosts run, and serves until it
is told to end. What runs is `cluster.head`; `sonar serve` is the same for one host. Other hosts run `sonar join`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cluster.cluster_file import AUTO, HeadSettings, read_cluster_file
from cluster.config import ClusterConfig
from launcher.cli.registration import Registration
from launcher.cli.serve import is_loopback
from launcher.cli.state import StateDir
from launcher.network import outward_address
from sonar.model_source import default_cache_dir, resolve_model
from sonar.tokenizer import Tokenizer, load_tokenizer
from sonar.transport import Address

if TYPE_CHECKING:
    from cluster.head import HeadServices
    from cluster.status import ClusterStatus

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The cluster's file; everything else is in it."""
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="cluster.toml; docs/operations.md")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=MODULE:FUNCTION", help="one more engine")
    parser.set_defaults(log_level="info")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT. Returns 0 then, 1 when it could not go on.

    Raises:
        ConfigError: the file is wrong, a port is in use, or the choice of an address is a person's.
    """
    state = StateDir.of_user(environ)
    settings = chosen_settings(read_cluster_file(args.config, state.server_dir), environ)
    return _serve(settings, state, default_cache_dir(environ), args.engine)


def chosen_settings(settings: HeadSettings, environ: Mapping[str, str]) -> HeadSettings:
    """The settings without "auto", with the keys of the environment.

    Raises:
        ConfigError: this host has several addresses and no default route.
    """
    config, network = settings.config, settings.config.network
    if network.control_host == AUTO:
        route = outward_address()
        logger.info("hosts reach this one at %s (host under [network] overrides it)", route)
        config = dataclasses.replace(config, network=dataclasses.replace(network, control_host=route.address))
    more = [key for key in environ.get("SONAR_API_KEYS", "").split(",") if key]
    keys = tuple(dict.fromkeys([*settings.api.api_keys, *more]))
    if not keys and not is_loopback(network.http_host):
        logger.warning("%s is open to other hosts and no API key is set: anyone may use it", network.http_host)
    return dataclasses.replace(settings, config=config, api=dataclasses.replace(settings.api, api_keys=keys))


def tokenizer_loader(config: ClusterConfig, cache_dir: Path) -> Callable[[str], Tokenizer]:
    """Reads the tokenizer of a deployed model, at the revision that is deployed."""
    revisions = {d.engine_config.model: d.engine_config.revision for d in config.deployments}
    return lambda model: load_tokenizer(resolve_model(model, revisions.get(model), cache_dir))


def _serve(settings: HeadSettings, state: StateDir, cache_dir: Path, engines: list[str]) -> int:
    from cluster.api.app import create_app
    from cluster.head import run_head
    from launcher.agent import local_agent_command
    from sonar import __version__

    config = settings.config
    api = dataclasses.replace(settings.api, version=__version__)
    load = tokenizer_loader(config, cache_dir)

    def make_app(services: HeadServices) -> Any:
        return create_app(
            services.gateway, api, registry=services.registry, load_tokenizer=load, journal=services.journal
        )

    models = ",".join(deployment.model for deployment in config.deployments)
    registration = Registration(state, config.network.http_host, models, is_https=config.network.tls is not None)
    try:
        result = run_head(
            config,
            make_app,
            agent_command=local_agent_command(engines) if settings.head_runs_workers else None,
            observer=HeadDisplay(config, registration),
        )
    finally:
        registration.remove()
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return result.exit_code


class HeadDisplay:
    """Implements `cluster.head.HeadObserver`: where it listens, how others join, and when all serves.

    Changes of nodes and replicas are in the log, which goes to the same terminal."""

    def __init__(self, config: ClusterConfig, registration: Registration, stream: TextIO | None = None) -> None:
        self._config = config
        self._registration = registration
        self._stream = stream or sys.stdout
        self._began_s = time.monotonic()
        self._url = ""
        self._was_ready = False

    def on_listening(self, http: Address, control: Address) -> None:
        token = self._config.token_path.absolute()
        self._url = self._registration.register(http.port, str(control), str(token))
        self._print(f"HTTP on {self._url}; agents join at {control}")
        self._print(f"On every other host, with a copy of {token} (mode 600) as FILE:")
        self._print(f"  sonar join {control} --token-file FILE")

    def on_status(self, status: ClusterStatus) -> None:
        is_ready = bool(status.replicas) and all(replica.state == "ready" for replica in status.replicas)
        if is_ready and not self._was_ready:
            nodes = sorted({node for replica in status.replicas for node in replica.nodes})
            seconds = time.monotonic() - self._began_s
            self._print(f"Ready after {seconds:.1f} s: {len(status.replicas)} replicas on {', '.join(nodes)}")
        self._was_ready = is_ready

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
