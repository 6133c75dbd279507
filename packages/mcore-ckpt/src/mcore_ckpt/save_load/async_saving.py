"""Saves in the background: copies to host memory, writes in a thread, commits at a later step.

``AsyncSaver.save`` plans, starts copying this rank's share to host memory and returns; a thread
finishes the copies and writes, and on rank 0 another one commits. Threads do not communicate:
``poll``, called once a step on all ranks, is where ranks find that all files are durable. Until
the index is written the checkpoint does not exist.

At most one save is in progress, so that host memory holds one copy of a rank's share. A write
without progress for ``silent_s`` is given up, and later saves are skipped until its thread
ends: training never waits for a disk that hangs.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.config import RetentionConfig
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save_load.attachments import Attachments
from mcore_ckpt.save_load.hf_saving import HFView
from mcore_ckpt.save_load.plan_cache import PlanCache
from mcore_ckpt.save_load.rank_agreement import (
    any_rank,
    gather_json,
    pack,
    raise_on_all_ranks,
    start_any_rank,
    unpack,
)
from mcore_ckpt.save_load.saving import KEEP_ALL, PlannedSave, begin, commit_step, write
from mcore_ckpt.save_load.staging import Copies, Staging
from mcore_ckpt.storage.folder_lock import FolderLock
from mcore_ckpt.storage.paths import step_folder
from mcore_parallel.collectives import gather_bytes
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard

log = logging.getLogger(__name__)

SILENT_S = 600.0
"""Seconds without writing after which a thread counts as hanging."""

_CLOSE_S = 10.0


class _Job:
    """Runs a function in a thread; holds its result, its error and its time of progress."""

    def __init__(self, work: Callable[["_Job"], Any]) -> None:
        self.result: Any = None
        self.failure = ""
        self.moved_s = time.monotonic()
        self._is_cancelled = False
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[["_Job"], Any]) -> None:
        try:
            self.result = work(self)
        except Exception as error:  # noqa: BLE001 - raised by all ranks at the next poll
            self.failure = str(error) or repr(error)

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    def is_silent(self, limit_s: float) -> bool:
        return self.is_busy and time.monotonic() - self.moved_s > limit_s

    def join(self, limit_s: float) -> None:
        """Wait until the work ends, or makes no progress for ``limit_s``."""
        while self.is_busy and not self.is_silent(limit_s):
            self._thread.join(max(0.01, self.moved_s + limit_s - time.monotonic()))

    def watched(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors, record progress at each one, and raise after ``cancel``."""
        for tensor in tensors:
            if self._is_cancelled:
                raise CheckpointError("the save was given up")
            self.moved_s = time.monotonic()
            yield tensor

    def cancel(self, limit_s: float) -> None:
        """Stop the work at its next tensor; wait at most ``limit_s`` for the thread to end."""
        self._is_cancelled = True
        self._thread.join(limit_s)


@dataclass(slots=True)
class _PendingSave:
    """A save in progress: its plan, host copies and thread."""

    begun: PlannedSave
    copies: Copies
    job: _Job
    tries_left: int
    requested_s: float
    reports: list[bytes] = field(default_factory=list)
    """Each rank's report of its files; empty until all have written."""
    answers: Callable[[], list[bool]] | None = None
    """Waits for the ranks' answers about their jobs, sent at the last poll."""


class AsyncSaver:
    """Saves in the background, one save after another.

    Attributes:
        last_durable: folder of the newest step that this object made durable, or None.
        last_failure: reason why the last save failed; empty after a success.
    """

    def __init__(
        self,
        world: Axis,
        *,
        retries: int = 1,
        silent_s: float = SILENT_S,
        retention: RetentionConfig = KEEP_ALL,
    ) -> None:
        """Prepare a saver; ``save`` starts the first thread.

        Args:
            world: the ranks that save together; all call every method together. If its group
                has gloo in addition to nccl, polling never waits for the GPU.
            retries: repetitions of a failed write before the save is given up.
            silent_s: seconds without progress after which a write counts as hanging.
            retention: which older steps are deleted once a newer one is durable.
        """
        self.last_durable: Path | None = None
        self.last_failure = ""
        self._world = world
        self._retries = retries
        self._silent_s = silent_s
        self._retention = retention
        self._plans = PlanCache()
        self._staging = Staging()
        self._pending: _PendingSave | None = None
        self._hanging: _Job | None = None
        self._lock: FolderLock | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory kept for copies: this rank's share of a checkpoint."""
        return self._staging.num_bytes

    @property
    def is_under_way(self) -> bool:
        """Whether a save is in progress; equal on all ranks."""
        return self._pending is not None

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
        hf: HFView | None = None,
        overlap: bool = False,
    ) -> bool:
        """Start a save; the arguments are those of ``saving.save``.

        Waits for the previous save if it is in progress. Communicates over the world. The first
        save of a plan is slow: it allocates host memory, and waits until replicas are compared.
        Later ones do neither.

        ``folders`` must not change until the save is durable. Weights for ``hf`` are assembled
        first, within this call. With ``overlap`` the call returns before the tensors are
        copied, and the caller must call ``hold`` before changing them. Otherwise the tensors
        may change as soon as the call returns.

        Returns:
            False if no save was started, because an earlier write hangs.

        Raises:
            ValueError: as ``saving.save``, before anything is written.
            CheckpointError: as ``saving.save``.
        """
        if self._pending is not None:
            self._wait_for_the_one_before(step)
        hanging = self._hanging is not None and self._hanging.is_busy
        if any_rank([hanging], self._world)[0]:
            self.last_failure = f"step {step} was skipped: an earlier write still hangs"
            log.error("%s; training goes on", self.last_failure)
            return False
        self._hanging = None
        attachments = Attachments(extra=extra or {}, files=files or {}, folders=folders or {})
        lock = FolderLock(run_folder)
        try:
            begun = begin(
                run_folder,
                step,
                shards,
                lock,
                world=self._world,
                replace=replace,
                attachments=attachments,
                hf=hf,
                plans=self._plans,
            )
            with raise_on_all_ranks(self._world):
                copies = self._staging.start(begun.memory)
        except BaseException:
            lock.release()
            raise
        # Keep no references to the live tensors.
        begun.memory.clear()
        self._lock = lock
        self.last_failure = ""
        self._pending = _PendingSave(
            begun, copies, _write_job(begun, copies), self._retries, time.monotonic()
        )
        if not overlap:
            self.hold()
            copies.finish()
        log.info("requested step %s in %s", step, run_folder)
        return True

    def hold(self) -> None:
        """Make later changes of the saved tensors wait for their copies.

        Call it before changing tensors that ``save`` copies with ``overlap``. No communication.
        With GPU tensors the current stream waits, not the host.
        """
        if self._pending is not None:
            self._pending.copies.hold()

    def poll(self) -> Path | None:
        """Advance the save in progress if all ranks are ready; call it once a step.

        Communicates over the world only while a save is in progress. A write that failed on any
        rank is logged and repeated, or given up after the last retry. Write errors are not
        raised, since training can continue.

        Returns:
            The step's folder if it became durable just now.
        """
        return self._advance()

    def wait(self) -> Path | None:
        """Like ``poll``, but waits until the save in progress is durable or given up."""
        done = None
        while self._pending is not None:
            self._pending.job.join(self._silent_s)
            done = self._advance()
        return done

    def close(self) -> None:
        """Give up a save in progress, whose step stays incomplete. No communication.

        For a job that ends with an error; other jobs call ``wait`` first.
        """
        if self._pending is not None:
            self._pending.job.cancel(_CLOSE_S)
            self._close()

    def _wait_for_the_one_before(self, step: int | str) -> None:
        assert self._pending is not None
        before, started_s = self._pending.begun.step, time.monotonic()
        self.wait()
        waited_s = time.monotonic() - started_s
        if waited_s > 1:
            log.warning(
                "step %s waited %.1f s until step %s was written: the disk cannot keep up with "
                "the saves. Save less often.",
                step,
                waited_s,
                before,
            )

    def _advance(self) -> Path | None:
        pending = self._pending
        if pending is None:
            return None
        answers = self._answers(pending)
        if answers is None:
            return None
        _, has_failed, is_silent = answers
        if is_silent:
            self._give_up_hanging(pending)
            return None
        if has_failed:
            self._retry(pending)
            return None
        if not pending.reports:
            pending.reports = gather_bytes(pending.job.result, self._world)
            pending.job = self._commit_job(pending)
            return None
        folder = step_folder(pending.begun.run_folder, pending.begun.step)
        seconds = time.monotonic() - pending.requested_s
        log.info("step %s is durable, %.1f s after it was requested", folder.name, seconds)
        self._close()
        self.last_durable = folder
        return folder

    def _answers(self, pending: _PendingSave) -> list[bool] | None:
        """Return whether any rank's job is busy, failed or silent; None: not known yet.

        Answers sent at one poll are read at the next, so that no step waits for the slowest
        rank.
        """
        answers = None if pending.answers is None else pending.answers()
        pending.answers = None
        # A busy job without progress is an answer too: it leads to giving up.
        if answers is None or (answers[0] and not answers[2]):
            job = pending.job
            flags = [job.is_busy, job.failure != "", job.is_silent(self._silent_s)]
            pending.answers = start_any_rank(flags, self._world)
            return None
        return answers

    def _commit_job(self, pending: _PendingSave) -> _Job:
        is_root, retention = self._world.rank == 0, self._retention

        def work(_job: _Job) -> None:
            if is_root:
                reports = [unpack(content) for content in pending.reports]
                commit_step(pending.begun, reports, retention)

        return _Job(work)

    def _retry(self, pending: _PendingSave) -> None:
        step = pending.begun.step
        reports = gather_json(pending.job.failure, self._world)
        faults = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reports) if text)
        if pending.tries_left == 0:
            self.last_failure = f"step {step} was not saved: {faults}"
            log.error("%s; training goes on", self.last_failure)
            self._close()
            return
        log.warning("writing step %s failed, trying again: %s", step, faults)
        pending.tries_left -= 1
        if pending.reports:
            pending.job = self._commit_job(pending)
        else:
            pending.job = _write_job(pending.begun, pending.copies)

    def _give_up_hanging(self, pending: _PendingSave) -> None:
        reports = gather_json(pending.job.is_silent(self._silent_s), self._world)
        ranks = [rank for rank, is_silent in enumerate(reports) if is_silent]
        self.last_failure = (
            f"step {pending.begun.step} was not saved: ranks {ranks} have written nothing to "
            f"{pending.begun.folder} for {self._silent_s:.0f} s"
        )
        log.error("%s; training goes on", self.last_failure)
        # The thread may still read the staged memory: no save starts before the thread ends.
        self._hanging = pending.job
        self._close()

    def _close(self) -> None:
        self._pending = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _write_job(begun: PlannedSave, copies: Copies) -> _Job:
    """Start a thread that finishes the copies and writes this rank's files."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def work(job: _Job) -> bytes:
        if device is not None:
            torch.cuda.set_device(device)
        copies.finish()
        return pack(write(begun, [job.watched(parts) for parts in copies.parts]))

    return _Job(work)
