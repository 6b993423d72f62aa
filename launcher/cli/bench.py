"""`sonar bench offline|latency|serve`: flags to configurations; the measuring is in `launcher.bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from launcher.bench.arrivals import Arrival
from launcher.bench.datasets import DatasetConfig, DatasetKind
from launcher.cli.client_flags import add_client_flags, resolve_model, server_of
from launcher.cli.engine_flags import add_engine_flags, engine_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One parser a kind of measurement."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="offline|latency|serve")
    _add_serve(kinds.add_parser("serve", help="load a running server over HTTP"))
    _add_offline(kinds.add_parser("offline", help="throughput of the engine without a server"), latency=False)
    _add_offline(kinds.add_parser("latency", help="time of one batch, from submission to its last token"), latency=True)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Runs the chosen measurement. Returns 1 when a request failed."""
    runners: dict[str, Callable[[argparse.Namespace, Mapping[str, str]], int]] = {
        "serve": _run_serve,
        "offline": _run_offline,
        "latency": _run_offline,
    }
    return runners[args.kind](args, environ)


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Parser of "1,8,32"; argparse turns its ValueError into an error that names the flag."""

    def parse_list(text: str) -> tuple[Any, ...]:
        return tuple(parse(part) for part in text.split(","))

    return parse_list


def parse_extra(text: str) -> dict[str, Any]:
    """A JSON object; argparse names the flag when it is none."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("give a JSON object")
    return value


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_client_flags(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=_list_of(int), default=(), help="clients in a closed loop, e.g. 1,8,32")
    load.add_argument("--rate", type=_list_of(float), default=(), help="requests/s in an open loop, e.g. 0.5,1,2")
    load.add_argument("--arrival", choices=[kind.value for kind in Arrival], default=Arrival.POISSON.value)
    load.add_argument("--num-requests", type=int, default=0, help="per run (default: 8 a client or 10 s, at least 16)")
    load.add_argument("--num-warmup", type=int, default=2)
    load.add_argument("--timeout", type=float, default=600.0, help="s a request (default: 600)")
    load.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--stop-at-eos", action="store_true", help="let answers end early (default: ignore_eos is sent)")
    load.add_argument("--extra-body", type=parse_extra, default={}, help="JSON object of further request fields")
    prompts = parser.add_argument_group("prompts")
    _add_dataset(prompts, tuple(kind.value for kind in DatasetKind))
    prompts.add_argument("--dataset-path", default="", help="a prompt a line, or JSON lines with prompt and output_len")
    prompts.add_argument("--vocab-size", type=int, default=10000, help="random token ids are below it (default: 10000)")
    _add_outputs(parser, plot=True)


def _add_offline(parser: argparse.ArgumentParser, *, latency: bool) -> None:
    add_engine_flags(parser)
    work = parser.add_argument_group("work")
    if latency:
        work.add_argument("--batch-size", dest="num_prompts", type=int, default=1, help="requests at once (default: 1)")
    else:
        work.add_argument("--num-prompts", type=int, default=64, help="requests, all at once (default: 64)")
    work.add_argument("--num-iterations", type=int, default=10 if latency else 1, help="measured runs")
    work.add_argument("--num-warmup", type=int, default=1, help="runs before them (default: 1)")
    work.add_argument("--temperature", type=float, default=0.0)
    kinds = (DatasetKind.RANDOM.value, DatasetKind.SHARED_PREFIX.value)
    _add_dataset(parser.add_argument_group("prompts"), kinds)
    _add_outputs(parser, plot=False)


def _add_dataset(group: argparse._ArgumentGroup, kinds: tuple[str, ...]) -> None:
    group.add_argument("--dataset", choices=kinds, default=DatasetKind.RANDOM.value)
    group.add_argument("--input-len", type=int, default=128, help="tokens, or words of --dataset words (default: 128)")
    group.add_argument("--output-len", type=int, default=64, help="tokens (default: 64)")
    group.add_argument("--length-spread", type=float, default=0.0, help="0.5: lengths from half of the given to it")
    group.add_argument("--prefix-len", type=int, default=512, help="of --dataset shared-prefix")
    group.add_argument("--num-prefixes", type=int, default=1)
    group.add_argument("--dataset-seed", type=int, default=0)


def _add_outputs(parser: argparse.ArgumentParser, *, plot: bool) -> None:
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures there")
    if plot:
        parser.add_argument("--plot", default="", metavar="FILE", help="draw a picture (needs matplotlib)")


def _dataset(args: argparse.Namespace, **more: Any) -> DatasetConfig:
    return DatasetConfig(
        kind=DatasetKind(args.dataset),
        input_len=args.input_len,
        output_len=args.output_len,
        length_spread=args.length_spread,
        prefix_len=args.prefix_len,
        num_prefixes=args.num_prefixes,
        seed=args.dataset_seed,
        **more,
    )


def _run_serve(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from launcher.bench.serve import ServeBenchConfig, run_serve_bench

    server = server_of(args, environ)
    extra = {"temperature": args.temperature, **({} if args.stop_at_eos else {"ignore_eos": True}), **args.extra_body}
    config = ServeBenchConfig(
        url=server.url,
        model=resolve_model(server, args.model),
        dataset=_dataset(args, vocab_size=args.vocab_size, path=args.dataset_path),
        chat=args.chat,
        api_key=server.api_key,
        concurrencies=args.concurrency,
        rates=args.rate,
        arrival=Arrival(args.arrival),
        num_requests=args.num_requests,
        num_warmup=args.num_warmup,
        timeout_s=args.timeout,
        extra=extra,
        json_path=args.json,
        plot_path=args.plot,
    )
    return run_serve_bench(config)


def _run_offline(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from launcher.bench.offline import OfflineBenchConfig, run_latency_bench, run_offline_bench

    config = OfflineBenchConfig(
        engine=engine_config(args),
        dataset=_dataset(args),
        num_prompts=args.num_prompts,
        num_iterations=args.num_iterations,
        num_warmup=args.num_warmup,
        temperature=args.temperature,
        json_path=args.json,
    )
    return run_latency_bench(config) if args.kind == "latency" else run_offline_bench(config)
