"""The command that continues a run, from the command line that its first rank logged.

Each run logs its options as a command line (``reporting.header``). Classes of failures that an
option mends (out of memory, values that are not finite, a damaged checkpoint) get that option;
the others that may be started again get ``--auto-resume``.
"""

import re
import shlex
from collections.abc import Sequence

from mcore_ckpt.storage.paths import complete_steps
from mcore_train.diagnosis.log_reader import LogFile

_COMMAND = re.compile(rb"^.*?\bcommand: ((?:torchrun|mcore-train) .+)$", re.M)
_DAMAGED = re.compile(r"\biter_(\d+)\S* (?:is damaged|was cut short|has \d+ bytes, not)")


def recorded_command(logs: Sequence[LogFile]) -> list[str]:
    """Return the words of the command line that a run logged; empty: it logged none."""
    for log in logs:
        with log.path.open("rb") as file:
            if found := _COMMAND.search(file.read(1 << 16)):
                return shlex.split(found[1].decode(errors="replace").strip())
    return []


def value_of(words: Sequence[str], flag: str) -> str:
    """Return the value of a flag; empty: the command line does not have it."""
    places = [place for place, word in enumerate(words[:-1]) if word == flag]
    return words[places[-1] + 1] if places else ""


def continue_command(
    words: Sequence[str], fault: str, retry: bool, mend: str, message: str
) -> str:
    """Write the command line that continues a run after a failure.

    Args:
        words: of the run's own command line.
        fault: class of the failure.
        retry: whether the class may be started again unchanged.
        mend: advice for a run out of memory, which begins with the options that help.
        message: that reports the cause.

    Returns:
        Empty if no option mends this class, or its value is not known.
    """
    save = value_of(words, "--save")
    resumes = ["--auto-resume"] if save and "--auto-resume" not in words else []
    flags: list[str] = []
    if fault == "out_of_memory":
        advised = mend.partition(": ")[0]
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
    """Leave out flags with their values; with a granularity also the options of the old one."""
    recomputes = "--recompute-granularity" in flags
    kept, is_kept = [], True
    for word in words:
        if word.startswith("--"):
            is_old = word in flags or (recomputes and word.startswith("--recompute-"))
            is_kept = not is_old
        if is_kept:
            kept.append(word)
    return kept


def _step_before(save: str, message: str) -> int:
    """Return the newest whole step before the damaged one that a message names; 0: none."""
    named = _DAMAGED.search(message)
    if named is None:
        return 0
    return max((step for step in complete_steps(save) if step < int(named[1])), default=0)
