"""What goes wrong outside the program: damaged files, full disks, another job's folder."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written, and the program is not to blame.

    Its message says what to do; commands print it alone, without the lines of code that led
    there. Any other ``RuntimeError`` is a fault of ours or of a library.
    """
