"""A head process with the fake engine and a plain application, for tests that kill heads from outside.

`python -m tests.integration.head_main STATE_DIR HTTP_PORT MODEL [REPLICAS]`; prints a JSON line a status.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig, Timeouts
from cluster.gateway import GenerateRequest
from cluster.head import HeadServices, run_head
from cluster.status import ClusterStatus
from launcher.agent import local_agent_command
from sonar.config import EngineConfig
from sonar.errors import SonarError
from sonar.sampling_params import SamplingParams
from sonar.transport import Address
from tests.fakes import FAKE_ENGINE_FLAG


def plain_app(services: HeadServices) -> Any:
    """POST /generate {prompt, max_tokens, seed}: a JSON line an event. GET anything: the status."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{kind}"
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body = (await receive()).get("body", b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["method"] == "GET":
            await send({"type": "http.response.body", "body": msgspec.json.encode(services.status())})
            return
        asked = json.loads(body)
        sampling = SamplingParams(max_tokens=asked["max_tokens"], seed=asked["seed"])
        request = GenerateRequest(asked["id"], "fake", asked["prompt"], sampling)
        async for event in services.gateway.generate(request):
            line = msgspec.json.encode(msgspec.structs.asdict(event)) + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


class Printer:
    """Shows the head's progress on stdout."""

    def on_listening(self, http: Address, control: Address) -> None:
        print(json.dumps({"http": http.port, "control": control.port}), flush=True)

    def on_status(self, status: ClusterStatus) -> None:
        print(msgspec.json.encode(status).decode(), flush=True)


def main() -> int:
    """Runs the head; the exit code is its result's."""
    state_dir, port, model, replicas = (*sys.argv[1:], "1")[:4]
    deployment = DeploymentConfig("fake", EngineConfig(model), replicas=int(replicas), engine="fake")
    config = ClusterConfig(
        Path(state_dir),
        (deployment,),
        NetworkConfig(http_port=int(port), control_port=0),
        Timeouts(drain_s=5.0),
    )
    try:
        result = run_head(
            config,
            plain_app,
            agent_command=local_agent_command([FAKE_ENGINE_FLAG]),
            observer=Printer(),
            exit_when_failed=True,
        )
    except SonarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
