"""The commands ``triage``, ``memory`` and ``doctor``; they print pages or JSON."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_train.diagnosis.doctor import DoctorConfig


def triage_logs(logdir: str, /, json: bool = False) -> int:
    """Read the logs of a run that ended; print why it ended and whether to start it again.

    Exit codes: 0 for a finished run; 10 to 29 if the same command would fail again; 30 and
    above if the same command may be started again.

    Args:
        logdir: folder with the logs of all ranks, or one log.
        json: print one JSON object for schedulers instead of the page.
    """
    from mcore_train.diagnosis.triage import triage

    verdict = triage(logdir)
    print(verdict.to_json() if json else verdict.page())
    return verdict.exit_code


def show_snapshot(snapshot: str, /, json: bool = False) -> int:
    """Print a snapshot of GPU memory by class of tensors, next to the plan's estimate.

    A run with ``--record-memory-history`` writes the snapshot.

    Args:
        snapshot: file of torch's allocator, such as snapshot.rank0.pickle.
        json: print one JSON object, in bytes.
    """
    from mcore_train.diagnosis.memory import read_snapshot

    table = read_snapshot(Path(snapshot))
    print(table.to_json() if json else table.page())
    return 0


def report_cluster(config: "DoctorConfig") -> int:
    """Measure all ranks; rank 0 prints one page, and returns 1 if a check found a fault."""
    from mcore_parallel.launch import launcher
    from mcore_train.diagnosis.doctor import examine, page, to_json

    facts, results = examine(config)
    if launcher.read_environment().rank:
        return 0
    print(to_json(facts, results) if config.options.json else page(facts, results))
    return int(any(result.word == "FAULT" for result in results))


def judge_run(run: str, /, json: bool = False) -> int:
    """Read the metrics of a run, and name the flag that is most likely to help.

    Args:
        run: --save folder of the run, with metrics.jsonl and, if there are any, logs.
        json: print a JSON list instead of the page.
    """
    from mcore_train.diagnosis.run_rules import diagnose, read_run, run_json, run_page

    folder = Path(run)
    facts = read_run(folder)
    diagnoses = diagnose(facts)
    print(run_json(diagnoses) if json else run_page(folder, facts, diagnoses))
    return 0
