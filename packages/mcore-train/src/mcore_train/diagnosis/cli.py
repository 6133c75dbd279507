"""The commands of diagnosis: ``triage`` reads the logs of a run that ended."""

from mcore_train.diagnosis.triage import triage


def triage_logs(logdir: str, /, json: bool = False) -> int:
    """Read the logs of a run that ended and print why, and whether to start it again.

    Exit codes: 0 for a run that finished, 10 to 29 where it would fail again, 30 and above
    where the same command may be started again.

    Args:
        logdir: folder with the logs of all ranks, or one log.
        json: print one JSON object for schedulers instead of the page.
    """
    verdict = triage(logdir)
    print(verdict.to_json() if json else verdict.page())
    return verdict.exit_code
