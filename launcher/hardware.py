"""Facts about this host: CPUs, memory, accelerators, addresses. No torch, no choice made; asked once, at the start.

Called by the agent.
"""

from __future__ import annotations

import csv
import logging
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from cluster.messages import DeviceFacts, HardwareFacts
from launcher.leftovers import boot_id
from sonar.worker.host import available_memory, usable_cpus

logger = logging.getLogger(__name__)

NVIDIA_SMI_TIMEOUT_S = 20.0


def inspect_hardware() -> HardwareFacts:
    """What this process may use, as of now."""
    return HardwareFacts(
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        cpu_cores=usable_cpus(),
        cpu_model=_cpu_model(),
        memory_bytes=psutil.virtual_memory().total,
        memory_available_bytes=available_memory(),
        devices=nvidia_devices(),
        addresses=_addresses(),
    )


def nvidia_devices(program: str = "nvidia-smi") -> list[DeviceFacts]:
    """GPUs as the driver's own tool lists them; none where it is not installed, or fails (which is logged)."""
    path = shutil.which(program)
    if path is None:
        return []
    query = [path, "--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s failed, so this host counts as one without GPUs: %s", program, error)
        return []
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(text: str) -> list[DeviceFacts]:
    """Rows of "index, name, MiB, uuid". A row of another form is logged and left out."""
    devices = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        try:
            index, name, memory_mib, uuid = row
            device = DeviceFacts(
                index=int(index), kind="cuda", name=name, memory_bytes=int(memory_mib) << 20, uuid=uuid.strip()
            )
        except ValueError:
            logger.warning("nvidia-smi said %r, which is no GPU", row)
            continue
        devices.append(device)
    return devices


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _addresses() -> list[str]:
    """ "interface=address" of interfaces that are up; without the loopback's."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        f"{name}={entry.address}"
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if name in up and entry.family in families and not entry.address.startswith(("127.", "::1"))
    ]


def default_node_id() -> str:
    """The host's name, as far as a node id may hold it."""
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())
    return name.strip("._-")[:100] or f"node-{os.getpid()}"
