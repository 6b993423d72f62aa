"""A cluster of one: a head, an agent on loopback, one deployment. The parts are those of a cluster of many.

Called by `sonar serve`, which hands in the tokenizer's loader and how an agent is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig, RestartPolicy, Timeouts
from cluster.head import HeadObserver, HeadResult, HeadServices, run_head
from cluster.local_agent import AgentCommand
from sonar.tokenizer import Tokenizer


@dataclass(frozen=True)
class LocalOptions:
    """What `sonar serve` was asked for.

    Attributes:
        deployment: `engine_config.model` is a path of this host (the API reads the tokenizer from it).
        state_dir: this server's own folder; two servers need two.
        keep_workers_s: see `ClusterConfig`.
    """

    deployment: DeploymentConfig
    state_dir: Path
    http_host: str = "127.0.0.1"
    http_port: int = 2242
    api: ApiSettings = field(default_factory=ApiSettings)
    timeouts: Timeouts = field(default_factory=Timeouts)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    keep_workers_s: float = 0.0


def serve_local(
    options: LocalOptions,
    *,
    load_tokenizer: Callable[[str], Tokenizer],
    agent_command: AgentCommand,
    observer: HeadObserver | None = None,
) -> HeadResult:
    """Serves one deployment from this host until SIGTERM or SIGINT, or until it cannot be started.

    Args:
        load_tokenizer: see `cluster.api.app.create_app`.
        agent_command: `launcher.agent.local_agent_command()`.

    Raises:
        ConfigError: a port is in use or a setting is wrong; nothing has been started then.
    """
    config = ClusterConfig(
        state_dir=options.state_dir,
        deployments=(options.deployment,),
        network=NetworkConfig(options.http_host, options.http_port, control_host="127.0.0.1", control_port=0),
        timeouts=options.timeouts,
        restart=options.restart,
        keep_workers_s=options.keep_workers_s,
    )

    def make_app(services: HeadServices) -> Any:
        return create_app(
            services.gateway,
            options.api,
            registry=services.registry,
            load_tokenizer=load_tokenizer,
            journal=services.journal,
        )

    return run_head(config, make_app, agent_command=agent_command, observer=observer, exit_when_failed=True)
