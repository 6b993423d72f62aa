"""The `sonar` command: finds the subcommand, loads only its module, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 the caller's fault (arguments, configuration), 3 nothing running, 130 interrupted.
Environment variables are read here and nowhere below: SONAR_URL and SONAR_API_KEY (or OPENAI_API_KEY) for clients,
SONAR_API_KEYS for the server, XDG_STATE_HOME and XDG_CACHE_HOME. Knows nothing of engines or HTTP.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from sonar.errors import SonarError, UserError

# name -> (module, help). A module is imported only when its command is used: `sonar --help` costs no torch.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("launcher.cli.serve", "serve a model over HTTP from this machine"),
    "head": ("launcher.cli.head", "run the head of a cluster of many hosts"),
    "join": ("launcher.cli.join", "make this host one of a cluster's"),
    "plan": ("launcher.cli.plan", "show where every rank of a cluster would run"),
    "up": ("launcher.cli.up", "head here, and hosts over ssh"),
    "check": ("launcher.cli.check", "is this host fit to join, are a cluster's hosts fit for each other"),
    "chat": ("launcher.cli.chat", "talk to a served model in the terminal"),
    "bench": ("launcher.cli.bench", "measure: offline, latency, serve"),
    "sim": ("launcher.cli.sim", "simulate a cluster of thousands of hosts under the head's real code"),
    "status": ("launcher.cli.status", "servers of this user; nodes and replicas of a cluster"),
    "explain": ("launcher.cli.explain", "what happened to one request, and when"),
    "drain": ("launcher.cli.drain", "take a host of a cluster out of work"),
    "scale": ("launcher.cli.scale", "change a deployment's number of replicas"),
    "restart": ("launcher.cli.restart", "start a deployment's replicas anew, one after the other"),
    "rm": ("launcher.cli.rm", "serve a deployment no more"),
    "stop": ("launcher.cli.stop", "end a running server"),
    "version": ("launcher.cli.version", "print versions of Sonar, Python and what matters"),
}
LOG_LEVELS = ("debug", "info", "warning", "error")


class Command(Protocol):
    """What a subcommand's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's flags."""
        ...

    def run(self, args: argparse.Namespace, environ: Mapping[str, str]) -> int:
        """Does the work; returns the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `sonar` script. Returns the exit code; argparse itself exits with 2 on bad flags."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        return _top_level(arguments)
    name, *rest = arguments
    module_name, summary = COMMANDS[name]
    command = cast(Command, importlib.import_module(module_name))
    # No abbreviations: a flag that a later release adds must not change what a script means.
    parser = argparse.ArgumentParser(prog=f"sonar {name}", description=summary, allow_abbrev=False)
    parser.set_defaults(log_level="warning")
    command.add_arguments(parser)
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="default: %(default)s; debug: with tracebacks")
    args = parser.parse_args(rest)
    args.raw_arguments = rest
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if args.log_level == "info":
        for noisy in ("uvicorn", "httpx", "httpcore"):  # a line a request, and what the head says itself
            logging.getLogger(noisy).setLevel(logging.WARNING)
    return _guarded(command, args)


def _guarded(command: Command, args: argparse.Namespace) -> int:
    """Runs a command; an error is one line on stderr, with its traceback only at log level debug."""
    try:
        return command.run(args, os.environ)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing to say, and nowhere to say it
        return 1
    except (SonarError, OSError) as error:
        _print_error(str(error), args.log_level)
        return 2 if isinstance(error, UserError) else 1
    except Exception as error:  # noqa: BLE001 - the last line of defence
        hint = "" if args.log_level == "debug" else " (traceback: --log-level debug)"
        _print_error(f"internal: {type(error).__name__}: {error}{hint}", args.log_level)
        return 1


def _print_error(text: str, log_level: str) -> None:
    if log_level == "debug":
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr)


def _top_level(arguments: list[str]) -> int:
    """`sonar`, `sonar --help`, `sonar --version`, or an unknown command."""
    if arguments[:1] == ["--version"]:
        return _guarded_version()
    lines = [f"  {name:<9} {summary}" for name, (_, summary) in COMMANDS.items()]
    text = "\n".join(["usage: sonar COMMAND [flags]", "", *lines, "", "sonar COMMAND --help lists a command's flags"])
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(text)
        return 0
    print(f"error: unknown command {arguments[0]!r}\n{text}", file=sys.stderr)
    return 2


def _guarded_version() -> int:
    from sonar import __version__

    print(__version__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
