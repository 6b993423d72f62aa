"""`sonar restart DEPLOYMENT`: starts its replicas anew, one after the other, while the others serve."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from cluster.operator_messages import RestartDeployment
from launcher.operator import HeadContact, add_head_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which deployment."""
    parser.add_argument("deployment", metavar="DEPLOYMENT", help="its name in the cluster's file")
    add_head_flags(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Asks the head. Raises `UserError` when there is no such deployment."""
    with HeadContact.find(args, environ) as head:
        print(head.order(RestartDeployment(name=args.deployment)))
    return 0
