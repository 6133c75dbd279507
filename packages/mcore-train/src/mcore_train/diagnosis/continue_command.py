"""Composes the command that continues a failed run from the command line that the run logged.

Each run logs its options as a command line (``reporting.header``). For failures that an option
can fix (out of memory, values that are not finite, a damaged checkpoint) the new command has
this option; for other failures after which a run may be started again it has ``--auto-resume``.
"""

import re
import shlex
from collections.abc import Sequence

from mcore_ckpt.storage.paths import complete_steps
from mcore_train.diagnosis.log_reader import LogFile

_COMMAND = re.compile(rb"^.*?\bcommand: ((?:torchrun|mcore-train) .+)$", re.M)
_DAMAGED = re.compile(r"\biter_(\d+)\S* (?:is damaged|was cut short|has \d+ bytes, not)")


def recorded_command(logs: Sequence[LogFile]) -> list[str]:
    """Return the words of the command line that a run logged; empty if it logged none."""
    for log in logs:
        with log.path.open("rb") as file:
            if match := _COMMAND.search(file.read(1 << 16)):
                return shlex.split(match[1].decode(errors="replace").strip())
    return []


def value_of(words: Sequence[str], flag: str) -> str:
    """Return the value of a flag's last occurrence; "" if the command line lacks the flag."""
    indices = [index for index, word in enumerate(words[:-1]) if word == flag]
    return words[indices[-1] + 1] if indices else ""


def continue_command(
    words: Sequence[str], fault: str, retry: bool, remedy: str, message: str
) -> str:
    """Return the command line that continues a run after a failure.

    Args:
        words: words of the run's command line.
        fault: class of the failure.
        retry: whether a run may be started again unchanged after this class.
        remedy: advice for a run out of memory; it begins with the options that help.
        message: log message of the cause.

    Returns:
        "" if no option fixes this class of failures, or the option's value is not known.
    """
    save = value_of(words, "--save")
    resumes = ["--auto-resume"] if save and "--auto-resume" not in words else []
    flags: list[str] = []
    if fault == "out_of_memory":
        advised = remedy.partition(": ")[0]
        if advised.startswith("PYTORCH_ALLOC_CONF="):
            return f"{advised} {shlex.join([*words, *resumes])}"
        flags = advised.split() if advised.startswith("--") else []
    elif fault == "nan" and (lr := value_of(words, "--lr")):
        flags = ["--lr", f"{float(lr) / 2:g}"]
        if value_of(words, "--clip-grad") in ("0", "0.0"):
            flags += ["--clip-grad", "1.0"]
    elif fault == "checkpoint" and save and (step := _step_before(save, message)):
        words, resumes = _without(words, ("--auto-resume", "--load")), []
        flags = ["--load", save, "--ckpt-step", str(step)]
    if not flags and not retry:
        return ""
    return shlex.join([*_without(words, flags), *resumes, *flags])


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Remove flags and their values; with --recompute-granularity all --recompute-* flags."""
    changes_recomputation = "--recompute-granularity" in flags
    remaining, is_kept = [], True
    for word in words:
        if word.startswith("--"):
            is_kept = word not in flags and not (
                changes_recomputation and word.startswith("--recompute-")
            )
        if is_kept:
            remaining.append(word)
    return remaining


def _step_before(save: str, message: str) -> int:
    """Return the newest complete step before the damaged step of a message; 0: none."""
    match = _DAMAGED.search(message)
    if match is None:
        return 0
    return max((step for step in complete_steps(save) if step < int(match[1])), default=0)
