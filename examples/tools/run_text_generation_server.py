"""Megatron's command as its documents spell it: run it in the folder ``examples``.

The same as ``mcore-infer serve``, for scripts that call the file by its name.
"""

import sys

from mcore_infer.cli import main as infer


def main(argv):
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    return infer(["serve", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
