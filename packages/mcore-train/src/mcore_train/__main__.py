"""``python -m mcore_train`` is ``mcore-train``."""

import sys

from mcore_train.cli import main

sys.exit(main())
