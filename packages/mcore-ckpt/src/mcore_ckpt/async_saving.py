"""Save while training goes on: copy aside, write in a thread, commit at a later step.

``AsyncSaver.save`` returns when what this rank must write is copied to host memory (pinned
where it comes from a GPU, kept from save to save) and a thread has begun to write it. The
thread talks to nobody: ``poll``, called once a step on all ranks, is where ranks find that
all files are durable and move the pointer. Until then the checkpoint does not exist.

At most one save is under way, so the host memory needed is one rank's share, once.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.agreement import gather_json
from mcore_ckpt.locking import FolderLock
from mcore_ckpt.saving import Begun, begin, finish, write
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard

log = logging.getLogger(__name__)

_ALIGNMENT = 64


@dataclass(slots=True)
class _Pending:
    """A save whose files are being written."""

    begun: Begun
    options: dict[str, Any]
    memory: list[Tensor]
    tries_left: int
    thread: threading.Thread | None = None
    chunks: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


class AsyncSaver:
    """Saves in the background, one after the other.

    Attributes:
        last_durable: folder of the newest step that this object made durable, or None.
    """

    def __init__(self, world: Axis, *, retries: int = 1) -> None:
        """Start nothing yet.

        Args:
            world: the ranks that save together; all call every method together.
            retries: times that a failed write is begun anew before the save is given up.
        """
        self.last_durable: Path | None = None
        self._world = world
        self._retries = retries
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._pending: _Pending | None = None
        self._lock: FolderLock | None = None

    def save(
        self,
        run_folder: str | Path,
        step: int | str,
        shards: Mapping[str, Shard],
        *,
        extra: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        folders: Mapping[str, Path] | None = None,
        replace: bool = False,
    ) -> None:
        """Begin a save; the arguments are those of ``saving.save``.

        Waits for the save before it, if that is still under way. Communicates over the
        world. When it returns, ``shards`` may change; ``folders`` must stay until the save is
        durable.

        Raises:
            ValueError: as ``saving.save``, before anything is written.
            RuntimeError: as ``saving.save``.
        """
        self.wait()
        lock = FolderLock(run_folder)
        try:
            begun = begin(run_folder, step, shards, lock, world=self._world, replace=replace)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        memory = self._stage(begun.memory)
        options = {
            "extra": dict(extra or {}),
            "files": dict(files or {}),
            "folders": dict(folders or {}),
        }
        # The live tensors are not needed again: keep none of them alive.
        begun.memory.clear()
        self._pending = _Pending(begun, options, memory, self._retries)
        self._start(self._pending)
        log.info("requested step %s in %s", step, run_folder)

    def poll(self) -> Path | None:
        """Commit the save under way if all ranks have written; call it once a step.

        Communicates over the world only while a save is under way. A write that failed on any
        rank is logged and begun anew, or given up after the last retry; it never raises, since
        training can go on.

        Returns:
            The step's folder if it became durable just now.
        """
        return self._advance(block=False)

    def wait(self) -> Path | None:
        """Like ``poll``, but wait until the save under way is durable or given up."""
        done = None
        while self._pending is not None:
            done = self._advance(block=True)
        return done

    def _advance(self, *, block: bool) -> Path | None:
        pending = self._pending
        if pending is None or pending.thread is None:
            return None
        if block:
            pending.thread.join()
        alive = pending.thread.is_alive()
        told = gather_json([alive, pending.failure], self._world)
        if any(is_alive for is_alive, _ in told):
            return None
        faults = {rank: text for rank, (_, text) in enumerate(told) if text}
        if not faults:
            try:
                folder = finish(
                    pending.begun, pending.chunks, world=self._world, **pending.options
                )
            except (RuntimeError, ValueError, OSError) as error:
                # Agreed on by all ranks.
                faults = {self._world.rank: str(error)}
            else:
                self._close()
                self.last_durable = folder
                return folder
        step = pending.begun.step
        if pending.tries_left == 0:
            log.error("step %s was not saved, training goes on: %s", step, faults)
            self._close()
            return None
        log.warning("writing step %s failed, trying again: %s", step, faults)
        pending.tries_left -= 1
        self._start(pending)
        return None

    def _close(self) -> None:
        self._pending = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _start(self, pending: _Pending) -> None:
        pending.failure, pending.chunks = "", {}
        pending.thread = threading.Thread(
            target=_write, args=(pending, self._world.rank), name="checkpoint", daemon=True
        )
        pending.thread.start()

    def _stage(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors into one host buffer, which is kept and only ever grows."""
        places, size = [], 0
        for tensor in memory:
            places.append(size)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(tensor.is_cuda for tensor in memory)
        if self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for tensor, place in zip(memory, places, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            flat = self._staging[place : place + num_bytes].view(tensor.dtype)
            copies.append(flat.view(tensor.shape).copy_(tensor, non_blocking=True))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies


def _write(pending: _Pending, rank: int) -> None:
    """Write this rank's file and note how it went; what a thread runs."""
    try:
        path = pending.begun.folder / f"rank_{rank:05d}.safetensors"
        path.unlink(missing_ok=True)
        pending.chunks = write(pending.begun, rank, pending.memory)
    except Exception as error:  # noqa: BLE001 - told to all ranks by the next poll
        pending.failure = str(error) or repr(error)
