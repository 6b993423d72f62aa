"""Real etcd servers on loopback for tests: one or three members, plain or with TLS and user authentication."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from cluster.store.etcd_gateway import EtcdGateway
from cluster.store.settings import StoreConfig

START_S = 20.0
# Debian's package; `--unsafe-no-fsync`: a test's data need not survive a power cut.
ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="etcd is not installed; apt-get install etcd-server")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Certificates:
    """An authority, a server's certificate for 127.0.0.1 and a client's. PEM files in one folder."""

    folder: Path

    def __post_init__(self) -> None:
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                      "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
        # No common name: etcd's gateway shows the server's own certificate to the server, and must not pass for a user.
        for name, subject in (("server", "/O=test"), ("client", "/O=test")):
            self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", subject,
                          "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
            (self.folder / "extensions").write_text("subjectAltName=IP:127.0.0.1")
            self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                          "-days", "2", "-extfile", "extensions", "-out", f"{name}.pem")  # fmt: skip

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=20)


@dataclass
class EtcdServers:
    """Members of one etcd cluster; a test ends them with `stop`."""

    folder: Path
    count: int = 1
    certificates: Certificates | None = None
    urls: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> EtcdServers:
        scheme = "https" if self.certificates else "http"
        ports = free_ports(2 * self.count)
        self.urls = [f"{scheme}://127.0.0.1:{port}" for port in ports[: self.count]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[self.count :]]
        members = ",".join(f"m{index}={peer}" for index, peer in enumerate(peers))
        for index, (url, peer) in enumerate(zip(self.urls, peers)):
            self.processes.append(self._start_one(index, url, peer, members))
        self._wait()
        return self

    def _start_one(self, index: int, url: str, peer: str, members: str) -> subprocess.Popen[bytes]:
        assert ETCD is not None
        flags = {
            "--name": f"m{index}",
            "--data-dir": str(self.folder / f"m{index}"),
            "--listen-client-urls": url,
            "--advertise-client-urls": url,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": members,
            "--heartbeat-interval": "50",
            "--election-timeout": "500",
        }
        words = [word for pair in flags.items() for word in pair]
        if self.certificates:
            tls = self.certificates.folder
            words += ["--cert-file", f"{tls}/server.pem", "--key-file", f"{tls}/server.key"]
            words += ["--client-cert-auth", "--trusted-ca-file", f"{tls}/ca.pem"]
        with (self.folder / f"m{index}.log").open("wb") as log:
            return subprocess.Popen([ETCD, *words, "--unsafe-no-fsync"], stdout=log, stderr=log, env={"PATH": "/bin"})

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        gateways = [EtcdGateway(self.config(urls=(url,), timeout_s=START_S)) for url in self.urls]
        for gateway in gateways:
            gateway.call("/v3/kv/range", {"key": "YQ=="})
            gateway.close()
        assert time.monotonic() < deadline

    def config(self, urls: tuple[str, ...] = (), **changes: object) -> StoreConfig:
        tls: dict[str, object] = {}
        if self.certificates:
            folder = self.certificates.folder
            tls = {"ca_file": folder / "ca.pem", "certificate": folder / "client.pem"}
            tls["private_key"] = folder / "client.key"
        return StoreConfig(**{"kind": "etcd", "endpoints": urls or tuple(self.urls), **tls, **changes})

    def leader(self) -> int:
        """Index of the member that leads."""
        ids = []
        for url in self.urls:
            status = httpx.post(f"{url}/v3/maintenance/status", json={}, timeout=5, trust_env=False).json()
            ids.append((status["header"]["member_id"], status["leader"]))
        return next(index for index, (member, leader) in enumerate(ids) if member == leader)

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].wait(10)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
