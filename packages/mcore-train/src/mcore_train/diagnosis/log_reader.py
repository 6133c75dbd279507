"""Reads a folder of logs: which lines report a failure, of which rank, on which host, and when.

Layouts: one file a rank, named for it (``rank_3.err``, ``task-3.log``, ``3.out``); torchrun's
``attempt_A/LOCAL_RANK/stderr.log``, one tree a host; one file for all ranks, whose lines begin
with ``[rank3]:``, ``[default3]:`` or Slurm's ``3:``; logs of launchers, Slurm and the kernel.
Of torchrun's attempts the last is read.

A gigabyte takes seconds: numpy looks for pairs of letters that error messages have and progress
lines have not, and regular expressions see only the lines around them and the end of each file.
"""

import mmap
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from mcore_train.diagnosis.rules import Rule, recognize

CHUNK_BYTES = 1 << 18
"""Bytes that are compared at once; they stay in the processor's cache."""
EDGE_BYTES = 1 << 13
"""Last part of a file, in which words are looked for that have none of ``_PAIRS``."""
LONGEST_LINE = 4096
"""Bytes of a line that are read."""
LOOKAHEAD_BYTES = 1 << 18
"""Bytes after a finding in which further steps show that the run went on."""
MOST_ALIKE = 8
"""Lines of one file that differ only in their digits and are compared with the rules."""
BINARY = {".bin", ".idx", ".safetensors", ".pt", ".pth", ".svg", ".png", ".gz", ".xz", ".zst",
          ".pickle", ".pkl", ".npy", ".json", ".jsonl", ".toml", ".pyc"}  # fmt: skip
"""Suffixes of files that are no logs."""

_PAIRS = (b"rr", b"RR", b"Xi", b"WA", b"xc", b"Ki")
"""Of error and KeyboardInterrupt, ERROR, Xid, WARN, exception and exceeded, Killed."""
_SUSPECT = re.compile(
    rb"rror|RROR|Xid|WARN|WATCH|xce|Kill|nterrupt|atchdog|CANCEL| ends[ :]|ended (?:by|with)|"
    rb"is gone|not come|sent nothing|imed out|imeout|ime out|Signal|signal|fault|bort|ailed|"
    rb"ailure|oom|OOM|preempt|Preempt|fallen|DUE TO|disagree|mismatch|refused|refusing|link|"
    rb"Fatal|exitcode|NVRM|GPU is lost|usage: |not responding|No such|closed by|not moved|"
    rb"terminate called"
)
_PREFIX = re.compile(
    r"^(?:\[[\w-]*?(?P<role>\d+)\]:|(?P<task>\d{1,5}): )?\s?(?:\[rank(?P<rank>\d+)\]:)?\s?"
)
_DIGITS = re.compile(rb"\d+")
_PROGRESS = re.compile(rb"iteration +(\d+)/ *\d+")
_RANK_OF_FILE = (
    re.compile(r"(?:^|[^a-z])(?:global_?)?(?:rank|task|proc)[-_.]?(\d+)(?!\d)"),
    re.compile(r"^(\d+)\.(?:out|err|log|txt)$"),
)
_HOST_OF_LINE = re.compile(
    r" ON (?P<slurm>[\w.-]+) CANCELLED|error: (?P<srun>[\w.-]+): task|"
    r"host +: (?P<torchrun>[\w.-]+)"
)
_GLOG = re.compile(r"\b[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(\.\d+)?")
_ISO = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_WATCH = re.compile(
    r"^rank (?P<writer>\d+) ends(?: \(it was (?P<place>.*?)\))?: (?P<fault>.*)", re.S
)
_FAILED = re.compile(
    r"rank (?P<rank>\d+) failed (?P<place>(?:in|at|nowhere).*?): (?P<error>[A-Za-z_]\w*: ?.*?)"
    r"(?:\. The others: (?P<others>.*))?$", re.S)  # fmt: skip
_LAUNCHERS = re.compile(rb"torch/distributed/elastic|slurmstepd:|srun:|; ending the others")
_SUMMARY = re.compile(r"^\s*exitcode +: (-?\d+) \(pid")
_ELSEWHERE = re.compile(r"ranks? (\d+)[\d, .]* at ")
_SILENT = re.compile(r"ranks? (\d+)[\d, .]* SILENT, last")


@dataclass(slots=True)
class Finding:
    """A line, or a few, that report a failure."""

    rule: Rule
    text: str
    rank: int | None
    """At fault by this line: that of the line's writer, unless the line names another."""
    time_s: float | None
    """Since 1970 in the host's clock and zone; None: no time near the line."""
    host: str
    file: Path
    offset: int
    """Of the line in its file."""
    is_named: bool = False
    """Whether a launcher or another rank names the rank at fault."""
    place: str = ""
    """Line of code or collective at fault, where the watchdog named it."""


@dataclass(slots=True)
class LogFile:
    """One log file of the folder, with the facts read from it."""

    path: Path
    rank: int | None
    """Global rank that wrote the file; None: several, or none."""
    host: str
    findings: list[Finding] = field(default_factory=list)
    last_step: int | None = None
    """Last step of a progress line."""


def read_logs(folder: Path) -> list[LogFile]:
    """Read all logs below a folder, or one file.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if it holds no log.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: give the folder of a run's logs.")
    paths = (
        [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    )
    paths = [p for p in paths if p.suffix not in BINARY and "tfevents" not in p.name]
    attempts = [_attempt(path, folder) for path in paths]
    newest = max((a for a in attempts if a is not None), default=None)
    kept = [p for p, attempt in zip(paths, attempts, strict=True) if attempt in (None, newest)]
    ordinary: set[bytes] = set()
    files = [read for path in kept if (read := _read_file(path, folder, ordinary)) is not None]
    if not files:
        raise ValueError(f"{folder} holds no log: give the folder of the ranks' output.")
    return files


def _attempt(path: Path, folder: Path) -> int | None:
    for part in path.relative_to(folder).parts if path != folder else ():
        if found := re.fullmatch(r"attempt_(\d+)", part):
            return int(found[1])
    return None


def _read_file(path: Path, folder: Path, ordinary: set[bytes]) -> LogFile | None:
    """Read one file; None if it is no text.

    Args:
        path: of the file.
        folder: that triage was given.
        ordinary: lines without their digits that no rule recognized; grows.
    """
    size = path.stat().st_size
    if size == 0:
        return LogFile(path, _rank_of_path(path, folder), _host_of_path(path, folder))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if b"\0" in data[:1024] or data[:1] == b"\x80":  # the second one begins a pickle
            return None
        # A prefix is the rank in the world; torchrun's folders count within a host.
        rank = _rank_of_content(data)
        rank = _rank_of_path(path, folder) if rank is None else rank
        log = LogFile(path, rank, _host_of_path(path, folder))
        modified_s = path.stat().st_mtime
        for start, end, alike in _suspicious_lines(data, ordinary):
            finding = _finding(data, start, end, log, modified_s)
            if finding is None:
                ordinary.add(alike)
            else:
                log.findings.append(finding)
        log.last_step = _last_step(data)
        _drop_recovered(log, data)
    return log


def _last_step(data: mmap.mmap) -> int | None:
    """Return the number of the last progress line near the end of a file."""
    end, first = len(data), max(0, len(data) - 16 * EDGE_BYTES)
    while (place := data.rfind(b"iteration ", first, end)) >= 0:
        if step := _PROGRESS.match(data, place):
            return int(step[1])
        end = place
    return None


def _suspicious_lines(
    data: mmap.mmap, ordinary: set[bytes]
) -> Iterator[tuple[int, int, bytes]]:
    """Yield begin, end and digitless text of lines that may report a failure, in order."""
    size = len(data)
    seen: Counter[bytes] = Counter()
    done = 0  # end of the last line looked at
    for position in _suspicious_places(data):
        if position < done:
            continue
        start = data.rfind(b"\n", max(done, position - LONGEST_LINE), position) + 1 or max(
            done, position - LONGEST_LINE
        )
        end = data.find(b"\n", position, min(size, position + LONGEST_LINE))
        end = done = min(size, position + LONGEST_LINE) if end < 0 else end
        line = data[start:end]
        if _SUSPECT.search(line) is None:
            continue
        alike = _DIGITS.sub(b"", line[:300])
        if alike in ordinary:
            continue
        seen[alike] += 1
        if seen[alike] <= MOST_ALIKE:
            yield start, end, alike


def _suspicious_places(data: mmap.mmap) -> Iterator[int]:
    """Yield places of pairs of letters, and of suspicious words at the end of the file."""
    size = len(data)
    last = max(0, size - EDGE_BYTES)
    for begin in range(0, last, CHUNK_BYTES):
        yield from _pair_places(data, begin, min(last, begin + CHUNK_BYTES))
    for found in _SUSPECT.finditer(data[last:]):
        yield last + found.start()


def _pair_places(data: mmap.mmap, begin: int, end: int) -> list[int]:
    """Return the places of ``_PAIRS`` between two places of a file."""
    # One byte more, so that a pair across the border of two chunks is seen. The arrays must not
    # outlive this call, or the map cannot be closed.
    chunk = np.frombuffer(data, np.uint8, min(end + 1, len(data)) - begin, begin)
    left, right = chunk[:-1], chunk[1:]
    hits = np.zeros(len(left), bool)
    for one, other in _PAIRS:
        hits |= (left == one) & (right == other)
    return (begin + np.flatnonzero(hits)).tolist() if hits.any() else []


def _finding(
    data: mmap.mmap, start: int, end: int, log: LogFile, modified_s: float
) -> Finding | None:
    """Read one line; None if it reports no failure."""
    line = data[start : min(end, start + LONGEST_LINE)].decode(errors="replace")
    text, writer = _without_prefix(line, log)
    if text.startswith("mcore-train: error:"):
        text += _following_items(data, end)
    if code := _SUMMARY.match(text):  # torchrun's table of failed ranks, one line a column
        ranks = re.findall(r"rank +: (\d+) \(local", data[max(0, start - 400) : start].decode())
        text = _exit_message(ranks[-1] if ranks else "", int(code[1]))
    place, is_named = "", False
    if found := _watch_finding(text):
        rule, rank, place, text = found
        is_named = True
    elif match := recognize(text):
        rule, is_named = match.rule, match.rank is not None
        rank = match.rank if is_named else writer
    else:
        return None
    host = log.host
    if found := _HOST_OF_LINE.search(line):
        host = next(value for value in found.groups() if value)
    time_s = _time_near(line, data, start, end, modified_s)
    return Finding(rule, text.strip(), rank, time_s, host, log.path, start, is_named, place)


def _exit_message(rank: str, code: int) -> str:
    """Return the end of a rank in the words of this trainer's launcher."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    return f"rank {rank} was ended by {signal.Signals(-code).name}"


def _watch_finding(text: str) -> tuple[Rule, int | None, str, str] | None:
    """Read a line of this trainer's watchdog, which names the first rank that failed."""
    ended = _WATCH.match(text)
    fault = ended["fault"] if ended else text
    failed = _FAILED.match(fault)
    if failed is None:
        return None
    match = recognize(failed["error"])
    if match is None:
        return None
    rank, rule = int(failed["rank"]), match.rule
    # A rank that failed in a collective may have missed another one, which is silent.
    others = failed["others"] or ""
    is_reaction = rule.role != "root" or failed["place"].startswith("in ")
    absent = _SILENT.search(others) if is_reaction else None
    if absent is None and rule.fault == "collective_timeout":
        absent = _ELSEWHERE.search(others)  # not in a collective, as all others are
    if absent is not None:
        match = recognize(f"rank {absent[1]} is gone: silent for")
        assert match is not None
        return match.rule, int(absent[1]), failed["place"], fault
    return rule, rank, failed["place"], fault


def _without_prefix(line: str, log: LogFile) -> tuple[str, int | None]:
    """Take the rank's prefix off a line; return the rest and the rank that wrote it."""
    found = _PREFIX.match(line)
    assert found is not None
    text, rank = line[found.end() :], log.rank
    for name in ("task", "role", "rank"):  # the last one counts most
        if found[name] is not None and (name != "role" or rank is None):
            rank = int(found[name])
    if rank is None and (named := re.search(r"\[rank(\d+)\]:|\bRank (\d+)\]", line)):
        rank = int(named[1] or named[2])
    return text, rank


def _following_items(data: mmap.mmap, end: int) -> str:
    """Return the items of a list of faults that follow a line."""
    lines = data[end + 1 : end + 1 + LONGEST_LINE].decode(errors="replace").split("\n")
    items = []
    for line in lines:
        if not re.search(r"^(?:\[\w+\]:|\d+: )?\s+- ", line):
            break
        items.append(re.sub(r"^(?:\[\w+\]:|\d+: )?", "", line))
    return "".join(f"\n{item}" for item in items)


def _time_near(
    line: str, data: mmap.mmap, start: int, end: int, modified_s: float
) -> float | None:
    """Return the time of a line, else of the next line that has one, else of the one before."""
    year = time.localtime(modified_s).tm_year
    if (own := _time_of(line, year)) is not None:
        return own
    after = data[end : end + 3 * LONGEST_LINE].decode(errors="replace")
    if (following := _time_of(after, year)) is not None:
        return following
    before = data[max(0, start - LONGEST_LINE) : start].decode(errors="replace")
    return _time_of(before, year, last=True)


def _time_of(text: str, year: int, *, last: bool = False) -> float | None:
    found = []
    for match in _ISO.finditer(text):
        *numbers, fraction = match.groups()
        found.append((match.start(), tuple(map(int, numbers)), f"0.{fraction or 0}"))
    for match in _GLOG.finditer(text):
        *numbers, fraction = match.groups()
        found.append((match.start(), (year, *map(int, numbers)), f"0{fraction or '.0'}"))
    if not found:
        return None
    _, numbers, fraction = (max if last else min)(found)
    year, month, day, hour, minute, second = numbers
    try:
        moment = (year, month, day, hour, minute, second, 0, 0, -1)
        return time.mktime(moment) + float(fraction)
    except (OverflowError, ValueError):
        return None


def _drop_recovered(log: LogFile, data: mmap.mmap) -> None:
    """Drop findings after which the same file reports four more steps: the run went on."""

    def goes_on(place: int) -> bool:
        end = place + LOOKAHEAD_BYTES
        for _ in range(4):
            while True:
                place = data.find(b"iteration ", place + 1, end)
                if place < 0:
                    return False
                if _PROGRESS.match(data, place):
                    break
        return True

    log.findings = [f for f in log.findings if f.rule.outside or not goes_on(f.offset)]


def _rank_of_path(path: Path, folder: Path) -> int | None:
    parts = path.relative_to(folder).parts if path != folder else (path.name,)
    for pattern in _RANK_OF_FILE:
        for part in reversed(parts):
            if found := pattern.search(part.lower()):
                return int(found[1])
    for attempt, local in pairwise(parts):
        if attempt.startswith("attempt_") and local.isdecimal():
            return int(local)
    return None


def _rank_of_content(data: mmap.mmap) -> int | None:
    """Return the one rank whose prefix lines at the edges have; None in a launcher's log."""
    edges = data[: 4 * EDGE_BYTES] + data[-4 * EDGE_BYTES :]
    if _LAUNCHERS.search(edges):
        return None
    ranks = set(re.findall(rb"\[rank(\d+)\]:", edges))
    return int(next(iter(ranks))) if len(ranks) == 1 else None


def _host_of_path(path: Path, folder: Path) -> str:
    """Return the folder or file name that names a host; empty: none does."""
    parts = path.relative_to(folder).parts if path != folder else (path.name,)
    for part in parts:
        stem = part.split(".")[0]
        if re.fullmatch(
            r"(?:node|host|gpu|worker|n|ip)[-_]?[\w-]*\d+", stem
        ) and not re.fullmatch(r"(?:rank|task)[-_]?\d+", stem):
            return stem
    return ""
