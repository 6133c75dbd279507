"""Megatron's command as its documents spell it: run it in the folder ``examples``.

The same as ``mcore-data preprocess``, for scripts that call the file by its name.
"""

import sys

from mcore_data.cli import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
