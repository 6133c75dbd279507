"""What follows an attempt of a job: nothing, a restart, a new place in the queue, or an end.

An attempt is one start of all ranks. The class of its failure comes from triage of its logs;
what the job did before is in ``attempts.jsonl``, next to the attempts' log folders, so that the
rules hold over requeued jobs too. Without torch.
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
"""In a job's log folder: one line an attempt."""
LONGEST_PAUSE_S = 600.0
DETERMINISTIC = ("crash", "replicas", "unknown")
"""Classes of ``FAULTS`` that may pass, and do not if one step ends in them twice."""

Word = Literal["finished", "retry", "requeue", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One line of the history."""

    status: int
    """Exit code of the attempt."""
    step: int
    """Newest saved step when it ended; -1: none."""
    fault: str = ""
    """Class of the failure, of ``FAULTS``; empty: none."""
    logged_step: int = -1
    """Last step in the logs; -1: none."""
    message: str = ""
    word: Word = "stop"

    def is_like(self, other: "Attempt") -> bool:
        """Whether both failed alike after one step, which was logged."""
        same_step = self.logged_step == other.logged_step >= 0
        return same_step and self.fault == other.fault and self.message == other.message


@dataclass(frozen=True, kw_only=True, slots=True)
class Next:
    """What follows an attempt."""

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
        attempt: the latest one.
        before: earlier attempts of the job, in order.
        last_step: after which the run is finished; 0: unknown.
        max_restarts: restarts in a row without a newly saved step.
        backoff_s: pause before the first of these.
    """
    if not attempt.status:
        if last_step and 0 <= attempt.step < last_step:
            reason = f"stopped at step {attempt.step} of {last_step}"
            return Next(word="requeue", number=0, reason=reason)
        return Next(word="finished", number=0, reason="all steps are done")
    if 0 < last_step <= attempt.step:
        reason = (
            f"step {attempt.step}, the last, is saved, whatever ended with {attempt.status}"
        )
        return Next(word="finished", number=0, reason=reason)
    fault = FAULTS[attempt.fault]
    stop = partial(Next, word="stop", number=attempt.status)
    if not fault.retry:
        return Next(word="stop", number=fault.exit_code, reason=fault.summary)
    if not max_restarts:
        return stop(reason=f"{fault.summary}, and --max-restarts is 0")
    fruitless: list[Attempt] = []
    for earlier in reversed(before):
        if earlier.step != attempt.step or not earlier.status:
            break
        fruitless.append(earlier)
    if fruitless and attempt.fault in DETERMINISTIC and attempt.is_like(fruitless[0]):
        reason = f"{fault.summary}, twice after step {attempt.logged_step}"
        return stop(reason=reason)
    if len(fruitless) >= max_restarts:
        count = f"{len(fruitless)} restarts saved no step (--max-restarts {max_restarts})"
        return stop(reason=f"{fault.summary}, and {count}")
    pause_s = min(backoff_s * 2 ** len(fruitless), LONGEST_PAUSE_S)
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
    """Read an attempt's logs, decide what follows and write it to the job's history.

    Args:
        logs: the attempt's folder, below the job's.
        status: exit code of the attempt.
        save: run folder; empty: none.
        last_step: see ``decide``.
        max_restarts: see ``decide``.
        backoff_s: see ``decide``.
        record: False: neither read nor write the history, where the scheduler counts restarts.
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
    """Return what triage finds in an attempt's logs, as fields of ``Attempt``."""
    try:
        verdict = triage(logs)
    except (ValueError, FileNotFoundError):  # no rank has come as far as a log
        return {"fault": "unknown"}
    fault = "unknown" if verdict.fault == "finished" else verdict.fault
    step = -1 if verdict.step is None else verdict.step
    return {"fault": fault, "logged_step": step, "message": verdict.message}


def read_history(file: Path) -> list[Attempt]:
    """Read the attempts of a job; damaged lines are left out, with a warning.

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
            log.warning("%s, line %d is damaged and left out", file, number)
    return list(attempts.values())
