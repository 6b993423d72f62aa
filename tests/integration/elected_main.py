"""One of several heads with the real HTTP API and the fake engine, for tests that kill the one that leads.

`python -m tests.integration.elected_main FOLDER HTTP_PORT CONTROL_PORT ETCD_URL MODEL`; the token is FOLDER/../token.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig, Timeouts
from cluster.head import run_head
from cluster.store.settings import StoreConfig
from sonar.config import EngineConfig, SchedulerConfig
from sonar.errors import SonarError
from tests.integration.api_main import api_app


def main() -> int:
    """Runs the head; the exit code is its result's."""
    folder, http_port, control_port, etcd_url, model = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    engine = EngineConfig(model, scheduler=SchedulerConfig(max_model_len=4096))
    config = ClusterConfig(
        Path(folder),
        (DeploymentConfig("fake", engine, engine="fake"),),
        NetworkConfig(http_port=int(http_port), control_port=int(control_port)),
        Timeouts(drain_s=5.0),
        token_file=Path(folder).parent / "token",
        store=StoreConfig(kind="etcd", endpoints=(etcd_url,)),
    )
    try:
        return run_head(config, api_app).exit_code
    except SonarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
