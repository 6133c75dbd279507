"""mcore-base alone, without any other package: words into a dataclass, one writer a file."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mcore_base import FileLock, OptionsError, __version__, parse

assert __version__[0].isdigit(), __version__
assert importlib.util.find_spec("torch") is None
assert importlib.util.find_spec("numpy") is None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Read a file."""

    num_rows: int = 1
    """Rows to read."""


assert parse(Options, "read", ["--num-rows", "3"]) == Options(num_rows=3)
faults = ()
try:
    parse(Options, "read", ["--num-rows", "many", "--num-row", "3"])
except OptionsError as error:
    faults = error.lines
assert len(faults) == 2, faults

SECOND = """
import sys
from pathlib import Path
from mcore_base import FileLock, LockHeldError
try:
    FileLock(Path(sys.argv[1])).acquire()
except LockHeldError:
    sys.exit(3)
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "table.lock"
    with FileLock(path):
        assert json.loads(path.read_text())["pid"]
        second = subprocess.run([sys.executable, "-I", "-c", SECOND, path], check=False)
        assert second.returncode == 3
    assert not path.exists()
