"""Reads a folder of logs; returns the lines that report a failure, with rank, host and time.

Supported layouts: one file per rank, with the rank in its name (``rank_3.err``, ``task-3.log``,
``3.out``); torchrun's ``attempt_A/LOCAL_RANK/stderr.log``, one tree per host; one file for all
ranks, whose lines begin with ``[rank3]:``, ``[default3]:`` or Slurm's ``3:``; logs of
launchers, Slurm and the kernel. Only the last of torchrun's attempts is read.

A gigabyte takes seconds: numpy searches for pairs of letters that occur in error messages and
not in progress lines. Regular expressions are applied only to lines with such a pair, and to
the end of each file.
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
"""Bytes that are compared at once; they fit the processor's cache."""
EDGE_BYTES = 1 << 13
"""Bytes at the end of a file that are searched for all words, also without ``_PAIRS``."""
LONGEST_LINE = 4096
"""Largest number of bytes that are read of a line."""
LOOKAHEAD_BYTES = 1 << 18
"""Bytes after a finding that are searched for further steps: then the run continued."""
MAX_ALIKE = 8
"""Number of lines of one file, equal but for their digits, that are compared with the rules."""
BINARY = {".bin", ".idx", ".safetensors", ".pt", ".pth", ".svg", ".png", ".gz", ".xz", ".zst",
          ".pickle", ".pkl", ".npy", ".json", ".jsonl", ".toml", ".pyc"}  # fmt: skip
"""Suffixes of files that are not logs."""

_PAIRS = (b"rr", b"RR", b"Xi", b"WA", b"xc", b"Ki")
"""Letters of: error and KeyboardInterrupt, ERROR, Xid, WARN, exception and exceeded, Killed."""
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
_CONTROL = re.compile(rb"[\x01-\x07\x0e-\x1a\x7f]")
_PROGRESS = re.compile(rb"iteration +(\d+)/ *\d+")
_RANK_OF_FILE = (
    re.compile(r"(?:^|[^a-z])(?:global_?)?(?:rank|task|proc)[-_.]?(\d+)(?!\d)"),
    re.compile(r"^(\d+)\.(?:out|err|log|txt)$"),
)
_RUN_FOLDER = re.compile(r".+_[a-z0-9_]{8}")  # torchrun: name of the run, random letters
_RANK_SUFFIX = re.compile(r"[-_.](?:rank|task)[-_]?\d+$")
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
    """One or more log lines that report a failure."""

    rule: Rule
    text: str
    rank: int | None
    """Rank at fault: the rank that the line names, else the rank that wrote the line."""
    time_s: float | None
    """Seconds since 1970 by the host's clock and time zone; None: no time near the line."""
    host: str
    file: Path
    offset: int
    """Byte offset of the line in its file."""
    is_named: bool = False
    """Whether a launcher or another rank names the rank at fault."""
    place: str = ""
    """Line of code or collective at fault, if the watchdog reported it."""


@dataclass(slots=True)
class LogFile:
    """Facts of one log file."""

    path: Path
    rank: int | None
    """Global rank that wrote the file; None: several ranks, or no rank."""
    host: str
    findings: list[Finding] = field(default_factory=list)
    last_step: int | None = None
    """Step of the last progress line."""


def read_logs(folder: Path) -> list[LogFile]:
    """Read all logs in a folder and its sub-folders, or one log file.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if the folder has no logs.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: give the folder of a run's logs.")
    paths = (
        [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    )
    paths = [p for p in paths if p.suffix not in BINARY and "tfevents" not in p.name]
    attempts = [_attempt(path, folder) for path in paths]
    newest = max((a for a in attempts if a is not None), default=None)
    paths = [p for p, attempt in zip(paths, attempts, strict=True) if attempt in (None, newest)]
    ordinary: set[bytes] = set()
    files = [log for path in paths if (log := _read_file(path, folder, ordinary)) is not None]
    if not files:
        raise ValueError(f"{folder} holds no log: give the folder of the ranks' output.")
    return files


def _attempt(path: Path, folder: Path) -> int | None:
    for part in path.relative_to(folder).parts if path != folder else ():
        if match := re.fullmatch(r"attempt_(\d+)", part):
            return int(match[1])
    return None


def _read_file(path: Path, folder: Path, ordinary: set[bytes]) -> LogFile | None:
    """Read one file; return None if it is not text.

    Args:
        path: the file.
        folder: folder of all logs.
        ordinary: lines, without their digits, that no rule recognized; extended in place.
    """
    size = path.stat().st_size
    if size == 0:
        return LogFile(path, _rank_of_path(path, folder), _host_of_path(path, folder))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if not _is_text(data[:EDGE_BYTES]):
            return None
        # Prefixes of lines are global ranks; names of torchrun's folders are local ranks.
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


def _is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are text: no pickle, few control characters.

    NULs are ignored: messages of C programs may end in one, and a shared file system fills a
    hole in a log with them.
    """
    rest = head.replace(b"\0", b"")
    is_pickle = head[:1] == b"\x80"
    return not is_pickle and len(_CONTROL.findall(rest)) <= 0.02 * len(rest)


def _last_step(data: mmap.mmap) -> int | None:
    """Return the step of the last progress line near the end of a file."""
    end, first = len(data), max(0, len(data) - 16 * EDGE_BYTES)
    while (position := data.rfind(b"iteration ", first, end)) >= 0:
        if step := _PROGRESS.match(data, position):
            return int(step[1])
        end = position
    return None


def _suspicious_lines(
    data: mmap.mmap, ordinary: set[bytes]
) -> Iterator[tuple[int, int, bytes]]:
    """Yield begin, end and text without digits of lines that may report a failure, in order."""
    size = len(data)
    seen: Counter[bytes] = Counter()
    done = 0  # end of the last examined line
    for position in _suspicious_positions(data):
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
        if seen[alike] <= MAX_ALIKE:
            yield start, end, alike


def _suspicious_positions(data: mmap.mmap) -> Iterator[int]:
    """Yield positions of pairs of letters, and of suspicious words at the end of the file."""
    size = len(data)
    last = max(0, size - EDGE_BYTES)
    for begin in range(0, last, CHUNK_BYTES):
        yield from _pair_positions(data, begin, min(last, begin + CHUNK_BYTES))
    for match in _SUSPECT.finditer(data[last:]):
        yield last + match.start()


def _pair_positions(data: mmap.mmap, begin: int, end: int) -> list[int]:
    """Return the positions of ``_PAIRS`` in bytes ``begin`` to ``end`` of a file."""
    # One more byte, to find a pair across the border of two chunks. The arrays must be freed
    # when this function returns, or the map cannot be closed.
    chunk = np.frombuffer(data, np.uint8, min(end + 1, len(data)) - begin, begin)
    left, right = chunk[:-1], chunk[1:]
    hits = np.zeros(len(left), bool)
    for first, second in _PAIRS:
        hits |= (left == first) & (right == second)
    return (begin + np.flatnonzero(hits)).tolist() if hits.any() else []


def _finding(
    data: mmap.mmap, start: int, end: int, log: LogFile, modified_s: float
) -> Finding | None:
    """Return the failure that a line reports; None if it reports none."""
    line = data[start : min(end, start + LONGEST_LINE)].decode(errors="replace")
    line = line.replace("\0", "")
    text, writer = _without_prefix(line, log)
    if text.startswith("mcore-train: error:"):
        text += _following_items(data, end)
    if code := _SUMMARY.match(text):  # torchrun's summary: rank and exit code on separate lines
        ranks = re.findall(r"rank +: (\d+) \(local", data[max(0, start - 400) : start].decode())
        text = _exit_message(ranks[-1] if ranks else "", int(code[1]))
    place, is_named = "", False
    if watchdog := _watch_finding(text):
        rule, rank, place, text = watchdog
        is_named = True
    elif match := recognize(text):
        rule, is_named = match.rule, match.rank is not None
        rank = match.rank if is_named else writer
    else:
        return None
    host = log.host
    if match := _HOST_OF_LINE.search(line):
        host = next(value for value in match.groups() if value)
    time_s = _time_near(line, data, start, end, modified_s)
    return Finding(rule, text.strip(), rank, time_s, host, log.path, start, is_named, place)


def _exit_message(rank: str, code: int) -> str:
    """Return the message of mcore's launcher for the exit code of a rank."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    return f"rank {rank} was ended by {signal.Signals(-code).name}"


def _watch_finding(text: str) -> tuple[Rule, int | None, str, str] | None:
    """Parse a line of mcore's watchdog, which names the first rank that failed."""
    ended = _WATCH.match(text)
    fault = ended["fault"] if ended else text
    failed = _FAILED.match(fault)
    if failed is None:
        return None
    match = recognize(failed["error"])
    if match is None:
        return None
    rank, rule = int(failed["rank"]), match.rule
    # A rank that failed in a collective may only have waited for another rank, which is silent.
    others = failed["others"] or ""
    is_reaction = rule.role != "root" or failed["place"].startswith("in ")
    absent = _SILENT.search(others) if is_reaction else None
    if absent is None and rule.fault == "collective_timeout":
        absent = _ELSEWHERE.search(others)  # the rank that is not in a collective
    if absent is not None:
        match = recognize(f"rank {absent[1]} is gone: silent for")
        assert match is not None
        return match.rule, int(absent[1]), failed["place"], fault
    return rule, rank, failed["place"], fault


def _without_prefix(line: str, log: LogFile) -> tuple[str, int | None]:
    """Remove the rank's prefix from a line; return the text and the rank that wrote it."""
    match = _PREFIX.match(line)
    assert match is not None
    text, rank = line[match.end() :], log.rank
    for name in ("task", "role", "rank"):  # the later one has precedence
        if match[name] is not None and (name != "role" or rank is None):
            rank = int(match[name])
    if rank is None and (named := re.search(r"\[rank(\d+)\]:|\bRank (\d+)\]", line)):
        rank = int(named[1] or named[2])
    return text, rank


def _following_items(data: mmap.mmap, end: int) -> str:
    """Return the items of the list of errors that follows a line."""
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
    """Return the time of a line, else of the next line with a time, else of the previous."""
    year = time.localtime(modified_s).tm_year
    if (line_time := _time_of(line, year)) is not None:
        return line_time
    after = data[end : end + 3 * LONGEST_LINE].decode(errors="replace")
    if (following := _time_of(after, year)) is not None:
        return following
    before = data[max(0, start - LONGEST_LINE) : start].decode(errors="replace")
    return _time_of(before, year, last=True)


def _time_of(text: str, year: int, *, last: bool = False) -> float | None:
    times = []
    for match in _ISO.finditer(text):
        *numbers, fraction = match.groups()
        times.append((match.start(), tuple(map(int, numbers)), f"0.{fraction or 0}"))
    for match in _GLOG.finditer(text):
        *numbers, fraction = match.groups()
        times.append((match.start(), (year, *map(int, numbers)), f"0{fraction or '.0'}"))
    if not times:
        return None
    _, numbers, fraction = (max if last else min)(times)
    year, month, day, hour, minute, second = numbers
    try:
        moment = (year, month, day, hour, minute, second, 0, 0, -1)
        return time.mktime(moment) + float(fraction)
    except (OverflowError, ValueError):
        return None


def _drop_recovered(log: LogFile, data: mmap.mmap) -> None:
    """Drop findings after which the file reports four more steps: then the run continued."""

    def continues(position: int) -> bool:
        end = position + LOOKAHEAD_BYTES
        for _ in range(4):
            while True:
                position = data.find(b"iteration ", position + 1, end)
                if position < 0:
                    return False
                if _PROGRESS.match(data, position):
                    break
        return True

    log.findings = [f for f in log.findings if f.rule.outside or not continues(f.offset)]


def _rank_of_path(path: Path, folder: Path) -> int | None:
    parts = path.relative_to(folder).parts if path != folder else (path.name,)
    for pattern in _RANK_OF_FILE:
        for part in reversed(parts):
            if match := pattern.search(part.lower()):
                return int(match[1])
    for attempt, local in pairwise(parts):
        if attempt.startswith("attempt_") and local.isdecimal():
            return int(local)
    return None


def _rank_of_content(data: mmap.mmap) -> int | None:
    """Return the only rank in the line prefixes at both ends of a file, else None."""
    edges = data[: 4 * EDGE_BYTES] + data[-4 * EDGE_BYTES :]
    if _LAUNCHERS.search(edges):
        return None
    ranks = set(re.findall(rb"\[rank(\d+)\]:", edges))
    return int(next(iter(ranks))) if len(ranks) == 1 else None


def _host_of_path(path: Path, folder: Path) -> str:
    """Return the host in the folder names or the file name; "" if no name looks like a host."""
    parts = path.relative_to(folder).parts if path != folder else (path.name,)
    for part, inner in pairwise((*parts, "")):
        if inner.startswith("attempt_") and _RUN_FOLDER.fullmatch(part):
            continue
        stem = _RANK_SUFFIX.sub("", part.split(".")[0])
        if re.fullmatch(
            r"(?:node|host|gpu|worker|n|ip)[-_]?[\w-]*\d+", stem
        ) and not re.fullmatch(r"(?:rank|task)[-_]?\d+", stem):
            return stem
    return ""
