"""A head process with the real HTTP API, a tokenizer of bytes and the fake engine, for tests that kill heads.

`python -m tests.integration.api_main STATE_DIR HTTP_PORT MODEL [REPLICAS [KEEP_WORKERS_S]]`; prints a JSON line a
status.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig, Timeouts
from cluster.head import HeadServices, run_head
from launcher.agent import local_agent_command
from sonar.config import EngineConfig, SchedulerConfig
from tests.api.fakes import byte_tokenizer
from tests.fakes import FAKE_ENGINE_FLAG
from tests.integration.head_main import Printer


def api_app(services: HeadServices) -> Any:
    """The application as `sonar serve` makes it, but for the tokenizer."""
    return create_app(
        services.gateway,
        ApiSettings(ready_interval_s=0.5),
        registry=services.registry,
        load_tokenizer=lambda path: byte_tokenizer(),
        journal=services.journal,
    )


def main() -> int:
    """Runs the head; the exit code is its result's."""
    state_dir, port, model, *more = sys.argv[1:]
    replicas, keep_workers_s = (*more, *("1", "0")[len(more) :])
    engine = EngineConfig(model, scheduler=SchedulerConfig(max_model_len=4096))
    deployment = DeploymentConfig("fake", engine, replicas=int(replicas), engine="fake")
    network = NetworkConfig(http_port=int(port), control_port=0)
    config = ClusterConfig(
        Path(state_dir), (deployment,), network, Timeouts(drain_s=5.0), keep_workers_s=float(keep_workers_s)
    )
    print(json.dumps({"imported": time.monotonic()}), flush=True)
    command = local_agent_command([FAKE_ENGINE_FLAG])
    result = run_head(config, api_app, agent_command=command, observer=Printer(), exit_when_failed=True)
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
