"""`sonar check`: is this host fit to join, and are the hosts of a running cluster fit for each other.

This host: memory, devices, versions, and against a head: name, route, port, token, delay, clock. With `--config`: the
file, and whether its ports are free. The cluster (through its head): everything `cluster.preflight` finds, after every
node has tried to reach every other. Prints a line a check; the exit code is 1 when something would keep the cluster
from working.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cluster.cluster_file import AUTO, read_cluster_file
from cluster.config import DEFAULT_CONTROL_PORT
from cluster.operator_messages import ProbeAsked, StatusAnswer, StatusAsked
from cluster.preflight import COMPARED, MAX_SKEW_S, Finding, cluster_findings, probe_findings
from cluster.security import read_token
from cluster.versions import installed_versions
from launcher.cli.ports import port_problem
from launcher.cli.state import StateDir
from launcher.hardware import inspect_hardware
from launcher.network import mtu_of, outward_address, route_to
from launcher.operator import HeadContact, add_head_flags
from sonar.errors import SonarError
from sonar.transport import Address, parse_address

PROBE_TIMEOUT_S = 8.0
POLL_S = 0.2
ROUND_TRIPS = 20


class Line(NamedTuple):
    """One result. is_fatal: the cluster cannot work so."""

    name: str
    text: str
    is_ok: bool = True
    is_fatal: bool = False

    def __str__(self) -> str:
        return f"{'ok  ' if self.is_ok else 'FAIL' if self.is_fatal else 'warn'}  {self.name}: {self.text}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which head, or which file before there is one."""
    add_head_flags(parser)
    parser.add_argument(
        "--config", type=Path, default=None, metavar="FILE", help="on the head's host, before its start"
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints what was found. Returns 1 when something is fatal."""
    state = StateDir.of_user(environ)
    is_sound = True
    for line in _all_lines(args, environ, state):
        print(line, flush=True)
        is_sound &= not line.is_fatal
    return 0 if is_sound else 1


def _all_lines(args: argparse.Namespace, environ: Mapping[str, str], state: StateDir) -> Iterator[Line]:
    yield from host_lines()
    if args.config is not None:
        yield from _file_lines(args.config, state)
        return
    if args.head:
        address = parse_address(args.head, DEFAULT_CONTROL_PORT)
        yield from _guarded("route", lambda: _route_text(address))
        if args.token_file is not None:
            yield from _guarded("token", lambda: f"{args.token_file} holds one" if read_token(args.token_file) else "")
    try:
        head = HeadContact.find(args, environ)
    except SonarError as error:
        yield Line("head", str(error), is_ok=False, is_fatal=True)
        return
    with head:
        yield from _head_lines(head)
        yield from _cluster_lines(head)


def host_lines() -> Iterator[Line]:
    """This host by itself."""
    facts = inspect_hardware()
    devices = f"{len(facts.devices)} accelerators" if facts.devices else "no accelerator"
    free = f"{facts.memory_available_bytes / 2**30:.1f} of {facts.memory_bytes / 2**30:.1f} GiB of memory free"
    yield Line("host", f"{facts.hostname}, {facts.cpu_cores} CPUs, {devices}, {free}")
    versions = installed_versions()
    has_torch = bool(versions["torch"])
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    yield Line("versions", text if has_torch else f"{text}; a host that computes needs torch", is_ok=has_torch)


def _file_lines(file: Path, state: StateDir) -> Iterator[Line]:
    """Before a head starts: the file, its address, its ports."""
    try:
        network = read_cluster_file(file, state.server_dir).config.network
        control = outward_address().address if network.control_host == AUTO else network.control_host
    except SonarError as error:
        yield Line("file", str(error), is_ok=False, is_fatal=True)
        return
    yield Line("file", f"{file} can be used; agents would join at {Address(control, network.control_port)}")
    for name, host, port in (
        ("HTTP port", network.http_host, network.http_port),
        ("control port", control, network.control_port),
    ):
        problem = port_problem(host, port)
        yield Line(name, problem or f"{Address(host, port)} is free", is_ok=not problem, is_fatal=bool(problem))


def _guarded(name: str, check: Callable[[], str]) -> Iterator[Line]:
    try:
        yield Line(name, check())
    except SonarError as error:
        yield Line(name, str(error), is_ok=False, is_fatal=True)


def _route_text(head: Address) -> str:
    route = route_to(head)
    return f"to {head} by {route}, MTU {mtu_of(route.interface)}"


def _head_lines(head: HeadContact) -> Iterator[Line]:
    """Delay, throughput, clock and versions against the head's."""
    began_s = time.monotonic()
    for _ in range(ROUND_TRIPS):
        answer = head.ask(StatusAsked())
    assert isinstance(answer, StatusAnswer), answer
    delay_ms = (time.monotonic() - began_s) / ROUND_TRIPS * 1000
    yield Line("head", f"answers at {head.address} in {delay_ms:.1f} ms (mean of {ROUND_TRIPS})")
    skew_s = time.time() - answer.unix_s
    is_right = abs(skew_s) <= MAX_SKEW_S
    remedy = "" if is_right else "; run a time service (chrony, systemd-timesyncd) on both"
    yield Line("clock", f"{skew_s:+.2f} s against the head's{remedy}", is_ok=is_right)
    ours = installed_versions()
    if ours["sonar"] != answer.versions.get("sonar"):
        text = f"Sonar {ours['sonar']} here, {answer.versions.get('sonar')} on the head: install the same on both"
        yield Line("versions", text, is_ok=False, is_fatal=True)
    for name in COMPARED:
        there = answer.versions.get(name, "")
        if there and ours[name] != there:
            yield Line("versions", f"{name} {ours[name] or 'missing'} here, {there} on the head", is_ok=False)


def _cluster_lines(head: HeadContact) -> Iterator[Line]:
    """Every host, as the head sees it, and every pair."""
    number = secrets.randbits(31)
    head.order(ProbeAsked(number=number))
    deadline_s = time.monotonic() + PROBE_TIMEOUT_S
    while True:
        answer = head.ask(StatusAsked())
        assert isinstance(answer, StatusAnswer), answer
        up = [node for node in answer.status.nodes if node.state == "up"]
        if all(node.probe_number == number for node in up) or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    findings = [*cluster_findings(answer.status, answer.versions), *probe_findings(answer.status, number)]
    yield from map(_finding_line, findings)
    if not findings:
        pairs = [seconds for node in up for seconds in node.reach.values()]
        slowest = f", the slowest pair in {max(pairs) * 1000:.2f} ms" if pairs else ""
        yield Line("cluster", f"{len(up)} nodes, {len(pairs)} directed pairs reach each other{slowest}")


def _finding_line(finding: Finding) -> Line:
    return Line(f"node {finding.node_id}", f"{finding.problem}; {finding.remedy}", False, finding.is_fatal)
