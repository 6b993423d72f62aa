"""`sonar scale DEPLOYMENT N`: more or fewer replicas, or other roles; those that go drain first."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from cluster.operator_messages import ScaleDeployment
from launcher.operator import HeadContact, add_head_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which deployment, how many."""
    parser.add_argument("deployment", metavar="DEPLOYMENT", help="its name in the cluster's file")
    parser.add_argument("replicas", metavar="N", type=int, help="replicas; 0 stops it and keeps its name")
    parser.add_argument(
        "--prefill", metavar="N", type=int, default=None, help="of these, replicas that compute prompts for the others"
    )
    add_head_flags(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Asks the head. Raises `UserError` when there is no such deployment, or N is out of range."""
    with HeadContact.find(args, environ) as head:
        order = ScaleDeployment(name=args.deployment, replicas=args.replicas, prefill_replicas=args.prefill)
        print(head.order(order))
    return 0
