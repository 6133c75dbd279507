"""One writer at a time on a run folder: a lock file with host, process and heartbeat.

The holder touches the file every few seconds. Another may take it over once the holder's
process is dead on this host, or the file has been silent for two minutes. Not an flock: those
are not seen across hosts on every shared file system.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from mcore_ckpt.errors import CheckpointError, write_error
from mcore_ckpt.storage.stores import StorePath, as_path

log = logging.getLogger(__name__)

LOCK = ".writer.lock"
"""Name of the lock file in a run folder."""

SILENT_S = 120.0
"""A holder that is silent for so long is taken for dead."""

_BEAT_S = 15.0


class FolderLock:
    """The right to write to a run folder, as a context manager or by hand.

    A job that saves many times holds it from start to end; saves of the same process then
    find it held and go on.
    """

    def __init__(self, folder: str | Path, *, silent_s: float = SILENT_S) -> None:
        """Take nothing yet.

        Args:
            folder: the run folder; made if absent.
            silent_s: seconds of silence after which a holder on another host is dead.
        """
        self._path = as_path(folder) / LOCK
        self._silent_s = silent_s
        self._stop: threading.Event | None = None

    def acquire(self) -> None:
        """Take the lock, or share it if this process holds it already.

        Raises:
            CheckpointError: if another live process holds it, or the disk fails.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self._path.parent, error) from error
        for _ in range(3):
            if self._create():
                self._stop = threading.Event()
                threading.Thread(target=self._beat, args=(self._stop,), daemon=True).start()
                return
            holder = self._holder()
            if holder is None:
                continue
            if self._is_mine(holder):
                return
            if not self._is_dead(holder):
                raise CheckpointError(
                    f"process {holder['pid']} on {holder['host']} is writing to "
                    f"{self._path.parent}: end it, or save to another folder."
                )
            self._take_away(holder)
        raise CheckpointError(f"{self._path} changes hands too fast: is another job starting?")

    def check(self) -> None:
        """Make sure that this process still holds the lock, before something is made final.

        Raises:
            CheckpointError: if it was taken over, or is gone.
        """
        holder = self._holder()
        if holder is None or not self._is_mine(holder):
            who = (
                "no process"
                if holder is None
                else f"process {holder['pid']} on {holder['host']}"
            )
            raise CheckpointError(
                f"the lock of {self._path.parent} was lost: {who} holds it now. Was this "
                "process stopped for minutes?"
            )

    def release(self) -> None:
        """Give the lock back, if this object took it."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            holder = self._holder()
            if holder is not None and self._is_mine(holder):
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _create(self) -> bool:
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        if isinstance(self._path, StorePath):
            # Stores have no exclusive creation that all of them know: whoever's lock stands
            # after both have written holds it.
            if self._path.is_file():
                return False
            self._path.write_whole(content.encode())
            return self._is_mine(self._holder() or {"host": "", "pid": 0})
        # A link appears whole or not at all, on NFS too.
        ticket = self._path.with_name(f"{LOCK}.{uuid.uuid4().hex}")
        try:
            ticket.write_text(content)
            os.link(ticket, self._path)
        except FileExistsError:
            return False
        except OSError as error:
            raise write_error(self._path, error) from error
        finally:
            ticket.unlink(missing_ok=True)
        return True

    def _holder(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._path.read_text())
        except FileNotFoundError:
            return None

    def _is_mine(self, holder: dict[str, Any]) -> bool:
        return (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        try:
            silent_s = time.time() - self._last_beat_s()
        except FileNotFoundError:
            return False
        if silent_s > self._silent_s:
            return True
        if holder["host"] != socket.gethostname():
            return False
        try:
            os.kill(holder["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def _last_beat_s(self) -> float:
        if isinstance(self._path, StorePath):
            return self._path.modified_s()
        return self._path.stat().st_mtime

    def _take_away(self, holder: dict[str, Any]) -> None:
        log.warning(
            "taking over the lock of dead process %s on %s", holder["pid"], holder["host"]
        )
        if isinstance(self._path, StorePath):
            self._path.unlink(missing_ok=True)
            return
        aside = self._path.with_name(f"{LOCK}.{uuid.uuid4().hex}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if json.loads(aside.read_text()) != holder:
            # Another took it over in between: put its lock back.
            os.link(aside, self._path)
        aside.unlink()

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(_BEAT_S):
            holder = self._holder()
            if holder is None or not self._is_mine(holder):
                return
            try:
                if isinstance(self._path, StorePath):
                    self._path.write_whole(json.dumps(holder).encode())
                else:
                    os.utime(self._path)
            except FileNotFoundError:
                return
