"""Determines why a run failed: the first error of all ranks, its class, and what to do.

``triage(folder)`` reads the logs of a folder and returns a ``Verdict``. It separates the cause
from the reactions of other ranks and from messages of the job's end. Causes in this order of
precedence:

1. A broken device, reported by the device or the kernel.
2. The end by the scheduler (preemption, time limit) or a kill for memory by the kernel, unless
   an exception is clearly earlier.
3. Exceptions: first the one that the watchdog reports, then by time.
4. Processes that were killed or crashed without an exception.
5. Ranks that did not reach a collective, and failures of the network.
6. If there are only reactions, the ranks without one.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_train.diagnosis.continue_command import continue_command, recorded_command
from mcore_train.diagnosis.flight_recorder import AbsentRanks, read_dumps
from mcore_train.diagnosis.log_reader import Finding, LogFile, read_logs
from mcore_train.diagnosis.memory_remedies import MemoryRecord, cheapest_remedy, memory_record
from mcore_train.diagnosis.rules import FAULTS

SAME_MOMENT_S = 120.0
"""An exception so long before the end by scheduler or kernel is the cause."""
_ENDS = ("preemption", "time_limit", "host_memory")
_DIED = ("killed", "crash", "cancelled")
_APART = ("network", "collective_timeout", "rendezvous")
_WORK = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: (\d+)")
_SEQUENCE = re.compile(r"SeqNum=(\d+), OpType=(\w+)")
_GROUP = re.compile(r"PG GUID (\w+)")
_LOOPBACK = re.compile(r"\[(?:127\.\d+\.\d+\.\d+|::1)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why a run ended."""

    fault: str
    """Class of the failure, one of ``FAULTS``."""
    retry: bool
    """Whether to start the same command again."""
    exit_code: int
    """Exit code of triage: 0 for a finished run, 10 to 29 stop, 30 and above retry."""
    root_ranks: tuple[int, ...]
    """Ranks at fault, the first rank first; empty if the cause is no rank, or not known."""
    hosts: tuple[str, ...]
    """Hosts of these ranks, if the logs name them."""
    exclude_hosts: tuple[str, ...]
    """Hosts to leave out of the next attempt: those whose hardware failed."""
    message: str
    """The line that reports the cause."""
    place: str
    """Line of code or collective at fault; "" if not known."""
    file: str
    """Log with the message."""
    step: int | None
    """Last step that the logs report."""
    advice: str
    command: str
    """Command line that continues the run, with the option that fixes the failure if there is
    one; "" if the run must not be continued unchanged."""
    memory: MemoryRecord | None
    """Memory of a run out of GPU memory."""
    num_logs: int
    num_cascade: int
    """Findings that are reactions to another rank's failure."""
    num_teardown: int
    """Findings that belong to the end of the job."""

    def to_json(self) -> str:
        """Return the verdict as JSON."""
        return json.dumps(asdict(self))

    def page(self) -> str:
        """Format the verdict as text."""
        summary = FAULTS[self.fault].summary
        ranks = _list_some(self.root_ranks) or "none"
        lines = [
            f"{self.fault}: {summary}",
            f"retry: {'yes' if self.retry else 'no'}",
            f"root: rank {ranks}" + (f" on {', '.join(self.hosts)}" if self.hosts else ""),
        ]
        if self.place:
            lines.append(f"where: {self.place}")
        if self.step is not None:
            lines.append(f"last reported step: {self.step}")
        if self.message:
            lines += [f"message ({self.file}):", *_indented(self.message)]
        if self.memory is not None:
            lines += self.memory.lines()
        if self.advice:
            lines.append(f"do: {self.advice}")
        if self.exclude_hosts:
            lines.append(f"leave out: {', '.join(self.exclude_hosts)}")
        if self.command:
            lines.append(f"continue: {self.command}")
        lines.append(
            f"read: {self.num_logs} logs; {self.num_cascade} reactions to the failure, "
            f"{self.num_teardown} messages of the job's end"
        )
        return "\n".join(lines)


def triage(folder: str | Path) -> Verdict:
    """Read the logs of a run that ended; return why it ended and whether to retry.

    Args:
        folder: folder of the logs of all ranks, at any depth; it may also have logs of the
            launcher, Slurm and the kernel, and dumps of the flight recorder. Or one log file.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if the folder has no logs.
    """
    folder = Path(folder)
    logs = read_logs(folder)
    absent = read_dumps(folder)
    findings = [finding for log in logs for finding in log.findings]
    cause = _cause(findings)
    if cause is None:
        return _without_cause(folder, logs, findings, absent)
    if cause.rule.fault == "collective_timeout" and absent is not None:
        return _verdict(folder, logs, cause, absent.fault, absent.ranks, absent.describe())
    ranks = _ranks_alike(cause, findings)
    return _verdict(folder, logs, cause, cause.rule.fault, ranks, cause.text)


def _cause(findings: Sequence[Finding]) -> Finding | None:
    """Return the cause by the order of precedence in the module docstring; None without one."""
    reacting = {f.rank for f in findings if f.rule.role == "cascade" and not f.place}
    # ft_launcher's monitors kill every rank whose section exceeds its time.
    by_monitor = ("killed",) * any(f.rule.name == "section timed out" for f in findings)
    roots = [
        finding
        for finding in findings
        if finding.rule.role == "root"
        # A rank that ended after it reported another rank's failure is not a cause.
        and not (
            finding.rule.name in ("native crash", "exit code") and finding.rank in reacting
        )
        and finding.rule.name not in by_monitor
    ]
    by_tier: dict[int, list[Finding]] = {}
    for finding in roots:
        by_tier.setdefault(_tier(finding), []).append(finding)
    for tier in sorted(by_tier):
        first = _first(by_tier[tier])
        earlier = [f for f in by_tier.get(3, ()) if _is_clearly_earlier(f, first)]
        if tier == 2 and earlier:
            return _first(earlier)
        return first
    return None


def _tier(finding: Finding) -> int:
    rule = finding.rule
    if rule.outside and rule.fault == "hardware":
        return 1
    if rule.outside and rule.fault in _ENDS:
        return 2
    if rule.name == "exit code":
        return 6
    if rule.fault in _APART:
        return 5
    return 4 if rule.fault in _DIED else 3


def _first(findings: Sequence[Finding]) -> Finding:
    """Return the finding that is likeliest the first error of the run.

    In this order: findings of the watchdog, findings that name a rank, earlier ones, findings
    of specific rules.
    """

    def order(finding: Finding) -> tuple[bool, bool, bool, float, bool, int, int]:
        rank = finding.rank
        return (
            not finding.place,
            # Last: a peer reports only that a process ended, its launcher the signal too.
            finding.rule.name == "dead rank",
            not finding.is_named,
            float("inf") if finding.time_s is None else finding.time_s,
            finding.rule.name in ("exception", "refused command"),
            -1 if rank is None else rank,
            finding.offset,
        )

    return min(findings, key=order)


def _is_clearly_earlier(finding: Finding, end: Finding) -> bool:
    if finding.time_s is None or end.time_s is None:
        return False
    return finding.time_s < end.time_s - SAME_MOMENT_S


def _ranks_alike(cause: Finding, findings: Iterable[Finding]) -> tuple[int, ...]:
    """Return the rank of the cause, and then the other ranks that report the same message."""
    if cause.rule.outside and cause.rule.fault in _ENDS and not cause.is_named:
        killed = {f.rank for f in findings if f.rule.fault == "killed" and f.rank is not None}
        return tuple(sorted(killed)) if cause.rule.fault == "host_memory" else ()
    if cause.rank is None:
        # The kernel names a device, not a rank; the only rank with an error used the device.
        others = {f.rank for f in findings if f.rule.role == "root" and f.rank is not None}
        return tuple(sorted(others)) if len(others) == 1 else ()
    if cause.is_named:
        return (cause.rank,)
    alike = {
        finding.rank
        for finding in findings
        if finding.rank is not None
        and finding.rule is cause.rule
        and _without_digits(finding.text) == _without_digits(cause.text)
    }
    return (cause.rank, *sorted(alike - {cause.rank}))


def _without_digits(text: str) -> str:
    return re.sub(r"\d+", "", text)


def _without_cause(
    folder: Path,
    logs: Sequence[LogFile],
    findings: Sequence[Finding],
    absent: AbsentRanks | None,
) -> Verdict:
    """Return the verdict for logs without a cause: reactions, the job's end, or nothing."""
    cascade = [finding for finding in findings if finding.rule.role == "cascade"]
    if absent is not None:
        first = _first(cascade) if cascade else None
        return _verdict(folder, logs, first, absent.fault, absent.ranks, absent.describe())
    if cascade:
        timeouts = [f for f in cascade if f.rule.fault == "collective_timeout"]
        first = _first(timeouts or cascade)
        ranks = _late_ranks(timeouts, cascade) if timeouts else ()
        if not ranks:
            reacting = {finding.rank for finding in cascade}
            ranks = tuple(sorted({log.rank for log in logs if log.rank is not None} - reacting))
        if first.rule.fault == "network" and ranks and _LOOPBACK.search(first.text):
            return _ended_early(folder, logs, findings, first, ranks)
        return _verdict(folder, logs, first, first.rule.fault, ranks, first.text)
    if findings:
        return _verdict(folder, logs, findings[0], "killed", (), findings[0].text)
    is_finished = any(_is_finished(log.path) for log in logs)
    return _verdict(folder, logs, None, "finished" if is_finished else "unknown", (), "")


def _ended_early(
    folder: Path,
    logs: Sequence[LogFile],
    findings: Sequence[Finding],
    first: Finding,
    ranks: tuple[int, ...],
) -> Verdict:
    """Return the verdict for ranks without an error whose connections to their host closed.

    Processes of one host need no network: a closed connection means that the process ended.
    torchrun reports each worker that a signal ended; if it reports others only, this worker
    ended with exit code 0.
    """
    if not any(finding.rule.name == "exit code" for finding in findings):
        return _verdict(folder, logs, first, "killed", ranks, first.text)
    message = (
        f"rank {_list_some(ranks)} ended without an error while other ranks waited in a "
        f"collective: {first.text}"
    )
    return _verdict(folder, logs, first, "collective_mismatch", ranks, message)


def _late_ranks(timeouts: Sequence[Finding], cascade: Sequence[Finding]) -> tuple[int, ...]:
    """Return the ranks that had not yet called the collective that timed out."""
    waited = [int(match[1]) for f in timeouts if (match := _SEQUENCE.search(f.text))]
    groups = {match[1] for f in timeouts if (match := _GROUP.search(f.text))}
    last_call: dict[int, int] = {}  # number of the last collective by rank
    for finding in cascade:
        group = _GROUP.search(finding.text)
        if group is not None and len(groups) == 1 and group[1] not in groups:
            continue
        if finding.rank is not None and (match := _WORK.search(finding.text)):
            last_call[finding.rank] = max(last_call.get(finding.rank, 0), int(match[1]))
    if not last_call:
        return ()
    needed = max(waited, default=max(last_call.values()))
    return tuple(sorted(rank for rank, number in last_call.items() if number < needed))


def _is_finished(path: Path) -> bool:
    """Whether the end of a log reports the last step, or a requested stop."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        tail = file.read()
    steps = re.findall(rb"iteration +(\d+)/ *(\d+)", tail)
    return b"stopping after iteration" in tail or bool(steps and steps[-1][0] == steps[-1][1])


def _verdict(
    folder: Path,
    logs: Sequence[LogFile],
    cause: Finding | None,
    fault: str,
    ranks: tuple[int, ...],
    message: str,
) -> Verdict:
    findings = [finding for log in logs for finding in log.findings]
    host_of_rank = {log.rank: log.host for log in logs if log.rank is not None and log.host}
    hosts = [host_of_rank[rank] for rank in ranks if rank in host_of_rank]
    if cause is not None and cause.host:
        hosts.insert(0, cause.host)
    hosts = list(dict.fromkeys(hosts))
    steps = [log.last_step for log in logs if log.last_step is not None]
    memory = None
    advice = "" if cause is None or cause.rule.role != "root" else cause.rule.advice
    if fault == "out_of_memory" and cause is not None:
        memory = memory_record(
            cause.file, cause.offset, message, ranks[0] if ranks else None, logs
        )
        advice = cheapest_remedy(memory)
    elif fault == "collective_mismatch" and not advice:
        advice = (
            "Let all ranks run the same number of steps: give each rank equally many batches, "
            "and let no rank return or exit alone."
        )
    elif fault in ("collective_timeout", "network") and not advice:
        advice = (
            "Check the hosts of the ranks at fault, then the last log lines of these ranks."
        )
    file = "" if cause is None else _relative(cause.file, folder)
    return Verdict(
        fault=fault,
        retry=FAULTS[fault].retry,
        exit_code=FAULTS[fault].exit_code,
        root_ranks=ranks,
        hosts=tuple(hosts),
        exclude_hosts=tuple(hosts) if fault == "hardware" else (),
        message=message[:2000],
        place="" if cause is None else cause.place,
        file=file,
        step=max(steps, default=None),
        advice=advice,
        command=_command(logs, fault, advice, message),
        memory=memory,
        num_logs=len(logs),
        num_cascade=sum(finding.rule.role == "cascade" for finding in findings),
        num_teardown=sum(finding.rule.role == "teardown" for finding in findings),
    )


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path != folder else path.name


def _command(logs: Sequence[LogFile], fault: str, advice: str, message: str) -> str:
    """Return the command that continues the run from its last checkpoint."""
    retry = FAULTS[fault].retry
    if words := recorded_command(logs):
        return continue_command(words, fault, retry, advice, message)
    return "the same command; with --save also --auto-resume" if retry else ""


def _list_some(ranks: Sequence[int], limit: int = 8) -> str:
    text = ", ".join(map(str, ranks[:limit]))
    return text if len(ranks) <= limit else f"{text} and {len(ranks) - limit} more"


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.strip().splitlines()[:12]]
