"""cluster.toml: every key lands where it belongs, every mistake is named with place, value and remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.cluster_file import AUTO, HeadSettings, read_cluster_file
from sonar.errors import ConfigError

SMALL = '[[deployment]]\nname = "chat"\nmodel = "smollm2-135m"\n'
FULL = """
state_dir = "state"
[network]
host = "fd00::1"
control_port = 4000
[http]
host = "0.0.0.0"
port = 8000
certificate = "c.pem"
private_key = "k.pem"
cors_origins = ["*"]
max_body_bytes = "2MiB"
[security]
token_file = "/run/token"
api_key_file = "keys"
[nodes]
expected = ["a", "b"]
min = 3
join_timeout_s = 5
exit_when_missing = true
head_runs_workers = false
[timeouts]
heartbeat_timeout_s = 4
[restart]
crash_limit = 9
[[deployment]]
name = "chat"
model = "./weights"
replicas = 3
tp = 2
served_name = "org/chat"
max_queued = 7
[deployment.engine]
dtype = "float32"
threads = 2
[deployment.cache]
memory_bytes = "4 GiB"
block_size = 32
[deployment.scheduler]
max_num_requests = 8
[[deployment]]
name = "other"
model = "org/other"
runtime = "fake"
"""


def read(folder: Path, text: str) -> HeadSettings:
    file = folder / "cluster.toml"
    file.write_text(text)
    return read_cluster_file(file, lambda port: folder / f"state-{port}")


def test_a_small_file_takes_the_defaults(tmp_path: Path) -> None:
    settings = read(tmp_path, SMALL)
    config = settings.config
    assert config.state_dir == tmp_path / "state-2242"
    assert (config.network.http_host, config.network.http_port) == ("127.0.0.1", 2242)
    assert (config.network.control_host, config.network.control_port) == (AUTO, 2243)
    assert config.deployments[0].replicas == 1 and config.deployments[0].engine_config.model == "smollm2-135m"
    assert settings.head_runs_workers and settings.api.api_keys == ()


def test_every_key_lands_where_it_belongs(tmp_path: Path) -> None:
    for name in ("c.pem", "k.pem", "keys"):
        (tmp_path / name).write_text("one\n\ntwo\none\n")
    settings = read(tmp_path, FULL)
    config, api = settings.config, settings.api
    assert config.state_dir == tmp_path / "state" and str(config.token_path) == "/run/token"
    assert (config.network.control_host, config.network.control_port) == ("fd00::1", 4000)
    assert config.network.tls is not None and config.network.tls.private_key == tmp_path / "k.pem"
    assert api.cors_origins == ("*",) and api.max_body_bytes == 2 << 20 and api.api_keys == ("one", "two")
    nodes = config.nodes
    assert (nodes.expected, nodes.min, nodes.join_timeout_s, nodes.exit_when_missing) == (("a", "b"), 3, 5.0, True)
    assert not settings.head_runs_workers
    assert config.timeouts.heartbeat_timeout_s == 4.0 and config.restart.crash_limit == 9
    chat, other = config.deployments
    assert (chat.model, chat.replicas, chat.max_queued, chat.engine) == ("org/chat", 3, 7, "sonar")
    engine = chat.engine_config
    assert engine.model == str(tmp_path / "weights") and engine.parallel.tp_size == 2
    assert (engine.dtype, engine.threads, engine.cache.block_size) == ("float32", 2, 32)
    assert engine.cache.memory_bytes == 4 << 30 and engine.scheduler.max_num_requests == 8
    assert other.engine == "fake" and other.engine_config.model == "org/other"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["deployment", "[[deployment]]"]),
        ("[netwrok]\n" + SMALL, ["netwrok", "did you mean network?"]),
        ("[network]\nprot = 1\n" + SMALL, ["[network] prot = 1", "control_port"]),
        ('[http]\nport = "80"\n' + SMALL, ["[http] port = '80'", "whole number"]),
        ("[http]\nport = true\n" + SMALL, ["[http] port = True", "whole number"]),
        ("[http]\nport = 70000\n" + SMALL, ["[network]", "http_port=70000", "choose 0 to 65535"]),
        ('[http]\ncertificate = "c.pem"\n' + SMALL, ["certificate", "HTTPS needs both"]),
        ("[timeouts]\ndrain_s = -1\n" + SMALL, ["[timeouts]", "drain_s=-1", "must be above 0"]),
        ('[nodes]\nexpected = "a"\n' + SMALL, ["[nodes] expected = 'a'", "list of texts"]),
        ("deployment = 3\n", ["deployment = 3", "[[deployment]]"]),
        ('[[deployment]]\nname = "x"\n', ["[[deployment]] x", "model", "missing"]),
        (SMALL + "replica = 2\n", ["[[deployment]] chat replica = 2", "did you mean replicas?"]),
        (SMALL + "replicas = 2.5\n", ["replicas = 2.5", "whole number"]),
        (SMALL + "replicas = -1\n", ["[[deployment]] chat", "replicas=-1"]),
        (SMALL + '[deployment.engine]\ndtype = "int4"\n', ["[[deployment]] chat", "dtype = 'int4'", "'bfloat16'"]),
        (SMALL + "[deployment.engine]\ncache = 1\n", ["cache"]),
        (SMALL + '[deployment.cache]\nmemory_bytes = "4 apples"\n', ["4 apples", "512MiB"]),
        (SMALL + "[deployment.cache]\nblock_size = 7\n", ["block_size=7", "choose 8, 16"]),
        (SMALL + SMALL, ["'chat' is given twice"]),
        ("x = [", ["is no TOML"]),
        ('[security]\napi_key_file = "nowhere"\n' + SMALL, ["api_key_file", "nowhere"]),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert [word for word in [*words, str(tmp_path)] if word not in str(caught.value)] == [], caught.value


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        read_cluster_file(tmp_path / "nowhere.toml", Path)


def test_the_files_of_the_documentation_can_be_read(tmp_path: Path) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    for name in ("keys.txt", "chain.pem", "key.pem"):
        (tmp_path / name).write_text("one\n")
    texts = [
        text for page in docs.glob("*.md") for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    files = [text.replace("/etc/sonar/", "") for text in texts if "[[deployment]]" in text]
    assert len(files) >= 2
    assert {read(tmp_path, text).config.deployments[0].name for text in files} == {"chat"}
