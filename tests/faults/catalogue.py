"""The faults of the suite: what is done to a fleet, and what mends it. A fault that mends by itself has no `mend`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.cable import Damage, bad_cable
from tests.faults.fleet import HEAD_DISK_BYTES, HEADS, STORE, Fleet
from tests.integration.hosts import in_namespace

Doing = Callable[[Fleet], AbstractContextManager[object]]
"""Enter: the fault is done. Exit: it is mended."""


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        hold_s: from the fault until it is mended.
        kills_head: a head that clients speak to ends, so that only durable requests outlive it.
        may_dip: for a while nothing serves, so that `/ready` has to say so; e.g. with the head gone.
        ends: incarnations that have to have ended by it, at least.
        is_quick: part of every run of the tests; the others only of `tests/run.sh faults`.
        fleet: the kind of fleet it needs.
    """

    name: str
    do: Doing
    hold_s: float = 0.0
    kills_head: bool = False
    may_dip: bool = False
    ends: int = 0
    is_quick: bool = False
    fleet: str = "plain"


def _at_once(act: Callable[[Fleet], object]) -> Doing:
    """A fault that Sonar mends by itself."""

    @contextlib.contextmanager
    def do(fleet: Fleet) -> Iterator[None]:
        act(fleet)
        yield

    return do


def _signal_rank(number: int, rank: int = 0) -> Doing:
    def act(fleet: Fleet) -> None:
        pid = fleet.busiest().pids[rank]
        fleet.strike()
        os.kill(pid, number)

    return _at_once(act)


def _signal_all_leads(number: int) -> Doing:
    def act(fleet: Fleet) -> None:
        pids = [replica.pids[0] for replica in fleet.replicas()]
        fleet.strike()
        for pid in pids:
            os.kill(pid, number)

    return _at_once(act)


def _agent_ends(number: int) -> Doing:
    """The agent of the busiest replica's host; it is started again at the end, as systemd would."""

    @contextlib.contextmanager
    def do(fleet: Fleet) -> Iterator[None]:
        node = fleet.busiest().node
        fleet.strike()
        fleet.agents[node].end(number)
        yield
        fleet.join(node)

    return do


@contextlib.contextmanager
def _agent_stops(fleet: Fleet) -> Iterator[None]:
    agent = fleet.agents[fleet.busiest().node].pid
    fleet.strike()
    os.kill(agent, signal.SIGSTOP)
    yield
    os.kill(agent, signal.SIGCONT)


def _head_ends(number: int) -> Doing:
    """Started again at once, as systemd would."""

    def act(fleet: Fleet) -> None:
        leader = fleet.leader()
        fleet.strike()
        fleet.head_processes[leader].end(number)
        fleet.start_head(leader)

    return _at_once(act)


@contextlib.contextmanager
def _head_stops(fleet: Fleet) -> Iterator[None]:
    pid = fleet.head_processes[fleet.leader()].pid
    fleet.strike()
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _partition(fleet: Fleet) -> Iterator[None]:
    host = fleet.nodes[fleet.busiest().node]
    fleet.strike()
    host.run("ip", "link", "set", "eth0", "down")
    yield
    host.run("ip", "link", "set", "eth0", "up")


def _cable(damage: Damage) -> Doing:
    def do(fleet: Fleet) -> AbstractContextManager[object]:
        host = fleet.nodes[fleet.busiest().node]
        fleet.strike()
        return bad_cable(fleet.network, host, damage)

    return do


@contextlib.contextmanager
def _lead_and_another_agent(fleet: Fleet) -> Iterator[None]:
    one, other = fleet.replicas()[:2]
    fleet.strike()
    os.kill(one.pids[0], signal.SIGKILL)
    fleet.agents[other.node].end(signal.SIGKILL)
    yield
    fleet.join(other.node)


@contextlib.contextmanager
def _lead_and_head(fleet: Fleet) -> Iterator[None]:
    pid = fleet.busiest().pids[0]
    fleet.strike()
    os.kill(pid, signal.SIGKILL)
    fleet.head_processes["head"].end(signal.SIGKILL)
    fleet.start_head("head")
    yield


@contextlib.contextmanager
def _disk_full(fleet: Fleet) -> Iterator[None]:
    """The head's folder is a small file system of its own; it is filled to the last byte."""
    ballast = fleet.heads["head"].folder / "state" / "ballast"
    assert shutil.disk_usage(ballast.parent).total <= HEAD_DISK_BYTES, "this would fill somebody's disk"
    fleet.strike()
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    yield
    ballast.unlink()


def _raises(rank: int, why: str = "") -> Doing:
    """why: "memory" for a tensor that no memory holds."""

    def act(fleet: Fleet) -> None:
        pid = fleet.busiest().pids[rank]
        order = Path(fleet.patches, "do", f"raise-{pid}")
        fleet.strike()
        order.write_text(why)
        fleet.wait(lambda: not order.exists(), "the step that raises has begun")

    return _at_once(act)


def _clock_jumps(seconds: float) -> Doing:
    @contextlib.contextmanager
    def do(fleet: Fleet) -> Iterator[None]:
        clock = Path(fleet.patches, "do", "clock")
        fleet.strike()
        clock.write_text(str(seconds))
        yield
        clock.unlink()

    return do


def _junk(fleet: Fleet) -> None:
    """Frames of strangers at the head's control port: noise, a cut-off greeting, a length beyond all bounds."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48)
    fleet.strike()
    for number in range(60):
        noise = (os.urandom(2000), greeting[: number + 1], greeting + b"\x02" + b"\xff" * 8 + bytes(100))[number % 3]

        def send(noise: bytes = noise) -> None:
            with contextlib.suppress(OSError), socket.create_connection((HEADS["head"], 2243), timeout=5) as handle:
                handle.sendall(noise)
                handle.settimeout(0.05)
                handle.recv(1000)

        in_namespace(fleet.nodes["node-3"].namespace, send)


@contextlib.contextmanager
def _leader_cut_off(fleet: Fleet) -> Iterator[None]:
    host = fleet.heads[fleet.leader()]
    fleet.strike()
    host.run("ip", "link", "set", "eth0", "down")
    yield
    host.run("ip", "link", "set", "eth0", "up")


def _standby_ends(fleet: Fleet) -> None:
    leader = fleet.leader()
    standby = next(name for name in fleet.heads if name != leader)
    fleet.strike()
    fleet.head_processes[standby].end(signal.SIGKILL)
    fleet.start_head(standby)


def _store_leader(fleet: Fleet) -> str:
    """The member of etcd that leads: the one whose id the members name."""
    statuses = {}
    for name in fleet.members:
        asked = (
            "curl",
            "-sS",
            "-X",
            "POST",
            "-d",
            "{}",
            f"http://{STORE}:{2379 + int(name[1:])}/v3/maintenance/status",
        )
        assert fleet.store is not None
        statuses[name] = json.loads(fleet.store.run(*asked).stdout)
    return next(name for name, told in statuses.items() if told["header"]["member_id"] == told["leader"])


@contextlib.contextmanager
def _store_leader_ends(fleet: Fleet) -> Iterator[None]:
    name = _store_leader(fleet)
    fleet.strike()
    fleet.members[name].end(signal.SIGKILL)
    yield
    fleet.start_member(name)


@contextlib.contextmanager
def _store_away(fleet: Fleet) -> Iterator[None]:
    fleet.strike()
    for member in fleet.members.values():
        os.kill(member.pid, signal.SIGSTOP)
    yield
    for member in fleet.members.values():
        os.kill(member.pid, signal.SIGCONT)


def _signal_role(role: str, number: int) -> Doing:
    """The lead of a replica of a pool."""

    def act(fleet: Fleet) -> None:
        pid = next(replica.pids[0] for replica in fleet.replicas() if replica.role == role)
        fleet.strike()
        os.kill(pid, number)

    return _at_once(act)


@contextlib.contextmanager
def _busy_cores(fleet: Fleet) -> Iterator[None]:
    """Every core has something else to do as well."""
    fleet.strike()
    others = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for other in others:
        other.kill()
        other.wait()


FAULTS = (
    Fault("lead: SIGKILL", _signal_rank(signal.SIGKILL), ends=1, is_quick=True),
    Fault("lead: SIGSTOP", _signal_rank(signal.SIGSTOP), ends=1),
    Fault("lead: SIGTERM", _signal_rank(signal.SIGTERM), ends=1),
    Fault("both leads: SIGKILL", _signal_all_leads(signal.SIGKILL), ends=2, may_dip=True),
    Fault("agent: SIGKILL", _agent_ends(signal.SIGKILL), ends=1, hold_s=1.0, is_quick=True),
    Fault("agent: SIGTERM", _agent_ends(signal.SIGTERM), ends=1, hold_s=1.0),
    Fault("agent: SIGSTOP for 6 s", _agent_stops, hold_s=6.0),
    Fault("head: SIGKILL", _head_ends(signal.SIGKILL), kills_head=True, is_quick=True, may_dip=True),
    Fault("head: SIGTERM", _head_ends(signal.SIGTERM), kills_head=True, may_dip=True),
    Fault("head: SIGSTOP for 5 s", _head_stops, hold_s=5.0, may_dip=True),
    Fault("lead and head: SIGKILL", _lead_and_head, kills_head=True, ends=1, may_dip=True),
    Fault("lead and another's agent: SIGKILL", _lead_and_another_agent, ends=2, hold_s=1.0, may_dip=True),
    Fault("host cut off for 6 s", _partition, ends=1, hold_s=6.0, is_quick=True),
    Fault("host cut off for 1 s", _partition, hold_s=1.0),
    Fault("host not heard, 6 s", _cable(Damage(one_way="from")), ends=1, hold_s=6.0),
    Fault("host hears nothing, 6 s", _cable(Damage(one_way="to")), ends=1, hold_s=6.0),
    Fault("link 200 ms late, 8 s", _cable(Damage(delay_s=0.2)), hold_s=8.0),
    Fault("link loses 30%, 8 s", _cable(Damage(loss=0.3)), hold_s=8.0),
    Fault("link damages 10% of frames, 8 s", _cable(Damage(corrupt=0.1)), hold_s=8.0),
    Fault("strangers' frames at the control port", _at_once(_junk)),
    Fault("head's disk full for 4 s", _disk_full, hold_s=4.0),
    Fault("no memory in a rank", _raises(0, "memory"), ends=1),
    Fault("a rank raises", _raises(0), ends=1),
    Fault("clock an hour ahead, 4 s", _clock_jumps(3600.0), hold_s=4.0),
    Fault("clock an hour behind, 4 s", _clock_jumps(-3600.0), hold_s=4.0),
    Fault("every core busy, 6 s", _busy_cores, hold_s=6.0),
    Fault("tp=2, lead: SIGKILL", _signal_rank(signal.SIGKILL), ends=1, fleet="tp"),
    Fault("tp=2, follower: SIGKILL", _signal_rank(signal.SIGKILL, 1), ends=1, fleet="tp"),
    Fault("tp=2, follower: SIGSTOP", _signal_rank(signal.SIGSTOP, 1), ends=1, fleet="tp"),
    Fault("tp=2, a follower raises", _raises(1), ends=1, fleet="tp"),
    Fault("pp=2, last stage: SIGKILL", _signal_rank(signal.SIGKILL, 1), ends=1, fleet="pp"),
    Fault("pp=2, first stage: SIGSTOP", _signal_rank(signal.SIGSTOP), ends=1, fleet="pp"),
    Fault("pools, prefill: SIGKILL", _signal_role("prefill", signal.SIGKILL), ends=1, fleet="pools"),
    Fault("pools, prefill: SIGSTOP", _signal_role("prefill", signal.SIGSTOP), ends=1, fleet="pools"),
    Fault("pools, decode: SIGKILL", _signal_role("decode", signal.SIGKILL), ends=1, fleet="pools"),
    Fault(
        "of two heads, the leader: SIGKILL", _head_ends(signal.SIGKILL), kills_head=True, may_dip=True, fleet="heads"
    ),
    Fault(
        "of two heads, the leader: SIGTERM", _head_ends(signal.SIGTERM), kills_head=True, may_dip=True, fleet="heads"
    ),
    Fault(
        "of two heads, the leader: SIGSTOP for 8 s",
        _head_stops,
        hold_s=8.0,
        kills_head=True,
        may_dip=True,
        fleet="heads",
    ),
    Fault(
        "of two heads, the leader cut off for 8 s",
        _leader_cut_off,
        hold_s=8.0,
        kills_head=True,
        may_dip=True,
        fleet="heads",
    ),
    Fault("of two heads, the standby: SIGKILL", _at_once(_standby_ends), kills_head=True, fleet="heads"),
    Fault("etcd's leader of 3: SIGKILL, back after 4 s", _store_leader_ends, hold_s=4.0, fleet="heads"),
    Fault("etcd stopped for 6 s, all 3 members", _store_away, hold_s=6.0, fleet="heads"),
)
