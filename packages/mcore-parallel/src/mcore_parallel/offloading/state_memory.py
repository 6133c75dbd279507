"""Host memory of optimizer state: one memory map per rank, page-locked or backed by a file.

Page-locked memory is copied asynchronously; torch's allocator would round each tensor up to a
power of two. A file is on an NVMe drive: the system reads the pages that an update touches and
writes back the pages that changed. The file's space is allocated before the first step, so a
full disk does not end a run, except on ZFS and btrfs: these write changed pages to new space,
and SIGBUS ends the run if the disk is full. The file has no name, so the system removes it with
the process; checkpoints do not use the file.

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
"""Flag of ``cudaHostRegister``: page-locked for all GPUs of the process."""


class StateMemory:
    """A memory map that is divided into tensors, which keep the map alive."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Wrap a memory map of zeros, which must have no other user."""
        self._map = memory
        # Tensors reference the array. Unlike a map it can be finalized before the memory is
        # unmapped.
        self._array = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._begin = ctypes.addressof(self._array)
        self._taken = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shaped[Tensor, "..."]:
        """Return a tensor of zeros in the next free part of the map."""
        count = prod(shape)
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        tensor = torch.frombuffer(self._array, dtype=dtype, count=count, offset=self._taken)
        self._taken += -(-count * dtype.itemsize // 8) * 8
        return tensor.view(shape)

    def lock_pages(self, device: torch.device, runtime: Any) -> bool:
        """Page-lock the map until its last tensor is freed; return whether that succeeded.

        Not for maps of files. Logs a warning on failure, which only makes copies slower.

        Args:
            device: GPU that copies from and to the memory.
            runtime: ``torch.cuda.cudart()``.
        """
        size = len(self._map)
        self._map.madvise(mmap.MADV_DONTFORK)  # else copy-on-write after a fork moves pages
        with suppress(OSError):  # the kernel may not support huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        error = int(runtime.cudaHostRegister(self._begin, size, _PORTABLE))
        if error == 0:
            finalize(self._array, runtime.cudaHostUnregister, self._begin)
            return True
        with suppress(RuntimeError):  # consume the error, which the next kernel would report
            torch.zeros((), device=device)
        log.warning(
            "%.1f GiB of host memory could not be page-locked for --optimizer-cpu-offload "
            "(CUDA error %d): the host waits for every copy, and updates take longer.",
            size / 2**30,
            error,
        )
        return False

    def read_ahead(self, *tensors: Shaped[Tensor, " n"]) -> None:
        """Ask the system to read a file's tensors into memory; returns at once."""
        for tensor in tensors:
            begin = tensor.data_ptr() - self._begin
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            length = begin + tensor.numel() * tensor.itemsize - first
            self._map.madvise(mmap.MADV_WILLNEED, first, length)


def allocate_state(num_bytes: int, device: torch.device) -> StateMemory:
    """Allocate host memory for optimizer state, page-locked if the device is a GPU.

    Args:
        num_bytes: bytes of all tensors together, each padded to 8.
        device: device that copies from and to the memory.

    Raises:
        ValueError: if the system refuses the allocation.
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
    """Allocate an unnamed file for optimizer state, and map the file.

    Args:
        num_bytes: bytes of all tensors together, each padded to 8.
        folder: folder on the drive; created if missing.

    Raises:
        ValueError: if the drive has too little space, or the file cannot be created.
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
