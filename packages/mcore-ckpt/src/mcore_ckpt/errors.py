"""Errors of files: damage, full disks, another job's folder, a failed comparison."""

from pathlib import Path

from mcore_base.atomic_files import FULL_DISK


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written, or its content is wrong.

    Raised for damaged files, full disks, locks of other jobs, and conversions whose output
    differs from the source. Commands print only the message, without a traceback. Any other
    ``RuntimeError`` is a bug here or in a library.
    """


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Return an error that adds a hint to the system's message about writing to ``path``."""
    hint = ": the disk or a quota is full" if error.errno in FULL_DISK else ""
    return CheckpointError(f"cannot write {path}: {error}{hint}.")
