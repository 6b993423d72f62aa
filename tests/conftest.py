"""What all tests share: marked tests are skipped, with the reason shown, unless `-m` names their marker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sonar.model_source import ModelSource, resolve_model

from .demo_server import DemoServer, running_demo

OPT_IN = {
    "gpu": "needs a GPU; run with -m gpu",
    "multi_gpu": "needs several GPUs; run with -m multi_gpu",
    "hub": "needs a model hub; run with -m hub",
    "faults": "a row of the fault matrix; run tests/run.sh faults",
    "slow": "takes more than half a minute; run with -m slow",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    expression = config.getoption("markexpr") or ""
    for item in items:
        for name, reason in OPT_IN.items():
            if item.get_closest_marker(name) and name not in expression:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    """One demo server for all tests that only read from it."""
    with running_demo(tmp_path_factory.mktemp("demo")) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The demo model, from the cache every process of this host shares; downloaded the first time."""
    return resolve_model("smollm2-135m")
