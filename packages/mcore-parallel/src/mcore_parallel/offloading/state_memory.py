"""Host memory of optimizer state: one map for all of a rank's, page-locked or of a file.

What is page-locked travels while the host does other things; torch's own allocator would round
each tensor up to a power of two. A file lies on an NVMe drive, and memory holds what an update
is working on: the system reads what is touched and writes back what changed. Its space is taken
before the first step, so a full disk ends no run, except on ZFS and btrfs: these write what
changes to new space, and SIGBUS ends a run where there is none. The file has no name: however a
run ends, nothing is left, and checkpoints stand apart from it.

Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 5.
"""

import ctypes
import logging
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from math import prod
from typing import Any
from weakref import finalize

import torch
from jaxtyping import Shaped
from torch import Tensor

log = logging.getLogger(__name__)

_PORTABLE = 1
"""Of ``cudaHostRegister``: for every GPU of the process, whichever is current."""


class StateMemory:
    """Zeros, handed out as tensors, which stay good without the object."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Take a whole map, of which nothing else is made."""
        self._map = memory
        # Tensors keep this alive. Unlike a map it is finalized before its memory goes.
        self._array = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._begin = ctypes.addressof(self._array)
        self._taken = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shaped[Tensor, "..."]:
        """Return the next tensor."""
        count = prod(shape)
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        found = torch.frombuffer(self._array, dtype=dtype, count=count, offset=self._taken)
        self._taken += -(-count * dtype.itemsize // 8) * 8
        return found.view(shape)

    def lock_pages(self, device: torch.device, runtime: Any) -> bool:
        """Page-lock memory that is no file's, until its last tensor is gone; say if it is.

        Logs a warning if it is not, which only costs time.

        Args:
            device: that copies from and to it.
            runtime: ``torch.cuda.cudart()``.
        """
        size = len(self._map)
        self._map.madvise(mmap.MADV_DONTFORK)  # or writing after a fork would move pages
        with suppress(OSError):  # a kernel may have none
            self._map.madvise(mmap.MADV_HUGEPAGE)
        error = int(runtime.cudaHostRegister(self._begin, size, _PORTABLE))
        if error == 0:
            finalize(self._array, runtime.cudaHostUnregister, self._begin)
            return True
        with suppress(RuntimeError):  # the next kernel reports the error as if it were its own
            torch.zeros((), device=device)
        log.warning(
            "%.1f GiB of host memory could not be page-locked for --optimizer-cpu-offload "
            "(CUDA error %d): the host waits for every copy, and updates take longer.",
            size / 2**30,
            error,
        )
        return False

    def read_ahead(self, *tensors: Shaped[Tensor, " n"]) -> None:
        """Begin to read tensors of a file into memory; returns at once."""
        for tensor in tensors:
            begin = tensor.data_ptr() - self._begin
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            length = begin + tensor.numel() * tensor.itemsize - first
            self._map.madvise(mmap.MADV_WILLNEED, first, length)


def allocate_state(num_bytes: int, device: torch.device) -> StateMemory:
    """Take host memory, page-locked if the device is a GPU.

    Args:
        num_bytes: of all tensors together, each padded to 8.
        device: that copies from and to it.

    Raises:
        ValueError: if the system refuses to give so much.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        state = StateMemory(mmap.mmap(-1, max(1, num_bytes), flags=flags))
    except OSError as error:
        raise ValueError(
            f"--optimizer-cpu-offload takes {num_bytes / 2**30:,.1f} GiB of host memory for "
            f"this rank's state ({error.strerror}): give a smaller "
            "--optimizer-offload-fraction, or --optimizer-offload-dir."
        ) from error
    if num_bytes and device.type == "cuda":
        state.lock_pages(device, torch.cuda.cudart())
    return state


def allocate_state_file(num_bytes: int, folder: str) -> StateMemory:
    """Take the space of a file.

    Args:
        num_bytes: of all tensors together, each padded to 8.
        folder: on the drive; made if it is not there.

    Raises:
        ValueError: if the drive has too little space, or none can be taken there.
    """
    flag = f"--optimizer-offload-dir {folder}"
    size = max(1, num_bytes)
    try:
        os.makedirs(folder, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if size > free:
            raise ValueError(
                f"{flag} has {free / 2**20:,.0f} MiB free and this rank's state takes "
                f"{size / 2**20:,.0f} MiB: give a folder on a larger drive, or a smaller "
                "--optimizer-offload-fraction."
            )
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return StateMemory(mmap.mmap(file.fileno(), size))
    except OSError as error:
        raise ValueError(f"{flag} cannot hold the state: {error.strerror}.") from error
