"""What goes wrong with files: damage, full disks, another job's folder, a proof that fails."""

from pathlib import Path

from mcore_base.atomic_files import FULL_DISK


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written, or is not what it should be.

    Files that are damaged, disks that are full, locks of other jobs, and conversions whose
    proof fails: the message says all there is to say, and commands print it alone, without
    the lines of code that led there. Any other ``RuntimeError`` is a fault of ours or of a
    library.
    """


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Make a sentence of what the system says against writing to ``path``."""
    hint = ": the disk or a quota is full" if error.errno in FULL_DISK else ""
    return CheckpointError(f"cannot write {path}: {error}{hint}.")
