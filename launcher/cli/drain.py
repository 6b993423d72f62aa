"""`sonar drain NODE`: takes a host out of work without breaking a stream; `--undo` gives it work again."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from cluster.operator_messages import DrainNode
from launcher.operator import HeadContact, add_head_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which node."""
    parser.add_argument("node", metavar="NODE", help="its id, as `sonar status` shows it")
    parser.add_argument("--undo", action="store_true", help="let it have work again")
    add_head_flags(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Asks the head. Raises `UserError` when there is no such node."""
    with HeadContact.find(args, environ) as head:
        print(head.order(DrainNode(node_id=args.node, drain=not args.undo)))
    return 0
