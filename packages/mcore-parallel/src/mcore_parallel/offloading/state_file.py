"""Optimizer state in a file, on an NVMe drive: memory holds what an update is working on.

The file is mapped: its tensors are like any others, which checkpoints read and write, and the
system reads what is touched and writes back what changed. Its space is taken before the first
step, so a full disk ends no run, except on ZFS and btrfs: these write what changes to new
space, and SIGBUS ends a run where there is none. The file has no name: however a run ends,
nothing is left, and checkpoints stand apart from it.

Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 5.
"""

import mmap
import os
import shutil
import tempfile
from math import prod

import torch
from jaxtyping import Shaped
from torch import Tensor


class StateFile:
    """Zeros in a nameless file, handed out as tensors."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        """Take the space.

        Args:
            folder: on the drive; made if it is not there.
            num_bytes: of all tensors together.
        """
        flag = f"--optimizer-offload-dir {folder}"
        size = num_bytes + mmap.PAGESIZE
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
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ValueError(f"{flag} cannot hold the state: {error.strerror}.") from error
        self._begin = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._taken = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shaped[Tensor, "..."]:
        """Return the next tensor; it stays good without the object."""
        count = prod(shape)
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        found = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._taken)
        self._taken += -(-count * dtype.itemsize // 8) * 8
        return found.view(shape)

    def fetch(self, *tensors: Shaped[Tensor, " n"]) -> None:
        """Begin to read tensors of this file into memory; returns at once."""
        for tensor in tensors:
            begin = tensor.data_ptr() - self._begin
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            length = begin + tensor.numel() * tensor.itemsize - first
            self._map.madvise(mmap.MADV_WILLNEED, first, length)
