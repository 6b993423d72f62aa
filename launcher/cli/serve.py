"""`sonar serve MODEL`: a cluster of one on this host. Flags to settings, and the life of the server's record.

The model is found (downloaded, if need be) before anything starts, so that a wrong name or a full disk is said at once.
What runs is `cluster.local`; what is shown is `launcher.cli.progress`; `--detach` is `launcher.cli.detach`.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.cli.engine_flags import add_engine_flags, engine_config
from launcher.cli.ports import port_problem
from launcher.cli.progress import PhaseLine, StartDisplay
from launcher.cli.registration import Registration
from launcher.cli.state import StateDir
from sonar.config import EngineConfig
from sonar.errors import ConfigError
from sonar.model_config import load_model_config
from sonar.model_source import ModelSource, default_cache_dir, resolve_model

logger = logging.getLogger(__name__)

DEFAULT_PORT = 2242


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the server beside those of the engine."""
    add_engine_flags(parser)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    http.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0: any free one (default: {DEFAULT_PORT})")
    http.add_argument("--served-model-name", default="", help="what clients call the model (default: its own name)")
    http.add_argument("--api-key", action="append", default=[], help="repeatable; also $SONAR_API_KEYS, by commas")
    http.add_argument("--api-key-file", type=Path, default=None, help="a key a line")
    http.add_argument("--cors-origin", action="append", default=[], help="of browser pages; repeatable, * for any")
    http.add_argument(
        "--trust-request-chat-template", action="store_true", help="let requests bring their own (a program, sandboxed)"
    )
    http.add_argument(
        "--resumable-streams",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="streams outlive their connection unless the client says no (default: when it asks; docs/reliability.md)",
    )
    http.add_argument(
        "--resume-window", type=float, default=60.0, help="s that such a stream goes on without a reader (default: 60)"
    )
    pools = parser.add_argument_group("pools")
    pools.add_argument(
        "--disaggregated",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="one replica computes prompts, another decodes (docs/disaggregation.md)",
    )
    life = parser.add_argument_group("process")
    life.add_argument("--drain-timeout", type=float, default=30.0, help="s for open requests at the end (default: 30)")
    life.add_argument(
        "--keep-workers",
        type=float,
        default=0.0,
        metavar="S",
        help="s that the model stays loaded, for the next start to take over, if this process is killed (default: 0)",
    )
    life.add_argument(
        "--detach", action=argparse.BooleanOptionalAction, default=False, help="return once ready; see sonar stop"
    )
    life.add_argument("--ready-timeout", type=float, default=1800.0, help="s that --detach waits for (default: 1800)")
    parser.set_defaults(log_level="info")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT. Returns 0 then, 1 when it could not go on.

    Raises:
        UserError: a flag is wrong, the port is in use, or the model cannot be found.
    """
    state = StateDir.of_user(environ)
    _check_port(state, args.host, args.port)
    if not args.model.strip():
        raise ConfigError("MODEL is empty; give a folder, a .gguf file, a hub id or an alias", param="model")
    engine = engine_config(args)  # before a download: a wrong flag is said at once
    if args.disaggregated:
        engine = half_of_host(engine)
    if args.detach:
        from launcher.cli.detach import start_detached

        return start_detached(args.raw_arguments, state, args.port, args.ready_timeout)
    source = _find_model(engine, environ)
    load_model_config(source)  # reads headers alone: a bad file is said before anything starts
    return _serve(args, environ, state, engine, source)


def half_of_host(engine: EngineConfig) -> EngineConfig:
    """The settings of each of two replicas that share this host's cores and memory, and move KV blocks within it.

    Raises:
        ConfigError: blocks cannot be moved with these settings.
    """
    from sonar.worker.host import usable_cpus

    cache = engine.cache
    if not cache.memory_bytes:
        cache = replace(cache, memory_share=max(0.05, cache.memory_share / 2))
    return replace(
        engine,
        device="cpu" if engine.device == "auto" else engine.device,
        threads=engine.threads or max(1, usable_cpus() // 2),
        kv_transfer="shm" if engine.kv_transfer == "none" else engine.kv_transfer,
        cache=cache,
    )


def _check_port(state: StateDir, host: str, port: int) -> None:
    for record in state.records():
        if record.port == port:
            raise ConfigError(
                f"port {port} is in use by the server that pid {record.pid} runs for model {record.model}; "
                f"end it with `sonar stop --port {port}`, or choose another with --port",
                param="port",
            )
    if problem := port_problem(host, port):
        raise ConfigError(problem, param="port")


def _find_model(engine: EngineConfig, environ: Mapping[str, str]) -> ModelSource:
    line = PhaseLine(sys.stderr)
    try:
        return resolve_model(engine.model, engine.revision, default_cache_dir(environ), line.show)
    finally:
        line.end()


def api_keys(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Keys from flags, file and environment, without repeats.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
    keys = [*args.api_key, *filter(None, environ.get("SONAR_API_KEYS", "").split(","))]
    if args.api_key_file is not None:
        try:
            lines = [line.strip() for line in args.api_key_file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {args.api_key_file}: {error}", param="api_keys") from error
        found = [line for line in lines if line]
        if not found:
            raise ConfigError(f"--api-key-file {args.api_key_file} holds no key", param="api_keys")
        keys += found
    return tuple(dict.fromkeys(keys))


def deployment_name(model: str) -> str:
    """A name for ids, labels and file names: "org/My Model" -> "org-My-Model"."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-._")
    return name[:100] or "model"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; unknown names count as open."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    state: StateDir,
    engine: EngineConfig,
    source: ModelSource,
) -> int:
    from cluster.api.settings import ApiSettings
    from cluster.api.tokenizers import tokenizer_loader
    from cluster.config import TOKEN_FILE, DeploymentConfig, Timeouts
    from cluster.local import LocalOptions, serve_local
    from launcher.agent import local_agent_command
    from sonar import __version__

    keys = api_keys(args, environ)
    if not keys and not is_loopback(args.host):
        logger.warning("%s is open to other hosts and no API key is set: anyone who reaches it may use it", args.host)
    model = args.served_model_name or source.name
    options = LocalOptions(
        deployment=DeploymentConfig(
            name=deployment_name(model),
            served_name=model,
            engine_config=replace(engine, model=str(source.path), revision=None),
            replicas=2 if args.disaggregated else 1,
            prefill_replicas=1 if args.disaggregated else 0,
        ),
        state_dir=state.server_dir(args.port),
        http_host=args.host,
        http_port=args.port,
        api=ApiSettings(
            api_keys=keys,
            cors_origins=tuple(args.cors_origin),
            trust_request_chat_template=args.trust_request_chat_template,
            resumable_streams=args.resumable_streams,
            resume_window_s=args.resume_window,
            version=__version__,
        ),
        timeouts=Timeouts(drain_s=args.drain_timeout),
        keep_workers_s=args.keep_workers,
    )
    registration = Registration(state, args.host, model)
    token_file = str(options.state_dir / TOKEN_FILE)

    def register(port: int, control: str) -> str:
        return registration.register(port, control, token_file)

    display = StartDisplay(model, has_keys=bool(keys), on_listening=register)
    try:
        result = serve_local(
            options,
            load_tokenizer=tokenizer_loader(default_cache_dir(environ)),
            agent_command=local_agent_command(),
            observer=display,
        )
    finally:
        display.end()
        registration.remove()
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return result.exit_code
