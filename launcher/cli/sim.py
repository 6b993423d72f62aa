"""`sonar sim`: the head's real code under thousands of fake hosts in simulated time; prints what it costs."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from cluster.garbage import avoid_collection_pauses
from cluster.sim.agent import LoadTimes
from cluster.sim.simulation import SimConfig, Simulation

_DEFAULT = SimConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to simulate."""
    add = parser.add_argument
    add("--nodes", type=int, default=_DEFAULT.nodes, help="hosts (default: %(default)s)")
    add("--devices", type=int, default=_DEFAULT.devices, help="accelerators of each (default: %(default)s)")
    add("--tp", type=int, nargs="+", default=list(_DEFAULT.tp_sizes), help="a deployment of each size, in equal shares")
    add(
        "--join-s", type=float, default=_DEFAULT.join_s, help="hosts join in random order within (default: %(default)s)"
    )
    add("--load-s", type=float, nargs=2, default=[1.0, 4.0], metavar=("MIN", "MAX"), help="of a replica's start")
    add("--steady-s", type=float, default=_DEFAULT.steady_s, help="of load without faults (default: %(default)s)")
    add("--requests-per-s", type=float, default=_DEFAULT.requests_per_s, help="then (default: %(default)s)")
    add("--churn-s", type=float, default=_DEFAULT.churn_s, help="of load with faults (default: %(default)s)")
    add("--churn-requests-per-s", type=float, default=_DEFAULT.churn_requests_per_s, help="(default: %(default)s)")
    add("--faults-per-s", type=float, default=_DEFAULT.faults_per_s, help="(default: %(default)s)")
    add("--heartbeat-s", type=float, default=_DEFAULT.heartbeat_s, help="between heartbeats (default: %(default)s)")
    add("--seed", type=int, default=0, help="of everything random (default: %(default)s)")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Simulates and prints the figures. Returns 1 when an invariant did not hold."""
    config = SimConfig(
        nodes=args.nodes,
        devices=args.devices,
        tp_sizes=tuple(args.tp),
        join_s=args.join_s,
        load=LoadTimes(*args.load_s),
        steady_s=args.steady_s,
        requests_per_s=args.requests_per_s,
        churn_s=args.churn_s,
        churn_requests_per_s=args.churn_requests_per_s,
        faults_per_s=args.faults_per_s,
        heartbeat_s=args.heartbeat_s,
        seed=args.seed,
    )
    avoid_collection_pauses()
    with tempfile.TemporaryDirectory(prefix="sonar-sim-") as folder:
        try:
            with closing(Simulation(config, Path(folder), lambda text: print(text, file=sys.stderr))) as simulation:
                report = simulation.run()
        except AssertionError as error:
            print(f"error: an invariant does not hold (seed {config.seed}): {error}", file=sys.stderr)
            return 1
    print(f"Python {platform.python_version()}, {platform.machine()}\n{report.text()}")
    return 0
