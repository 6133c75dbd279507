"""Saves a run into its folder, which is locked against other jobs while the run trains.

The loop calls ``Checkpoints`` alike for saves in the foreground and in the background. A
background save is logged when it is requested and when it is durable; if one fails, the error
is logged and training continues. Only the last step must reach the disk: if its background save
fails, the step is saved in the foreground, and an error then ends the run.
"""

import logging
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from mcore_base.stores import as_path, is_store
from mcore_ckpt.save_load.async_saving import AsyncSaver
from mcore_ckpt.save_load.hf_saving import hf_view
from mcore_ckpt.save_load.local_saving import LocalSaver
from mcore_ckpt.save_load.plan_cache import PlanCache
from mcore_ckpt.save_load.rank_agreement import raise_on_all_ranks
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.folder_lock import FolderLock
from mcore_ckpt.storage.paths import latest_step, remove_steps
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import Shard
from mcore_train.assembly import Run
from mcore_train.checkpoints.adapter_bases import model_description
from mcore_train.checkpoints.resuming import Snapshot, state_shards, take_snapshot
from mcore_train.checkpoints.side_state import hf_words
from mcore_train.guards.nan_guard import NonFiniteError
from mcore_train.reporting.log import METRICS, SAMPLES, SPIKES, TENSORBOARD, Reporter

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves of one run, as a context that locks the run folder; all ranks call it together.

    Local saves between the checkpoints of the run folder go to the hosts' disks. Without
    ``--save`` nothing is saved.

    Attributes:
        longest_save_s: longest time so far from the request of a save to its durable step.
    """

    def __init__(self, run: Run, reporter: Reporter) -> None:
        """Prepare the savers; ``__enter__`` locks the folder.

        Args:
            run: the run to save.
            reporter: gets a record of each request, and of each step that became durable.

        Raises:
            ValueError: if no Hugging Face family can describe the model of a ``--save-hf`` run,
                or local checkpoints cannot be written.
        """
        options = run.plan.config.saving
        self.is_async = options.async_save
        self._run = run
        self._reporter = reporter
        self._folder = options.save
        self._lock = FolderLock(options.save) if options.save else None
        self._tokenizer: tempfile.TemporaryDirectory | None = None
        self._plans = PlanCache()
        self._hf = None
        if options.save_hf:
            self._hf = hf_view(model_description(run.plan), carried=hf_words(run))
        self._saver = AsyncSaver(
            run.ctx.world,
            silent_s=60 * options.async_save_timeout_minutes,
            retention=run.plan.config.retention,
        )
        local = run.plan.config.local_saving
        has_local = local.non_persistent_local_ckpt_dir
        self._local = LocalSaver(local, run.ctx.world) if has_local else None
        self._state: dict[str, Shard] | None = None
        self._saved_step = run.progress.iteration
        self._requested_step = -1
        self._requested_s = 0.0
        self.longest_save_s = 0.0

    def __enter__(self) -> Self:
        """Lock the run folder.

        Raises:
            RuntimeError: on all ranks, if another job writes to it.
            ValueError: if the local disks hold a later step than the run's.
        """
        newest = None if self._local is None else self._local.latest()
        step = self._run.progress.iteration
        if newest is not None and newest > step:
            raise ValueError(
                f"--non-persistent-local-ckpt-dir holds step {newest}, and this run begins at "
                f"{step}: continue from it (--load), or empty the folder."
            )
        with raise_on_all_ranks(self._run.ctx.world):
            if self._lock is not None and self._run.ctx.global_rank == 0:
                self._lock.acquire()
                if self._run.tokenizer is not None:
                    self._tokenizer = tempfile.TemporaryDirectory()
                    self._run.tokenizer.save(self._tokenizer.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unlock the run folder and abandon a write that is under way.

        After ``NonFiniteError``, a write of a step before the faulty gradients is completed.
        """
        if isinstance(error, NonFiniteError) and self._requested_step < error.iteration:
            self._note(self._saver.wait())
        self._saver.close()
        if self._lock is not None:
            self._lock.release()
        if self._tokenizer is not None:
            self._tokenizer.cleanup()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that background saves use on this rank."""
        return self._saver.host_bytes

    @property
    def is_saving(self) -> bool:
        """Whether a background save is under way; equal on all ranks."""
        return self._saver.is_under_way

    def save(self) -> None:
        """Save this step or start a background save; the run may change after ``hold``."""
        if not self.is_async:
            self._save_now()
            return
        started_s = time.perf_counter()
        is_first = self._saver.host_bytes == 0
        snapshot = self._snapshot()
        before = self._saver.last_durable
        is_started = self._saver.save(
            self._folder,
            self._run.progress.iteration,
            snapshot.shards,
            extra=snapshot.extra,
            files=snapshot.files,
            folders=snapshot.folders,
            hf=self._hf,
            replace=True,
            overlap=True,
        )
        if self._saver.last_durable != before:  # this save waited for the one before
            self._note(self._saver.last_durable)
        if not is_started:
            return
        self._requested_step = self._run.progress.iteration
        self._requested_s = time.perf_counter()
        numbers = {"stall_ms": 1e3 * (self._requested_s - started_s)}
        self._reporter.record("save_requested", self._run.progress.iteration, numbers)
        if is_first:
            gib = self._saver.host_bytes / 2**30
            log.info("saves in the background hold %.2f GiB of host memory on this rank", gib)

    def save_locally(self) -> None:
        """Save this step to the hosts' disks; a failure is logged, and training continues."""
        if self._local is None:
            return
        snapshot = self._snapshot()
        files = {name: content.decode() for name, content in snapshot.files.items()}
        try:
            self._local.save(
                self._run.progress.iteration,
                snapshot.shards,
                {**snapshot.extra, "files": files},
            )
        except RuntimeError as error:
            log.error("%s; training continues", error)

    def hold(self) -> None:
        """Make the coming update wait for unfinished copies of tensors; see ``AsyncSaver``."""
        self._saver.hold()

    def poll(self) -> None:
        """Advance a background save; called once per step."""
        self._note(self._saver.poll())

    def wait(self) -> None:
        """Wait until a background save is durable or has failed."""
        self._note(self._saver.wait())

    def finish(self) -> None:
        """Save the run's current step, unless it is durable already.

        Raises:
            RuntimeError: if it cannot be written.
        """
        if not self._folder:
            return
        self.wait()
        if self._saved_step == self._run.progress.iteration:
            return
        if self.is_async:
            self.save()
            self.wait()
        if self._saved_step != self._run.progress.iteration:
            self._save_now()

    def _note(self, durable: Path | None) -> None:
        if durable is None:
            return
        self._saved_step = self._requested_step
        seconds = time.perf_counter() - self._requested_s
        self.longest_save_s = max(self.longest_save_s, seconds)
        self._reporter.record("save_durable", self._saved_step, {"after_s": seconds})
        self._reporter.saved(self._saved_step)

    def _save_now(self) -> None:
        started_s = time.perf_counter()
        snapshot = self._snapshot()
        save(
            self._folder,
            self._run.progress.iteration,
            snapshot.shards,
            world=self._run.ctx.world,
            extra=snapshot.extra,
            files=snapshot.files,
            folders=snapshot.folders,
            hf=self._hf,
            replace=True,
            retention=self._run.plan.config.retention,
            plans=self._plans,
        )
        self._saved_step = self._run.progress.iteration
        self.longest_save_s = max(self.longest_save_s, time.perf_counter() - started_s)
        self._reporter.saved(self._saved_step)

    def _snapshot(self) -> Snapshot:
        folder = None if self._tokenizer is None else Path(self._tokenizer.name)
        if self._state is None:
            self._state = state_shards(self._run)
        return take_snapshot(self._run, folder, self._state)


def clear_run_folder(save: str, ctx: ParallelContext) -> None:
    """Delete the steps and the numbers of an earlier run; all ranks call it together.

    Raises:
        RuntimeError: on all ranks, if another job writes to the folder, or a step folder is of
            another program.
    """
    with raise_on_all_ranks(ctx.world):
        if ctx.global_rank != 0 or latest_step(save) is None:
            return
        with FolderLock(save):
            remove_steps(save)
            if not is_store(as_path(save)):
                for name in (METRICS, SAMPLES, SPIKES):
                    (as_path(save) / name).unlink(missing_ok=True)
                shutil.rmtree(as_path(save) / TENSORBOARD, ignore_errors=True)
