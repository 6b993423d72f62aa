"""The store in etcd: survives the head's host, and is shared by several heads. See `cluster.store.etcd_gateway`.

A lease's time to live begins anew when etcd elects a leader: choose it at least three times as long as that takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from cluster.store.contract import Change, Lease, News
from cluster.store.etcd_gateway import EtcdError, EtcdGateway, decode, encode, read_error
from cluster.store.settings import StoreConfig

MIN_TTL_S = 1


class EtcdStore:
    """Implements `cluster.store.contract.Store`."""

    def __init__(self, config: StoreConfig) -> None:
        self._gateway = EtcdGateway(config)
        self._prefix = config.prefix

    def get(self, key: str) -> bytes | None:
        answer = self._gateway.call("/v3/kv/range", {"key": encode(self._prefix + key)}).body
        return _value(answer.get("kvs", []))

    def items(self, prefix: str) -> dict[str, bytes]:
        return list_pairs(self._gateway, self._prefix, prefix)[0]

    def put(self, key: str, value: bytes) -> None:
        # Without "lease" the pair outlives whoever wrote the key under one before.
        self._gateway.call("/v3/kv/put", {"key": encode(self._prefix + key), "value": encode(value)})

    def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes | None, lease: Lease | None = None
    ) -> bool:
        name = encode(self._prefix + key)
        if expected is None:
            compare = {"key": name, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        else:
            compare = {"key": name, "target": "VALUE", "result": "EQUAL", "value": encode(expected)}
        put: dict[str, Any] = {"request_delete_range": {"key": name}}
        if value is not None:
            put = {"request_put": {"key": name, "value": encode(value)}}
            if lease is not None:
                put["request_put"]["lease"] = str(lease.lease_id)
        body = {"compare": [compare], "success": [put], "failure": [{"request_range": {"key": name}}]}
        try:
            answer, was_unsure = self._gateway.call("/v3/kv/txn", body)
        except EtcdError as error:
            if lease is not None and "lease not found" in str(error):
                return False
            raise
        if answer.get("succeeded"):
            return True
        # The answer of an earlier attempt was lost: if the value is there, that attempt put it there.
        found = _value(answer["responses"][0]["response_range"].get("kvs", []))
        return was_unsure and found == value and expected != value

    def lease(self, ttl_s: float) -> EtcdLease:
        whole_s = max(MIN_TTL_S, math.ceil(ttl_s))
        granted = self._gateway.call("/v3/lease/grant", {"TTL": str(whole_s)}).body
        return EtcdLease(self._gateway, int(granted["ID"]))

    def watch(self, prefix: str) -> EtcdWatch:
        return EtcdWatch(self._gateway, self._prefix, prefix)

    def close(self) -> None:
        self._gateway.close()


class EtcdLease:
    """Implements `cluster.store.contract.Lease`. etcd counts whole seconds."""

    def __init__(self, gateway: EtcdGateway, lease_id: int) -> None:
        self.lease_id = lease_id
        self._gateway = gateway

    def refresh(self) -> bool:
        answer = self._gateway.call("/v3/lease/keepalive", {"ID": str(self.lease_id)}).body
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def revoke(self) -> None:
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": str(self.lease_id)})
        except EtcdError as error:
            if "lease not found" not in str(error):
                raise


class EtcdWatch:
    """Implements `cluster.store.contract.Watch`.

    A stream that is silent for a call's time is begun again, at the next endpoint, after the last revision seen: a
    member that has lost the others would be silent for ever. A revision that etcd has thrown away (compaction) is
    followed by a list of all pairs.
    """

    def __init__(self, gateway: EtcdGateway, root: str, prefix: str) -> None:
        self._gateway = gateway
        self._root = root
        self._prefix = prefix
        self._revision = 0
        self._response: httpx.Response | None = None
        self._lines: Iterator[str] = iter(())
        self._read_timeout_s = 0.0

    def next(self, timeout_s: float) -> News | None:
        deadline_s = time.monotonic() + timeout_s
        if self._read_timeout_s > timeout_s:
            self.close()  # a stream's time to read is fixed when it begins
        while True:
            if not self._revision:
                pairs, self._revision = list_pairs(self._gateway, self._root, self._prefix)
                return News(True, [Change(key, value) for key, value in pairs.items()])
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            try:
                news = self._read(left_s)
            except httpx.ReadTimeout:
                self._break_off()
            except httpx.TransportError:
                self._break_off()
                time.sleep(min(0.1, max(0.0, deadline_s - time.monotonic())))
            else:
                if news:
                    return News(False, news)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _break_off(self) -> None:
        self.close()
        self._gateway.move_on(self._gateway.endpoint)

    def _read(self, timeout_s: float) -> list[Change]:
        """The changes of the stream's next line; none when it was about something else."""
        if self._response is None:
            self._open(timeout_s)
        line = next(self._lines, None)
        if line is None:
            raise httpx.ReadError("the stream has ended")
        message = msgspec.json.decode(line)
        if "error" in message:
            raise httpx.ReadError(str(message["error"]))
        result = message["result"]
        if result.get("canceled") and "compact_revision" in result:
            self.close()
            self._revision = 0
            return []
        if result.get("canceled"):  # so a token that is out of date is told
            self._gateway.renew_token()
            raise httpx.ReadError(str(result.get("cancel_reason")))
        events = result.get("events", [])
        if events:
            # Not the header's: that is of the whole store, and may be ahead of what this stream has told.
            self._revision = int(events[-1]["kv"]["mod_revision"])
        return [self._change(event) for event in events]

    def _open(self, timeout_s: float) -> None:
        whole = self._root + self._prefix
        create = {"key": encode(whole), "range_end": encode(end_of(whole)), "start_revision": str(self._revision + 1)}
        response = self._gateway.stream("/v3/watch", {"create_request": create}, timeout_s)
        if response.status_code != 200:
            _, text = read_error(response.read())
            response.close()
            self._gateway.renew_token()
            raise httpx.ReadError(text)
        self._response, self._lines, self._read_timeout_s = response, response.iter_lines(), timeout_s

    def _change(self, event: dict[str, Any]) -> Change:
        pair = event["kv"]
        key = decode(pair["key"]).decode().removeprefix(self._root)
        return Change(key, None if event.get("type") == "DELETE" else decode(pair.get("value", "")))


def list_pairs(gateway: EtcdGateway, root: str, prefix: str) -> tuple[dict[str, bytes], int]:
    """All pairs below a prefix, without the root in their keys, and the revision at which they were so."""
    whole = root + prefix
    body = {"key": encode(whole), "range_end": encode(end_of(whole))}
    answer = gateway.call("/v3/kv/range", body).body
    pairs = {decode(pair["key"]).decode().removeprefix(root): pair for pair in answer.get("kvs", [])}
    found = {key: decode(pair.get("value", "")) for key, pair in sorted(pairs.items())}
    return found, int(answer["header"]["revision"])


def end_of(prefix: str) -> bytes:
    """The first key after all that begin so: etcd's way to say "prefix". UTF-8 has no byte 255 to carry over."""
    encoded = prefix.encode()
    return encoded[:-1] + bytes([encoded[-1] + 1]) if encoded else b"\0"


def open_etcd(config: StoreConfig, state_dir: Path) -> EtcdStore:
    """Opens it; whether it answers is seen at the first call."""
    return EtcdStore(config)


def _value(pairs: list[dict[str, Any]]) -> bytes | None:
    return decode(pairs[0].get("value", "")) if pairs else None
