"""What only etcd has: TLS, users, several members, compaction, endpoints that are gone. Real servers."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from cluster.store.contract import Change, News, StoreUnavailableError
from cluster.store.etcd import EtcdStore, end_of
from cluster.store.etcd_gateway import EtcdError, EtcdGateway, encode, read_error
from cluster.store.settings import StoreConfig
from sonar.errors import ConfigError
from tests.cluster.store.etcd_server import Certificates, EtcdServers, free_ports, needs_etcd

PASSWORD = "a pass word"


def enable_users(servers: EtcdServers) -> None:
    """User "sonar" may use what begins with "sonar/"."""
    gateway = EtcdGateway(servers.config())
    permission = {"permType": "READWRITE", "key": encode("sonar/"), "range_end": encode(end_of("sonar/"))}
    for path, body in (
        ("user/add", {"name": "root", "password": "root's own"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("role/add", {"name": "cluster"}),
        ("role/grant", {"name": "cluster", "perm": permission}),
        ("user/add", {"name": "sonar", "password": PASSWORD}),
        ("user/grant", {"user": "sonar", "role": "cluster"}),
        ("enable", {}),
    ):
        gateway.call(f"/v3/auth/{path}", body)
    gateway.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """An etcd server with TLS, client certificates and users, and a config that gets in."""
    folder = tmp_path_factory.mktemp("guarded")
    servers = EtcdServers(folder, certificates=Certificates(folder))
    try:
        servers.start()
        enable_users(servers)
        (folder / "password").write_text(PASSWORD + "\n")
        (folder / "wrong").write_text("wrong\n")
        yield servers, servers.config(user="sonar", password_file=folder / "password")
    finally:
        servers.stop()


@pytest.fixture
def three(tmp_path):
    servers = EtcdServers(tmp_path, count=3)
    try:
        yield servers.start()
    finally:
        servers.stop()


@needs_etcd
def test_with_tls_and_a_user_all_of_the_contract_works(guarded) -> None:
    _, config = guarded
    store = EtcdStore(config)
    store.put("a", b"1")
    lease = store.lease(5.0)
    assert store.compare_and_set("b", None, b"2", lease) and lease.refresh()
    assert store.items("") == {"a": b"1", "b": b"2"}
    watch = store.watch("")
    assert watch.next(1.0) == News(True, [Change("a", b"1"), Change("b", b"2")])
    lease.revoke()
    assert watch.next(5.0) == News(False, [Change("b", None)])
    store._gateway._token = "out of date"
    assert store.get("a") == b"1", "a token that is not taken is renewed"
    watch.close()
    store._gateway._token = "out of date"
    store.put("c", b"3")
    store._gateway._token = "out of date"
    assert watch.next(5.0) == News(False, [Change("c", b"3")]), "by a watch too"
    watch.close()
    store.close()


@needs_etcd
def test_strangers_stay_out(guarded, tmp_path) -> None:
    servers, config = guarded
    with pytest.raises(EtcdError, match="refused the user 'sonar'"):
        EtcdStore(servers.config(user="sonar", password_file=servers.folder / "wrong")).get("a")
    with pytest.raises(EtcdError, match="permission denied"):
        EtcdStore(servers.config(prefix="other/", user="sonar", password_file=config.password_file)).get("a")
    with pytest.raises(EtcdError, match="refused /v3/kv/range"):
        EtcdStore(servers.config()).get("a")  # no user
    plain = StoreConfig("etcd", tuple(servers.urls), ca_file=config.ca_file, timeout_s=1.0)
    with pytest.raises(StoreUnavailableError):
        EtcdStore(plain).get("a")  # no certificate
    with pytest.raises(StoreUnavailableError, match=r"(?i)certificate"):
        EtcdStore(StoreConfig("etcd", tuple(servers.urls), timeout_s=1.0)).get("a")  # its authority is not ours


@needs_etcd
def test_the_leader_dies_and_all_goes_on(three) -> None:
    store = EtcdStore(three.config())
    watch = store.watch("")
    assert watch.next(1.0) == News(True, [])
    lease = store.lease(10.0)
    assert store.compare_and_set("leased", None, b"1", lease)
    stop, written, seen = threading.Event(), [], []

    def write() -> None:
        while not stop.is_set():
            key = f"n/{len(written):04d}"
            assert store.compare_and_set(key, None, b"x")
            written.append((key, time.monotonic()))

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.5)
    three.kill(three.leader())
    killed_s = time.monotonic()
    while not written or written[-1][1] < killed_s + 1.0:
        assert time.monotonic() < killed_s + 20 and writer.is_alive()
        time.sleep(0.1)
    stop.set()
    writer.join(20)
    assert lease.refresh() and store.get("leased") == b"1"
    while len(seen) < len(written) + 1:
        news = watch.next(5.0)
        assert news is not None and not news.is_reset, (len(seen), len(written))
        seen += [change.key for change in news.changes]
    assert seen == ["leased", *(key for key, _ in written)], "each once, in order"
    three.kill(next(index for index, process in enumerate(three.processes) if process.poll() is None))
    gone = EtcdStore(three.config(timeout_s=2.0))
    with pytest.raises(StoreUnavailableError, match="no etcd endpoint answered"):
        gone.put("a", b"1")  # one of three is no majority
    for one in (store, gone):
        one.close()


@needs_etcd
def test_a_watch_behind_a_compaction_lists_again(etcd) -> None:
    store = EtcdStore(etcd.config(prefix="compacted/"))
    watch = store.watch("")
    store.put("a", b"0")
    assert watch.next(1.0) == News(True, [Change("a", b"0")])
    for number in range(5):
        store.put("a", str(number).encode())
    store.compare_and_set("a", b"4", None)
    store.put("b", b"1")
    revision = store._gateway.call("/v3/kv/range", {"key": encode("x")}).body["header"]["revision"]
    store._gateway.call("/v3/kv/compaction", {"revision": revision})
    assert watch.next(5.0) == News(True, [Change("b", b"1")])
    store.put("c", b"2")
    assert watch.next(5.0) == News(False, [Change("c", b"2")])
    watch.close()
    store.close()


@needs_etcd
def test_an_endpoint_that_is_gone_is_passed_over(etcd) -> None:
    (free,) = free_ports(1)
    store = EtcdStore(etcd.config(urls=(f"http://127.0.0.1:{free}", *etcd.urls), prefix="over/"))
    store.put("a", b"1")
    assert store.get("a") == b"1" and store._gateway.endpoint == etcd.urls[0]
    store.close()


def test_nobody_there_is_a_clear_error() -> None:
    (free,) = free_ports(1)
    store = EtcdStore(StoreConfig("etcd", (f"http://127.0.0.1:{free}",), timeout_s=0.5))
    with pytest.raises(StoreUnavailableError, match=rf"within 0.5 s; last: http://127.0.0.1:{free}"):
        store.get("a")
    watch = store.watch("")
    with pytest.raises(StoreUnavailableError):
        watch.next(0.1)


@pytest.mark.parametrize(("found", "is_ours"), [("mine", True), ("other", False)])
def test_an_answer_that_was_lost_is_not_taken_for_a_refusal(found, is_ours) -> None:
    """The first attempt's answer is lost; the second finds the key there."""
    attempts = []

    def answer(request: httpx.Request) -> httpx.Response:
        attempts.append(request)
        if len(attempts) == 1:
            raise httpx.ReadError("reset", request=request)
        kvs = [{"key": encode("sonar/k"), "value": encode(found)}]
        return httpx.Response(200, json={"responses": [{"response_range": {"kvs": kvs}}]})

    store = EtcdStore(StoreConfig("etcd", ("http://127.0.0.1:1",)))
    store._gateway._client = httpx.Client(transport=httpx.MockTransport(answer))
    assert store.compare_and_set("k", None, b"mine") is is_ours
    assert len(attempts) == 2


def test_a_refusal_is_read_whatever_follows_it() -> None:
    assert read_error(b'{"error":"no","code":5}Grpc-Trailer-Content-Type: application/grpc') == (5, "no")
    assert read_error(b"<html>bad gateway</html>")[0] == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "etcd"}, "endpoints is empty"),
        ({"kind": "etcd", "endpoints": ("10.0.0.1:2379",)}, "is no http"),
        ({"user": "a"}, "user and password_file belong together"),
        ({"ca_file": "missing"}, "ca_file='.*missing' is no file"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_a_wrong_setting_names_field_and_remedy(settings, words, tmp_path) -> None:
    if "ca_file" in settings:
        settings = {"ca_file": tmp_path / "missing"}
    with pytest.raises(ConfigError, match=words):
        StoreConfig(**settings)


def test_a_file_that_is_no_certificate_is_a_clear_error(tmp_path) -> None:
    (tmp_path / "ca.pem").write_text("junk")
    with pytest.raises(ConfigError, match="PEM form"):
        EtcdStore(StoreConfig("etcd", ("https://127.0.0.1:1",), ca_file=tmp_path / "ca.pem"))
