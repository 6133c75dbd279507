"""The commands of diagnosis, which print: ``triage``, ``memory`` and ``doctor``."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_train.diagnosis.doctor import DoctorConfig


def triage_logs(logdir: str, /, json: bool = False) -> int:
    """Read the logs of a run that ended and print why, and whether to start it again.

    Exit codes: 0 for a run that finished, 10 to 29 where it would fail again, 30 and above
    where the same command may be started again.

    Args:
        logdir: folder with the logs of all ranks, or one log.
        json: print one JSON object for schedulers instead of the page.
    """
    from mcore_train.diagnosis.triage import triage

    verdict = triage(logdir)
    print(verdict.to_json() if json else verdict.page())
    return verdict.exit_code


def show_snapshot(snapshot: str, /, json: bool = False) -> int:
    """Print a snapshot of GPU memory by class of tensors, and what the plan expects.

    ``--record-memory-history`` of a run writes it.

    Args:
        snapshot: file of torch's allocator, such as snapshot.rank0.pickle.
        json: print one JSON object, in bytes.
    """
    from mcore_train.diagnosis.memory import read_snapshot

    table = read_snapshot(Path(snapshot))
    print(table.to_json() if json else table.page())
    return 0


def report_cluster(config: "DoctorConfig") -> int:
    """Measure all ranks, print one page on rank 0; return 1 there if a check has a fault."""
    from mcore_parallel.launch import launcher
    from mcore_train.diagnosis.doctor import examine, page, to_json

    facts, results = examine(config)
    if launcher.read_environment().rank:
        return 0
    print(to_json(facts, results) if config.options.json else page(facts, results))
    return int(any(result.word == "FAULT" for result in results))


def judge_run(run: str, /, json: bool = False) -> int:
    """Read the numbers of a run and name the flag most likely to help.

    Args:
        run: its --save folder, with metrics.jsonl, and logs where there are any.
        json: print a JSON list instead of the page.
    """
    from mcore_train.diagnosis.run_rules import diagnose, read_run, run_json, run_page

    folder = Path(run)
    facts = read_run(folder)
    found = diagnose(facts)
    print(run_json(found) if json else run_page(folder, facts, found))
    return 0
