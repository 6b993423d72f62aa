"""Weight files in memory without a copy: one mapping a file, shared with the page cache.

Knows nothing of what the bytes mean. Called by the GGUF and safetensors readers. Torch-free.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sonar.errors import ModelError

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0x40)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The whole file as bytes, read lazily by the kernel; the mapping lives as long as any view of it.

    The mapping is private and writable although nothing writes to it: torch warns about read-only buffers. NORESERVE
    keeps the kernel from counting it against memory, which would refuse a checkpoint larger than the host's RAM.

    Raises:
        ModelError: it cannot be opened, or is empty.
    """
    try:
        with path.open("rb") as file:
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except ValueError as error:
        raise ModelError(f"{path} is empty; fetch the file again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return np.frombuffer(mapped, dtype=np.uint8)


def release_pages(data: npt.NDArray[np.uint8]) -> None:
    """Gives back the memory that what was read of a `map_file` takes; reading it again takes it from the page cache.

    Args:
        data: the whole file, as `map_file` returned it. Views of it stay as they are.
    """
    view: object = data.base
    assert isinstance(view, memoryview) and isinstance(view.obj, mmap.mmap), f"not a mapped file: {type(view)}"
    if hasattr(mmap, "MADV_DONTNEED"):
        view.obj.madvise(mmap.MADV_DONTNEED)  # of a private mapping that nobody has written to: nothing is lost
