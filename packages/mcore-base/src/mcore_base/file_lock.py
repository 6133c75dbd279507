"""One writer at a time: a lock file that names its holder and is touched every few seconds.

Two containers may share host name and process number, and the clock of a file server may be
minutes off. So a holder is a random token, and it counts as dead once its file has not changed
for two minutes of the waiting process's own monotonic clock. A holder in the same kernel and
process namespace is looked up there instead, without waiting. Not an flock: those are not seen
across hosts on every shared file system.
"""

import contextlib
import errno
import glob
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from mcore_base.stores import StorePath

log = logging.getLogger(__name__)

SILENT_S = 120.0
"""A holder whose file has not changed for so long is dead."""

BEAT_S = 15.0
"""Time between two touches. NFS clients may see one a minute late."""

_POLL_S = 0.5
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


class LockHeldError(RuntimeError):
    """Another process that is alive holds a lock, or has taken it over."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock, as its file describes it."""

    token: str = ""
    """Random, one a process; the only identity."""
    host: str = "an unknown host"
    pid: int = 0
    namespace: str = ""
    """Kernel start and process namespace, within which ``pid`` is one process; or empty."""
    started: str = ""
    """Start time of the process in the kernel's ticks: ``pid`` may be given again."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def current(cls) -> Self:
        """Describe this process."""
        pid = os.getpid()
        _, started = _process_state(pid)
        return cls(_token(pid), socket.gethostname(), pid, _namespace(), started)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a lock file; the fields of the holder are empty if the file is damaged."""
        try:
            found = json.loads(text)
            return cls(**{name: found[name] for name in asdict(cls()) if name in found})
        except (ValueError, TypeError):
            return cls()

    def is_alive(self) -> bool | None:
        """Whether the process runs; None where this process cannot see it."""
        if not self.namespace or self.namespace != _namespace():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        state, started = _process_state(self.pid)
        return state not in ("Z", "X") and started in ("", self.started)


class FileLock:
    """The right to write what a lock file guards, as a context manager or by hand.

    Objects of one process share a lock that the process holds; the one that took it gives it
    back.
    """

    def __init__(self, path: Path, *, silent_s: float = SILENT_S) -> None:
        """Take nothing yet.

        Args:
            path: the lock file; its folder must exist when the lock is taken.
            silent_s: seconds without a change after which a holder is dead.
        """
        self.path = path
        self._silent_s = silent_s
        self._stop: threading.Event | None = None

    def acquire(self) -> None:
        """Take the lock, or share it if this process holds it already.

        Waits ``silent_s`` for a sign of life of a holder that this process cannot see.

        Raises:
            LockHeldError: if another process holds it and is alive.
            OSError: if the lock file cannot be written.
        """
        for _ in range(3):
            if self._create(json.dumps(asdict(Holder.current()))):
                self._stop = threading.Event()
                threading.Thread(target=self._beat, args=(self._stop,), daemon=True).start()
                self._remove_leftovers()
                return
            holder = self._dead_holder()
            if holder is None:
                continue
            if holder.token == Holder.current().token:
                return
            log.warning("taking over the lock of dead %s", holder)
            self._take_away(holder)
        raise LockHeldError(f"{self.path} changes hands too fast: is another job starting?")

    def check(self) -> None:
        """Make sure that this process still holds the lock, before something is made final.

        Raises:
            LockHeldError: if it was taken over, or is gone.
        """
        found = self.read()
        if found is None or found[0].token != Holder.current().token:
            raise LockHeldError(
                f"the lock of {self.path.parent} was lost: "
                f"{'no process' if found is None else found[0]} holds it now. Was this process "
                "stopped for minutes?"
            )

    def release(self) -> None:
        """Give the lock back, if this object took it."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            found = self.read()
            if found is not None and found[0].token == Holder.current().token:
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _create(self, content: str) -> bool:
        """Make the lock file; False if there is one."""
        ticket = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            # A link appears whole or not at all, on NFS too.
            ticket.write_text(content)
            os.link(ticket, self.path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                with self.path.open("x") as file:
                    file.write(content)
            except FileExistsError:
                return False
        finally:
            ticket.unlink(missing_ok=True)
        return True

    def read(self) -> tuple[Holder, float] | None:
        """Return the holder and when its file changed, by a clock not to be trusted."""
        try:
            # NFS asks the server when a file is opened.
            with self.path.open(errors="replace") as file:
                return Holder.parse(file.read()), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _touch(self) -> None:
        """Update the lock file's time; FileNotFoundError if there is no lock file."""
        os.utime(self.path)

    def _take_away(self, holder: Holder) -> None:
        """Remove the lock file of a dead holder, and of no other."""
        aside = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        if Holder.parse(aside.read_text(errors="replace")) != holder:
            # Another process took the lock in between: put its file back.
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.path)
        aside.unlink()

    def _remove_leftovers(self) -> None:
        """Remove files beside the lock that processes killed within ``acquire`` have left."""
        for path in self.path.parent.glob(f"{glob.escape(self.path.name)}.*"):
            with contextlib.suppress(OSError):  # its process has removed it
                if Holder.parse(path.read_text()).is_alive() is False:
                    path.unlink()

    def _dead_holder(self) -> Holder | None:
        """Return the holder, dead or this process; None if the lock is gone meanwhile."""
        first = found = self.read()
        started_s = time.monotonic()
        is_told = False
        while found is not None and first is not None:
            holder, is_alive = found[0], found[0].is_alive()
            is_dead = is_alive is False or time.monotonic() - started_s > self._silent_s
            if holder.token == Holder.current().token or (is_dead and not is_alive):
                return holder
            if is_alive or found != first:
                raise LockHeldError(f"{holder} is writing to {self.path.parent}")
            if not is_told:
                log.warning(
                    "%s holds %s, and this process cannot see whether it is alive: waiting up "
                    "to %.0f s for a sign of life",
                    *(holder, self.path, self._silent_s),
                )
                is_told = True
            time.sleep(min(_POLL_S, self._silent_s / 4))
            found = self.read()
        return None

    def _beat(self, stop: threading.Event) -> None:
        token = Holder.current().token
        while not stop.wait(BEAT_S):
            try:
                found = self.read()
                if found is None or found[0].token != token:
                    return
                self._touch()
            except OSError as error:  # A file server that is away for a moment comes back.
                log.warning("cannot touch %s: %s", self.path, error)


def lock_at(path: Path, silent_s: float = SILENT_S) -> FileLock:
    """Return the lock of a path on a disk or in an object store."""
    return (StoreLock if isinstance(path, StorePath) else FileLock)(path, silent_s=silent_s)


class StoreLock(FileLock):
    """A ``FileLock`` whose file is an object of an object store."""

    path: StorePath

    def _create(self, content: str) -> bool:
        # A conditional put, where the store has one. Elsewhere, of two writers that both find
        # no lock, the one whose content remains holds it.
        if self.path.is_file():
            return False
        try:
            self.path.system.pipe_file(self.path.key, content.encode(), mode="create")
        except OSError:  # of which kind it is when the object exists, differs between stores
            if self.path.is_file():
                return False
            raise
        except (TypeError, NotImplementedError):
            self.path.write_whole(content.encode())
        found = self.read()
        return found is not None and found[0] == Holder.parse(content)

    def read(self) -> tuple[Holder, float] | None:
        """Return the holder and when its object was written."""
        try:
            return Holder.parse(self.path.read_text()), self.path.modified_s()
        except FileNotFoundError:
            return None

    def _touch(self) -> None:
        self.path.write_whole(self.path.read_bytes())

    def _take_away(self, holder: Holder) -> None:
        found = self.read()
        if found is not None and found[0] == holder:
            self.path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Do nothing: taking this lock writes no other object."""


@cache
def _token(_pid: int) -> str:
    """Return this process's token; a forked child has another number, and so another."""
    return uuid.uuid4().hex


@cache
def _namespace() -> str:
    """Name the space within which process numbers are unique; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_state(pid: int) -> tuple[str, str]:
    """Return a process's state letter and start time; empty where they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    # The second field is a name in brackets, which may hold blanks and brackets.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
