"""``python -m mcore_ckpt`` is the command ``mcore-ckpt``."""

import sys

from mcore_ckpt.cli import main

sys.exit(main())
