"""Exit 1 unless the mcore packages importable here are exactly those named as arguments."""

import pkgutil
import sys

found = {module.name for module in pkgutil.iter_modules() if module.name.startswith("mcore")}
if found != set(sys.argv[1:]):
    sys.exit(f"importable: {sorted(found)}, declared: {sorted(sys.argv[1:])}")
