"""Deletes old steps: keeps the newest ones, and multiples of an interval permanently.

Only steps below the latest durable step are deleted; never the step that the tracker names, a
newer step or a release.
"""

import logging
from pathlib import Path

from mcore_base.stores import as_path
from mcore_ckpt.config import RetentionConfig
from mcore_ckpt.storage.paths import (
    complete_steps,
    is_complete,
    latest_step,
    remove,
    step_folder,
)

log = logging.getLogger(__name__)


def dispensable(steps: list[int], latest: int, config: RetentionConfig) -> list[int]:
    """Return the steps to delete, given all steps and the latest durable one. Pure."""
    if not config.save_retain_last:
        return []
    old = sorted(step for step in steps if step <= latest)
    interval = config.save_retain_interval
    return [
        step
        for step in old[: -config.save_retain_last]
        if step != latest and not (interval and step % interval == 0)
    ]


def prune(run_folder: str | Path, config: RetentionConfig) -> list[int]:
    """Delete steps beyond the retention, and folders of interrupted saves.

    One rank calls it after ``save`` has returned, while it holds the folder's lock.

    Returns:
        The steps that were deleted.
    """
    run_folder = as_path(run_folder)
    latest = latest_step(run_folder)
    if not isinstance(latest, int) or not is_complete(step_folder(run_folder, latest)):
        return []
    deleted = dispensable(complete_steps(run_folder), latest, config)
    for step in deleted:
        remove(step_folder(run_folder, step))
    for folder in run_folder.glob("iter_*"):
        digits = folder.name.removeprefix("iter_")
        if digits.isdecimal() and int(digits) < latest and not is_complete(folder):
            log.info("removing %s of an interrupted save", folder)
            remove(folder)
    return deleted
