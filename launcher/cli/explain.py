"""`sonar explain REQUEST`: one request's way through the cluster, with the time of each thing that happened to it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

from cluster.operator_messages import ExplainAsked, Explanation
from cluster.timelines import Timeline
from launcher.operator import HeadContact, add_head_flags
from sonar.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which request."""
    parser.add_argument(
        "request", metavar="REQUEST", help="an answer's id (cmpl-..., chatcmpl-...), an x-request-id, or a part of one"
    )
    parser.add_argument("--port", type=int, default=None, help="the server on this port of this host")
    add_head_flags(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Asks the head. Raises `UserError` when it knows no such request."""
    with HeadContact.find(args, environ) as head:
        answer = head.ask(ExplainAsked(request=args.request))
    assert isinstance(answer, Explanation), answer
    if not answer.timelines:
        raise UserError(
            f"request={args.request[:200]!r} is not among those that are open or the last that ended", param="request"
        )
    print("\n".join(timeline_lines(answer.timelines)))
    return 0


def timeline_lines(timelines: Sequence[Timeline]) -> list[str]:
    """One block a sequence: the clock's time of its start, then seconds since."""
    lines = []
    for timeline in timelines:
        begin_s = timeline.moments[0].at_s
        lines.append(f"{timeline.request_id}  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(begin_s))}")
        lines += [f"  {moment.at_s - begin_s:9.3f} s  {moment.text}" for moment in timeline.moments]
        if timeline.num_left_out:
            lines.append(f"  ({timeline.num_left_out} more before the last are left out)")
        if timeline.is_open:
            lines.append("  it is still open")
    return lines
