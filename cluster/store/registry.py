"""The kinds of store, by name."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cluster.store.contract import Store
from cluster.store.settings import StoreConfig

logger = logging.getLogger(__name__)

STORES = {
    "sqlite": "cluster.store.registry:open_sqlite",
    "etcd": "cluster.store.etcd:open_etcd",
}


def open_store(config: StoreConfig, state_dir: Path) -> Store:
    """Opens the configured store.

    Args:
        state_dir: the head's own folder; it exists.

    Raises:
        ConfigError: a file of it cannot be read or is damaged.
    """
    module_name, _, name = STORES[config.kind].partition(":")
    opener = cast(Callable[[StoreConfig, Path], Store], getattr(importlib.import_module(module_name), name))
    logger.info("store: %s, as configured", config.kind)
    return opener(config, state_dir)


def open_sqlite(config: StoreConfig, state_dir: Path) -> Store:
    """The embedded store's file lies in the state directory."""
    from cluster.store.sqlite import SqliteStore

    return SqliteStore(state_dir / "head.db")
