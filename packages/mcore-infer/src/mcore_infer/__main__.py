"""``python -m mcore_infer``: the command ``mcore-infer``."""

import sys

from mcore_infer.cli import main

sys.exit(main())
