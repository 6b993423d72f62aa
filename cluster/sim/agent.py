"""A fake agent with its host: registers, beats, spawns and ends fake workers, reports every exit.

It is the simulation's truth about devices and processes: what the head believes is checked against it. Made and broken
by `cluster.sim.churn`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import msgspec

from cluster.messages import (
    DeviceFacts,
    HardwareFacts,
    HeadToAgent,
    Heartbeat,
    KillReplica,
    Refused,
    Register,
    RegisterAgain,
    Registered,
    RunningWorker,
    Shutdown,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerRef,
    WorkerStarted,
)
from cluster.sim.lead import SimLead
from cluster.sim.link import Connection, SimLink
from sonar.transport import PROTOCOL_VERSION, Codec, PeerId, PeerKind, TransportSettings

SPAWN_S = 0.01
KILL_S = 0.005
_CODEC = Codec(HeadToAgent, TransportSettings().max_frame_bytes)


@dataclass(frozen=True)
class LoadTimes:
    """Seconds from a worker's start to ready, drawn evenly."""

    least_s: float
    most_s: float


def hardware(node_id: str, num_devices: int) -> HardwareFacts:
    """A host with that many accelerators."""
    devices = [
        DeviceFacts(index=index, kind="cuda", name="sim", memory_bytes=80 << 30, uuid=f"{node_id}/{index}")
        for index in range(num_devices)
    ]
    return HardwareFacts(
        hostname=node_id,
        boot_id=node_id,
        cpu_cores=64,
        cpu_model="sim",
        memory_bytes=1 << 40,
        memory_available_bytes=1 << 40,
        devices=devices,
        addresses=["eth0=10.0.0.1"],
    )


class SimAgent:
    """One start of a node's agent, and the workers it has.

    Args:
        versions: what the head compares. load: of the replicas whose lead it starts.
    """

    def __init__(
        self,
        link: SimLink,
        node_id: str,
        generation: int,
        num_devices: int,
        versions: dict[str, str],
        load: LoadTimes,
        random: Random,
    ) -> None:
        self.node_id = node_id
        self.workers: dict[WorkerRef, RunningWorker] = {}
        self.leads: dict[WorkerRef, SimLead] = {}
        self.is_alive = True
        self._link = link
        self._peer = PeerId(PeerKind.AGENT, node_id, generation)
        self._facts = (hardware(node_id, num_devices), versions)
        self._load = load
        self._random = random
        self._connection: Connection | None = None
        self._beat_frame: bytes | None = None
        self.connect()

    def connect(self) -> None:
        """Connects, or again after `cut`, with its leads."""
        self._connection = self._link.connect(self._peer, self._on_frame)
        self._register()
        for lead in self.leads.values():
            lead.connect()

    def cut(self) -> None:
        """The host's network is gone; what runs there runs on."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for lead in self.leads.values():
            lead.cut()

    def end(self) -> None:
        """The agent is gone, and by the kernel's word its workers."""
        self.cut()
        self.is_alive = False
        for lead in self.leads.values():
            lead.end()
        self.workers.clear()
        self.leads.clear()

    def crash(self, ref: WorkerRef) -> None:
        """A worker dies unasked."""
        self._worker_ended(ref, code=-1, signal=11, was_asked=False)

    def _register(self) -> None:
        facts, versions = self._facts
        running = list(self.workers.values())
        register = Register(
            protocol=PROTOCOL_VERSION,
            node_id=self.node_id,
            pid=1,
            versions=versions,
            hardware=facts,
            running=running,
        )
        self._send(register)

    def _on_frame(self, frame: bytes) -> None:
        message = _CODEC.decode([frame])
        match message:
            case Registered(heartbeat_interval_s=interval_s):
                if self._beat_frame is None:
                    self._beat_frame = b""
                    self._link.timeline.every(interval_s, self._beat, self._random.random() * interval_s)
            case Refused() | Shutdown():
                self.end()
            case RegisterAgain():
                self._register()
            case StartWorker():
                self._link.timeline.after(SPAWN_S, lambda: self._spawn(message))
            case StopWorker(worker=worker):
                self._end_later(lambda ref: ref == worker, code=0, signal=0)
            case KillReplica(replica_id=name, incarnation=number):
                self._end_later(lambda ref: (ref.replica_id, ref.incarnation) == (name, number), code=-1, signal=9)
            case _:
                raise AssertionError(message)

    def _beat(self) -> bool:
        if self.is_alive and self._connection is not None:
            if not self._beat_frame:
                self._beat_frame = _CODEC.encode(Heartbeat(memory_available_bytes=1, running=list(self.workers)))
            self._connection.send(self._beat_frame)
        return self.is_alive

    def _spawn(self, message: StartWorker) -> None:
        if not self.is_alive:
            return
        ref, taken = message.worker, {device for worker in self.workers.values() for device in worker.devices}
        assert ref not in self.workers, f"{ref} is started twice on {self.node_id}"
        assert not taken & set(message.devices), f"{ref} is put on devices in use: {message.devices} of {self.node_id}"
        pid = self._random.randrange(2, 1 << 22)
        self.workers[ref] = RunningWorker(
            worker=ref,
            pid=pid,
            devices=message.devices,
            log_path="/log",
            world_size=message.world_size,
            settings=message.settings,
        )
        self._beat_frame = b""
        self._send(WorkerStarted(worker=ref, pid=pid, log_path="/log"))
        if ref.rank == 0:
            load_s = self._random.uniform(self._load.least_s, self._load.most_s)
            lead = SimLead(self._link, ref, load_s, lambda code: self._worker_ended(ref, code, 0, was_asked=code == 0))
            self.leads[ref] = lead
            if self._connection is None:
                lead.cut()

    def _end_later(self, is_meant: Callable[[WorkerRef], bool], code: int, signal: int) -> None:
        """Also what is being spawned now is meant: the check is made when the time has come."""

        def end() -> None:
            for ref in [ref for ref in self.workers if is_meant(ref)]:
                self._worker_ended(ref, code, signal, was_asked=True)

        self._link.timeline.after(SPAWN_S + KILL_S, end)

    def _worker_ended(self, ref: WorkerRef, code: int, signal: int, *, was_asked: bool) -> None:
        worker = self.workers.pop(ref, None)
        if worker is None:
            return
        lead = self.leads.pop(ref, None)
        if lead is not None:
            lead.end()
        self._beat_frame = b""
        exited = WorkerExited(
            worker=ref, pid=worker.pid, exit_code=code, signal=signal, log_tail="last words", was_asked=was_asked
        )
        self._send(exited)

    def _send(self, message: msgspec.Struct) -> None:
        if self._connection is not None:
            self._connection.send(_CODEC.encode(message))
