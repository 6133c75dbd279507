"""Parts that every mcore wheel uses and that need the standard library only.

The front is lazy (PEP 562): importing it imports no module of the package but its own table.
"""

import sys as _sys

from mcore_base.lazy_front import lazy_front as _lazy_front

if _sys.platform == "win32":
    raise ImportError("the mcore wheels run on Linux and macOS; on Windows use WSL 2.")

_EXPORTS: dict[str, str] = {
    "FaultCollector": "command_line",
    "FileLock": "file_lock",
    "LockHeldError": "file_lock",
    "Options": "options",
    "OptionsError": "options",
    "Rule": "options",
    "option": "options",
    "parse": "command_line",
    "run_program": "entry_point",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = _lazy_front(__name__, _EXPORTS)
