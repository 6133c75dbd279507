"""What goes wrong with files: damage, full disks, another job's folder, a proof that fails."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written, or is not what it should be.

    Files that are damaged, disks that are full, locks of other jobs, and conversions whose
    proof fails: the message says all there is to say, and commands print it alone, without
    the lines of code that led there. Any other ``RuntimeError`` is a fault of ours or of a
    library.
    """
