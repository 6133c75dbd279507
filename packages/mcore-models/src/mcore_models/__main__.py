"""``python -m mcore_models``: the command without an install."""

import sys

from mcore_models.cli import main

sys.exit(main())
