"""A worker of a plan: claims and writes one unit at a time until none is left.

A claim is the lock of the unit's outputs (``mcore_base.file_lock``), so that two workers never
write one unit. Units without a lock are claimed first, in random order, so that workers rarely
try the same unit. A unit whose holder is dead is taken over: at once if the holder was a
process of this machine, else after the lock file has not changed for ``claim_timeout_s`` by the
monotonic clock of this process. The new holder continues from the unit's journal.
"""

import logging
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from mcore_base.atomic_files import FULL_DISK
from mcore_base.file_lock import SILENT_S, FileLock, LockHeldError, lock_at
from mcore_base.stores import is_store
from mcore_data.config import PreprocessConfig
from mcore_data.engines.spot_check import EngineDifferenceError
from mcore_data.indexed.manifest import replace_json
from mcore_data.indexed.output_lock import make_folder
from mcore_data.preprocessing.blocks import BLOCK_BYTES
from mcore_data.preprocessing.sources import list_changes
from mcore_data.preprocessing.tokenizing import (
    PreprocessReport,
    Progress,
    Tools,
    preprocess_corpus,
)
from mcore_data.preprocessing.work_plan import (
    Unit,
    WorkPlan,
    build_plan_tools,
    has_manifests,
    list_names,
)

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 5.0
_STORE_CHECK_S = 5.0


@dataclass(slots=True)
class WorkerReport:
    """Work of one worker.

    Attributes:
        num_units: units that this worker finished.
        num_documents: documents in these units.
        num_tokens: tokens in these units, of all keys.
        num_bad_records: records that were left out.
        failures: error of each unit that is not done, by number.
    """

    num_units: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_bad_records: int = 0
    failures: dict[int, str] = field(default_factory=dict)


def work_on_plan(
    plan: WorkPlan,
    *,
    numbers: Collection[int] | None = None,
    workers: int = 1,
    on_bad_record: Literal["refuse", "skip"] = "refuse",
    scratch_path: str = "",
    claim_timeout_s: float = SILENT_S,
    on_progress: Callable[[Progress], None] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> WorkerReport:
    """Write units of a plan until all are done or have failed.

    Waits for units of other workers, and takes over the units of dead workers. A unit that
    failed before this worker started is tried once more.

    Args:
        plan: the plan; any number of workers may use it.
        numbers: units to write; None means all.
        workers: processes that tokenize for this worker.
        on_bad_record: "skip" leaves bad records out; "refuse" uses the plan's option.
        scratch_path: local folder for files that are being written, if the plan is in an
            object store.
        claim_timeout_s: seconds without a change of a lock file after which its holder counts
            as dead.
        on_progress: called after each block of a unit.
        block_bytes: bytes of input in one block.

    Raises:
        ValueError: if the tokenizer or engine is not the plan's.
        RuntimeError: if an input changed since the plan was made, or the disk is full.
        EngineDifferenceError: if the plan's engine gives other ids than the tokenizer.
    """
    tools = build_plan_tools(plan)
    make_folder(plan.folder, f"--plan {plan.address}")
    report = WorkerReport()
    claims = _Claims(plan, numbers, claim_timeout_s)
    pause_s = 0.05
    while claims.remaining:
        claim = claims.take()
        if claim is None:
            if claims.all_failed:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            continue
        pause_s = 0.05
        unit, lock = claim
        try:
            if unit.is_done():  # finished after the folder was listed and before the claim
                continue
            _refuse_changed(plan, unit)
            unit.failure_path.unlink(missing_ok=True)
            config = replace(
                unit.config, workers=workers, overwrite=True, scratch_path=scratch_path
            )
            if on_bad_record == "skip":
                config = replace(config, on_bad_record="skip")
            log.info("unit %d of %d", unit.number, len(plan.units))
            written = _write_unit(unit, lock, config, tools, on_progress, block_bytes)
        finally:
            lock.release()
        if written is not None:
            report.num_units += 1
            report.num_documents += written.num_documents
            report.num_tokens += sum(written.num_tokens.values())
            report.num_bad_records += written.num_bad_records
    report.failures = {number: unit.failure() for number, unit in claims.remaining.items()}
    return report


def _write_unit(
    unit: Unit,
    lock: FileLock,
    config: PreprocessConfig,
    tools: Tools,
    on_progress: Callable[[Progress], None] | None,
    block_bytes: int,
) -> PreprocessReport | None:
    """Write a claimed unit; return None if it failed, which is recorded, or lost its claim."""
    checked_at = -_STORE_CHECK_S

    def check_claim(progress: Progress) -> None:
        nonlocal checked_at
        # A process that was suspended for minutes may have lost the unit to a new holder. In
        # an object store each check is a request, so checks are rarer.
        if not is_store(lock.path) or time.monotonic() - checked_at > _STORE_CHECK_S:
            lock.check()
            checked_at = time.monotonic()
        if on_progress is not None:
            on_progress(progress)

    try:
        return preprocess_corpus(config, unit.corpus, tools, check_claim, block_bytes)
    except EngineDifferenceError as error:
        raise EngineDifferenceError(
            f"{error} Make a new plan with --engine reference --overwrite."
        ) from None
    except (RuntimeError, ValueError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, LockHeldError):
            log.warning("unit %d was taken over by another worker: %s", unit.number, cause)
            return None
        if isinstance(cause, OSError) and cause.errno in FULL_DISK:
            raise  # every unit would fail
        log.warning("unit %d failed: %s", unit.number, error)
        replace_json(unit.failure_path, {"error": str(error)})
    return None


def _refuse_changed(plan: WorkPlan, unit: Unit) -> None:
    """Raise ``RuntimeError`` with all inputs of a unit that changed since the plan was made."""
    changes = list(list_changes(unit.corpus.sources))
    if changes:
        raise RuntimeError(
            f"inputs changed since {plan.address} was made: {'; '.join(changes)}. Restore the "
            "old files with their modification times, or make a new plan with --overwrite."
        )


class _Claims:
    """The units that are not done; claims the units that this worker may write."""

    def __init__(
        self, plan: WorkPlan, numbers: Collection[int] | None, timeout_s: float
    ) -> None:
        self.remaining = {
            unit.number: unit
            for unit in plan.units
            if numbers is None or unit.number in numbers
        }
        self.all_failed = False
        self._plan = plan
        self._timeout_s = timeout_s
        names = list_names(plan)
        self._to_retry = {unit.number for unit in plan.units if unit.failure_path.name in names}
        self._last_locks: dict[int, tuple[object, float]] = {}  # content, and when first read

    def take(self) -> tuple[Unit, FileLock] | None:
        """Lock a unit that is free or whose holder is dead; None if no unit can be locked."""
        names = list_names(self._plan)
        free: list[Unit] = []
        abandoned: list[Unit] = []
        num_failed = 0
        for number, unit in list(self.remaining.items()):
            if has_manifests(unit, names) and unit.is_done():
                del self.remaining[number]
            elif unit.failure_path.name in names and number not in self._to_retry:
                num_failed += 1
            elif unit.lock_path.name not in names:
                free.append(unit)
            elif self._is_abandoned(unit):
                abandoned.append(unit)
        self.all_failed = num_failed == len(self.remaining)
        random.shuffle(free)
        for unit in [*free, *abandoned]:
            # For an abandoned unit the timeout of the old lock has already passed.
            lock = lock_at(unit.lock_path, 0.0 if unit in abandoned else SILENT_S)
            try:
                lock.acquire()
            except LockHeldError:
                continue
            self._to_retry.discard(unit.number)
            return unit, lock
        return None

    def _is_abandoned(self, unit: Unit) -> bool:
        """Whether the holder of a unit's lock is dead."""
        content = lock_at(unit.lock_path).read()
        if content is None:
            return False
        is_alive = content[0].is_alive()  # None: the holder is on another host
        if is_alive is not None:
            return not is_alive
        now = time.monotonic()
        last, since = self._last_locks.get(unit.number, (None, now))
        if last != content:
            self._last_locks[unit.number] = content, now
            return False
        return now - since > self._timeout_s
