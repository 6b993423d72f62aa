"""The exchange of a loaded replica: its layout described, its whole cache registered with a transport.

Called by `sonar.engine`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from sonar.errors import ConfigError
from sonar.kvtransfer.contract import Region, TransferError
from sonar.kvtransfer.exchange import KVExchange
from sonar.kvtransfer.peer import CacheMemory
from sonar.kvtransfer.registry import open_transport
from sonar.peer_messages import KVLayout
from sonar.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from sonar.worker.loading import LoadedRunner


def build_exchange(loaded: LoadedRunner, scheduler: Scheduler) -> KVExchange:
    """Registers the cache, once for the life of the process.

    Raises:
        ConfigError: the transport cannot be had on this host, or not for this device.
    """
    config = loaded.config
    if config.device != "cpu":
        raise ConfigError(
            f"kv_transfer={config.kv_transfer!r} on {config.device}: blocks move between replicas on a CPU only; "
            'use device = "cpu", or kv_transfer = "none"',
            param="kv_transfer",
        )
    memory = CacheMemory(_layout(loaded), loaded.runner.cache_addresses, loaded.num_blocks)
    transport = open_transport(config.kv_transfer, f"sonar-{secrets.token_hex(8)}")
    regions = [
        Region(address, count * size)
        for address, count, size in zip(memory.addresses, memory.num_blocks, memory.layout.block_bytes)
    ]
    try:
        transport.register(regions)
    except TransferError as error:
        raise ConfigError(f"kv_transfer={config.kv_transfer!r}: {error}", param="kv_transfer") from error
    return KVExchange(scheduler, loaded.groups, memory, transport, wants_checksums=config.kv_checksums)


def _layout(loaded: LoadedRunner) -> KVLayout:
    config, shape = loaded.config, loaded.runner.cache_layout
    return KVLayout(
        model=loaded.source.identity,
        dtype=f"{config.dtype}, {config.cache.dtype} in the cache",
        activations=config.activations,
        block_size=shape.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        groups=tuple(f"{g.kind.value} {g.window} {','.join(map(str, g.layers))}" for g in shape.groups),
        block_bytes=tuple(shape.block_bytes(group) for group in range(len(shape.groups))),
        ranks=f"{config.parallel.tp_size}x{config.parallel.pp_size}",
        transport=config.kv_transfer,
    )
