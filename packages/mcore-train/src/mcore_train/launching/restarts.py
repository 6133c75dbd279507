"""Decides what follows an attempt of a job: finish, restart, requeue or stop.

An attempt is one start of all ranks. Triage of its logs gives the class of a failure. Earlier
attempts are recorded in ``attempts.jsonl``, next to the attempts' log folders, so that restarts
are counted across requeued jobs. Does not import torch.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mcore_ckpt.storage.paths import newest_step
from mcore_train.diagnosis.rules import FAULTS
from mcore_train.diagnosis.triage import triage

log = logging.getLogger(__name__)

HISTORY = "attempts.jsonl"
"""File in a job's log folder, with one line for each attempt."""
LONGEST_PAUSE_S = 600.0
DETERMINISTIC = ("crash", "replicas", "unknown")
"""Classes of ``FAULTS`` that are not temporary if they occur twice after the same step."""

Word = Literal["finished", "retry", "requeue", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt, as a line of the history."""

    status: int
    """Exit code of the attempt."""
    step: int
    """Newest saved step at the end of the attempt; -1: none."""
    fault: str = ""
    """Class of the failure, of ``FAULTS``; empty: none."""
    logged_step: int = -1
    """Last step in the logs; -1: none."""
    message: str = ""
    word: Word = "stop"

    def is_like(self, other: "Attempt") -> bool:
        """Whether both attempts failed with the same fault and message after the same step."""
        same_step = self.logged_step == other.logged_step >= 0
        return same_step and self.fault == other.fault and self.message == other.message


@dataclass(frozen=True, kw_only=True, slots=True)
class Next:
    """Decision on what follows an attempt."""

    word: Word
    number: float
    """Seconds before a retry; exit code of the job after stop; else 0."""
    reason: str


def decide(
    attempt: Attempt,
    before: Sequence[Attempt],
    last_step: int,
    max_restarts: int,
    backoff_s: float,
) -> Next:
    """Decide what follows an attempt.

    Args:
        attempt: the latest attempt.
        before: earlier attempts of the job, in order.
        last_step: step after which the run is finished; 0: unknown.
        max_restarts: consecutive restarts without a newly saved step.
        backoff_s: pause before the first of these restarts.
    """
    if not attempt.status:
        if last_step and 0 <= attempt.step < last_step:
            reason = f"stopped at step {attempt.step} of {last_step}"
            return Next(word="requeue", number=0, reason=reason)
        return Next(word="finished", number=0, reason="all steps are done")
    if 0 < last_step <= attempt.step:
        reason = (
            f"the last step, {attempt.step}, is saved; exit code {attempt.status} is ignored"
        )
        return Next(word="finished", number=0, reason=reason)
    fault = FAULTS[attempt.fault]
    stop = partial(Next, word="stop", number=attempt.status)
    if not fault.retry:
        return Next(word="stop", number=fault.exit_code, reason=fault.summary)
    if not max_restarts:
        return stop(reason=f"{fault.summary}, and --max-restarts is 0")
    without_progress: list[Attempt] = []  # earlier attempts since the newest saved step
    for earlier in reversed(before):
        if earlier.step != attempt.step or not earlier.status:
            break
        without_progress.append(earlier)
    if (
        without_progress
        and attempt.fault in DETERMINISTIC
        and attempt.is_like(without_progress[0])
    ):
        reason = f"{fault.summary}, twice after step {attempt.logged_step}"
        return stop(reason=reason)
    if len(without_progress) >= max_restarts:
        count = f"{len(without_progress)} restarts saved no step"
        return stop(reason=f"{fault.summary}, and {count} (--max-restarts {max_restarts})")
    pause_s = min(backoff_s * 2 ** len(without_progress), LONGEST_PAUSE_S)
    reason = f"{fault.summary}, after saved step {attempt.step}"
    return Next(word="retry", number=pause_s, reason=reason)


def after_attempt(
    logs: Path,
    status: int,
    *,
    save: str,
    last_step: int,
    max_restarts: int,
    backoff_s: float,
    record: bool = True,
) -> Next:
    """Read an attempt's logs, decide what follows, and append it to the job's history.

    Args:
        logs: the attempt's folder, in the job's log folder.
        status: exit code of the attempt.
        save: run folder; empty: none.
        last_step: as in ``decide``.
        max_restarts: as in ``decide``.
        backoff_s: as in ``decide``.
        record: False neither reads nor writes the history, for schedulers that count restarts.
    """
    history = logs.parent / HISTORY
    newest = newest_step(save) if save else None
    step = newest if isinstance(newest, int) else -1
    attempt = Attempt(status=status, step=step)
    if status:
        attempt = replace(attempt, **_failure(logs))
    before = read_history(history) if record else []
    answer = decide(attempt, before, last_step, max_restarts, backoff_s)
    attempt = replace(attempt, word=answer.word)
    if record:
        history.parent.mkdir(parents=True, exist_ok=True)
        with history.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"attempt": logs.name, **asdict(attempt)}) + "\n")
    log.info("%s ended with %d: %s, %s", logs.name, status, answer.word, answer.reason)
    if attempt.message:
        log.info("%s", attempt.message)
    return answer


def _failure(logs: Path) -> dict[str, Any]:
    """Return the result of triage of an attempt's logs, as fields of ``Attempt``."""
    try:
        verdict = triage(logs)
    except (ValueError, FileNotFoundError):  # no rank has written a log
        return {"fault": "unknown"}
    fault = "unknown" if verdict.fault == "finished" else verdict.fault
    step = -1 if verdict.step is None else verdict.step
    return {"fault": fault, "logged_step": step, "message": verdict.message}


def read_history(file: Path) -> list[Attempt]:
    """Read the attempts of a job; damaged lines are skipped, with a warning.

    A line that occurs twice counts once.
    """
    attempts: dict[str, Attempt] = {}
    lines = file.read_bytes().splitlines() if file.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            name = row.pop("attempt")
            attempts[name] = Attempt(**row)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            log.warning("%s, line %d is damaged and was skipped", file, number)
    return list(attempts.values())
