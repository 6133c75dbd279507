"""What follows an attempt of a job: nothing, a restart, a new place in the queue, or an end.

An attempt is one start of all ranks. The class of its failure comes from triage of its logs;
what the job did before is in ``attempts.jsonl``, beside the attempts' log folders, so that the
rules hold over requeued jobs too. Without torch.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mcore_ckpt.storage.paths import newest_step

log = logging.getLogger(__name__)

HISTORY = "attempts.jsonl"
"""In a job's log folder: one line an attempt."""
LONGEST_PAUSE_S = 600.0
USER_ERROR = 2
"""Exit code of errors in options or data, as of ``mcore-train`` itself."""

Word = Literal["finished", "retry", "requeue", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How an attempt failed."""

    category: str
    """Class of the failure, as triage names it."""
    may_pass: bool
    """Whether the same command may run when it is started again."""
    is_user_error: bool
    """Whether the options or the data must change first."""
    summary: str
    """The first error, in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One line of the history."""

    status: int
    """Exit code of the attempt."""
    step: int
    """Newest saved step when it ended; -1: none."""
    category: str = ""
    summary: str = ""
    word: Word = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Next:
    """What follows an attempt."""

    word: Word
    number: float
    """Seconds before a retry; exit code of the job after stop; else 0."""
    reason: str


def decide(
    failure: Failure | None,
    status: int,
    step: int,
    last_step: int,
    before: Sequence[Attempt],
    max_restarts: int,
    backoff_s: float,
) -> Next:
    """Decide what follows an attempt.

    Args:
        failure: of the attempt; None: it ended with 0.
        status: its exit code.
        step: newest saved step; -1: none.
        last_step: after which the run is finished; 0: unknown.
        before: earlier attempts of the job, the latest last.
        max_restarts: restarts in a row without a newly saved step.
        backoff_s: pause before the first of these.
    """
    if failure is None:
        if last_step and 0 <= step < last_step:
            return Next(
                word="requeue", number=0, reason=f"stopped at step {step} of {last_step}"
            )
        return Next(word="finished", number=0, reason="all steps are done")
    if failure.is_user_error:
        reason = "options or data must change first"
        return Next(word="stop", number=USER_ERROR, reason=reason)
    if not max_restarts:
        return Next(word="stop", number=status, reason="--max-restarts is 0")
    fruitless: list[Attempt] = []
    for attempt in reversed(before):
        if attempt.step != step or not attempt.status:
            break
        fruitless.append(attempt)
    if not failure.may_pass and fruitless and fruitless[0].category == failure.category:
        reason = f"{failure.category} again after step {step}: a restart does not help"
        return Next(word="stop", number=status, reason=reason)
    if len(fruitless) >= max_restarts:
        reason = f"{len(fruitless)} restarts saved no step (--max-restarts {max_restarts})"
        return Next(word="stop", number=status, reason=reason)
    pause_s = min(backoff_s * 2 ** len(fruitless), LONGEST_PAUSE_S)
    return Next(word="retry", number=pause_s, reason=f"{failure.category} after step {step}")


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
    failure = find_failure(logs, status) if status else None
    newest = newest_step(save) if save else None
    step = newest if isinstance(newest, int) else -1
    before = read_history(history) if record else []
    answer = decide(failure, status, step, last_step, before, max_restarts, backoff_s)
    attempt = Attempt(
        status=status,
        step=step,
        category=failure.category if failure else "",
        summary=failure.summary if failure else "",
        word=answer.word,
    )
    if record:
        history.parent.mkdir(parents=True, exist_ok=True)
        with history.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"attempt": logs.name, **asdict(attempt)}) + "\n")
    told = f" ({failure.summary})" if failure and failure.summary else ""
    log.info("%s ended with %d%s: %s, %s", logs.name, status, told, answer.word, answer.reason)
    return answer


def read_history(file: Path) -> list[Attempt]:
    """Read the attempts of a job; a line that a kill cut is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        row.pop("attempt", None)
        found.append(Attempt(**row))
    return found


def find_failure(logs: Path, status: int) -> Failure:
    """Classify the failure of an attempt by its logs."""
    for file in sorted(logs.rglob("std*.log")):
        for line in file.read_text(errors="replace").splitlines():
            if "mcore-train: error:" in line:
                summary = line.strip()
                return Failure(
                    category="options", may_pass=False, is_user_error=True, summary=summary
                )
    return Failure(
        category="unknown", may_pass=True, is_user_error=False, summary=f"exit code {status}"
    )
