"""`sonar join HEAD[:PORT] --token-file FILE`: makes this host one of a cluster's.

A thin face of `launcher.agent`, which runs in this process until it is told to end. The head may come later than its
hosts, and come and go.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from cluster.config import DEFAULT_CONTROL_PORT
from launcher import agent
from launcher.cli.state import StateDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The head's address, and the agent's flags."""
    parser.add_argument(
        "head",
        metavar="HEAD[:PORT][,HEAD...]",
        help=f"as `sonar head` says it (port: {DEFAULT_CONTROL_PORT}); of several heads all, separated by commas",
    )
    parser.add_argument("--state-dir", type=Path, default=None, help="for logs (default: agent-NODE in the user's)")
    agent.add_arguments(parser)
    parser.set_defaults(log_level="info", parent_pid=0)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Serves until SIGTERM, SIGINT or the head's word. Returns 0 then, 3 when the head refused this host.

    Raises:
        ConfigError: a flag is wrong, the head's name means nothing, or no route leads there.
        SonarError: the token is not that head's, or no head answered in time.
    """
    if args.state_dir is None:
        args.state_dir = StateDir.of_user(environ).path / f"agent-{args.node_id}"
    return agent.run_agent(args)
