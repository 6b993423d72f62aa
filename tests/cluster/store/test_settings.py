"""[store] in cluster.toml, and the choice of a member."""

from __future__ import annotations

import pytest

from cluster.cluster_file import read_cluster_file
from cluster.store.etcd import EtcdStore
from cluster.store.registry import STORES, open_store
from cluster.store.settings import StoreConfig
from cluster.store.sqlite import SqliteStore
from sonar.errors import ConfigError

DEPLOYMENT = '[[deployment]]\nname = "chat"\nmodel = "smollm2-135m"\n'


def read(folder, text: str) -> StoreConfig:
    (folder / "cluster.toml").write_text(text + DEPLOYMENT)
    return read_cluster_file(folder / "cluster.toml", lambda port: folder / f"server-{port}").config.store


def test_every_key_lands_where_it_belongs(tmp_path) -> None:
    for name in ("password", "ca.pem", "client.pem", "client.key"):
        (tmp_path / name).write_text("x")
    text = """[store]
kind = "etcd"
endpoints = ["https://10.0.0.1:2379", "https://[fd00::1]:2379"]
prefix = "mine/"
user = "sonar"
password_file = "password"
ca_file = "ca.pem"
certificate = "client.pem"
private_key = "client.key"
timeout_s = 4
"""
    files = {
        "password_file": tmp_path / "password",
        "ca_file": tmp_path / "ca.pem",
        "certificate": tmp_path / "client.pem",
        "private_key": tmp_path / "client.key",
    }
    endpoints = ("https://10.0.0.1:2379", "https://[fd00::1]:2379")
    assert read(tmp_path, text) == StoreConfig("etcd", endpoints, "mine/", "sonar", **files, timeout_s=4.0)
    assert read(tmp_path, "") == StoreConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('kind = "redis"', "redis"),
        ('kind = "etcd"', "endpoints is empty"),
        ('endpoint = ["http://a:1"]', "did you mean endpoints"),
        ('kind = "etcd"\nendpoints = ["a:1"]', "is no http"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, words) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, f"[store]\n{text}\n")


def test_the_registry_opens_each_kind(tmp_path) -> None:
    config = {"sqlite": StoreConfig(), "etcd": StoreConfig("etcd", ("http://127.0.0.1:1",))}
    kinds = {"sqlite": SqliteStore, "etcd": EtcdStore}
    assert config.keys() == kinds.keys() == STORES.keys()
    for kind, settings in config.items():
        store = open_store(settings, tmp_path)
        assert isinstance(store, kinds[kind])
        store.close()
