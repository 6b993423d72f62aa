"""Real processes on real hosts under load, one fault after the other: every accepted request ends, each output is that
of the run without faults, no event is missing or doubled, no block of KV memory and no process is left behind.

`tests/run.sh faults` runs all and prints the table of docs/reliability.md; otherwise a fixed few run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.catalogue import FAULTS, Fault
from tests.faults.fleet import KINDS, MODEL, Fleet
from tests.faults.history import Output, check, check_owners
from tests.faults.load import Load, is_stream
from tests.faults.patches import SITECUSTOMIZE
from tests.faults.report import Result
from tests.integration.hosts import running_network
from tests.tiny import write_tiny_folder

WARM_S = 2.0  # of load before the fault
AFTER_S = 1.5  # of load when the fleet is whole again


@dataclass
class Ground:
    """A fleet with the outputs it gives when nothing happens."""

    fleet: Fleet
    expected: dict[str, Output]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_tiny_folder("llama", tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return str(folder)


class Grounds:
    """Owner of the one fleet that runs: it outlives each test that it came through whole."""

    def __init__(self, model: str, folder_of: Callable[[str], Path]) -> None:
        self._model = model
        self._folder_of = folder_of
        self._kind = ""
        self._ground: Ground | None = None
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def using(self, kind: str) -> Iterator[Ground]:
        """A fleet of that kind, with every replica ready."""
        if self._ground is None or self._kind != kind:
            self.close()
            self._kind, folder = kind, self._folder_of(kind)
            self._ground = self._stack.enter_context(running_fleet(kind, self._model, folder))
        try:
            self._ground.fleet.wait_until_whole()
            yield self._ground
        except BaseException:
            self._ground = None
            raise

    def close(self) -> None:
        """Ends the fleet; one that has not failed has to end in good order."""
        if self._ground is not None:
            self._ground.fleet.stop()
        self._ground = None
        self._stack.close()


@pytest.fixture(scope="module")
def grounds(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grounds]:
    grounds = Grounds(model, tmp_path_factory.mktemp)
    try:
        yield grounds
    finally:
        grounds.close()


@contextlib.contextmanager
def running_fleet(kind: str, model: str, folder: Path) -> Iterator[Ground]:
    (folder / "patches" / "do").mkdir(parents=True)
    (folder / "patches" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    with running_network(folder, "f") as network, contextlib.ExitStack() as stack:
        fleet = Fleet(network, model, folder / "join.token", str(folder / "patches"), KINDS[kind])
        stack.callback(fleet.close)
        fleet.start()
        yield Ground(fleet, Load(fleet.client.namespace, fleet.urls, MODEL).once())


def each_fault() -> list[object]:
    return [
        pytest.param(fault, id=re.sub(r"\W+", "-", fault.name), marks=() if fault.is_quick else pytest.mark.faults)
        for fault in FAULTS
    ]


@pytest.mark.parametrize("fault", each_fault())
def test_fault(fault: Fault, grounds: Grounds, request: pytest.FixtureRequest) -> None:
    with grounds.using(fault.fleet) as ground:
        result = suffer(fault, ground)
    request.config.stash.setdefault(Result.KEY, []).append(result)


def suffer(fault: Fault, ground: Ground) -> Result:
    """Does the fault under load, and checks everything that has to hold whatever the fault."""
    fleet = ground.fleet
    before = fleet.num_incarnations()
    load = Load(fleet.client.namespace, fleet.urls, MODEL, only_durable=fault.kills_head)
    load.begin()
    try:
        time.sleep(WARM_S)
        with fault.do(fleet):
            time.sleep(fault.hold_s)
        fleet.wait(lambda: fleet.num_incarnations() >= before + fault.ends, "a replica is started anew")
        whole_s = fleet.wait_until_whole()
        time.sleep(AFTER_S)
    finally:
        load.drain()
    check(load.records, ground.expected)
    check_owners(fleet.owners)
    fleet.check_memory()
    fleet.check_processes()
    hit = [record for record in load.records if record.is_open(fleet.struck_s)]
    streams = [record for record in hit if is_stream(record.variant)]
    assert streams, "no stream was open"
    if not fault.may_dip:
        assert all(is_ready for _, is_ready in load.ready), "/ready was not 200 although a replica served"
    return Result(
        fault.name,
        len(load.records),
        len(hit),
        sorted(record.longest_pause_s(fleet.struck_s, whole_s) for record in streams),
        _not_ready_s(load.ready),
        whole_s - fleet.struck_s,
        sum(record.refusals for record in load.records),
    )


def _not_ready_s(samples: list[tuple[float, bool]]) -> float:
    """How long `/ready` was not 200."""
    return sum(after - at for (at, is_ready), (after, _) in itertools.pairwise(samples) if not is_ready)
