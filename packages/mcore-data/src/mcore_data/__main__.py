"""``python -m mcore_data``: the command ``mcore-data``."""

import sys

from mcore_data.cli import main

if __name__ == "__main__":
    sys.exit(main())
