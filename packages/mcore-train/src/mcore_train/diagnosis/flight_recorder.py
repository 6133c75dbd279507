"""Reads dumps of torch's flight recorder: which ranks did not call a collective that hung.

Each rank writes one file, a pickle of plain containers, which is read as data without executing
code. Its entries are the last collectives of each group, in the order of the rank's calls.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.formats.safe_pickle import load_inert

_NAME = re.compile(r"(?:nccl_trace|fr_trace|fr_dump|flight_recorder|trace)\w*?rank_?(\d+)")


@dataclass(frozen=True, slots=True)
class AbsentRanks:
    """The first collective that not all ranks of its group called, or called differently."""

    ranks: tuple[int, ...]
    """Ranks that did not call the collective, or called another one."""
    group: str
    """Name of the process group."""
    number: int
    """Number of the call within the group."""
    operation: str
    """Name and shapes of the collective on most ranks."""
    is_mismatch: bool
    """Whether ``ranks`` called another collective."""
    place: str
    """Source line of the call, on a rank that made it."""

    @property
    def fault(self) -> str:
        """Class of the failure."""
        return "collective_mismatch" if self.is_mismatch else "collective_timeout"

    def describe(self) -> str:
        """Return one line for the report."""
        plural = "s" * (len(self.ranks) > 1)
        verb = "called another collective than" if self.is_mismatch else "did not come to"
        return (
            f"rank{plural} {', '.join(map(str, self.ranks))} {verb} call {self.number} "
            f"of group {self.group}: {self.operation}"
            + (f" at {self.place}" if self.place else "")
        )


def read_dumps(folder: Path) -> AbsentRanks | None:
    """Read all dumps in a folder; return the ranks that others waited for, if any.

    Raises:
        CheckpointError: if a dump is damaged.
    """
    if not folder.is_dir():
        return None
    dumps = {
        int(match[1]): load_inert(path.read_bytes(), str(path))
        for path in sorted(folder.rglob("*"))
        if (match := _NAME.search(path.name)) and path.is_file() and path.stat().st_size
    }
    return first_divergence(dumps)


def first_divergence(dumps: Mapping[int, Mapping[str, Any]]) -> AbsentRanks | None:
    """Compare the calls of each group over the ranks that wrote a dump.

    Args:
        dumps: dump by global rank.

    Returns:
        The earliest call that some rank of the group did not make, or made differently; None if
        all ranks agree.
    """
    calls: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = defaultdict(dict)
    members: dict[str, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for name, config in dump.get("pg_config", {}).items():
            members[str(name)] |= _ranks(config.get("ranks", ""))
        for entry in dump.get("entries", ()):
            if not entry.get("is_p2p"):
                group = str(entry["process_group"][0])
                calls[group].setdefault(rank, {})[entry["collective_seq_id"]] = entry
    divergences: list[tuple[int, AbsentRanks]] = []
    for group, by_rank in calls.items():
        is_world = any(e["process_group"][1:] == ("default_pg",) for e in _last(by_rank))
        expected = members[group] or (set(dumps) | members[""] if is_world else set(by_rank))
        for absent in _group_divergence(group, by_rank, expected & set(dumps), expected):
            began_ns = min(
                entries[absent.number].get("time_created_ns", 0)
                for entries in by_rank.values()
                if absent.number in entries
            )
            divergences.append((began_ns, absent))
    return min(divergences, key=lambda pair: pair[0])[1] if divergences else None


def _last(by_rank: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Return the last call of each rank."""
    return [entries[max(entries)] for entries in by_rank.values()]


def _group_divergence(
    group: str,
    by_rank: Mapping[int, Mapping[int, Mapping[str, Any]]],
    dumped: set[int],
    expected: set[int],
) -> Iterable[AbsentRanks]:
    """Yield the first call of a group that not all its ranks made, or made differently.

    If all ranks with a dump agree and their last call has not completed, the ranks of
    ``expected`` without a dump are absent.
    """
    # The recorder is a ring buffer: compare from the first call that every rank still has.
    first = max((min(entries) for entries in by_rank.values()), default=0)
    last = max((max(entries) for entries in by_rank.values()), default=-1)
    for number in range(first, last + 1):
        calls = {r: by_rank[r][number] for r in by_rank if number in by_rank[r]}
        signatures: dict[str, list[int]] = defaultdict(list)
        for rank, entry in calls.items():
            signatures[_signature(entry)].append(rank)
        usual = max(signatures, key=lambda s: len(signatures[s])) if signatures else ""
        missing = dumped - set(calls)
        if number == last and not missing and not calls[min(calls)].get("retired"):
            missing = expected - dumped
        different = set(calls) - set(signatures.get(usual, ()))
        if not (missing or different):
            continue
        entry = calls[signatures[usual][0]]
        is_mismatch = bool(different)
        place = _place(entry.get("frames", ()))
        ranks = tuple(sorted(different or missing))
        yield AbsentRanks(ranks, _group_name(entry, group), number, usual, is_mismatch, place)
        return


def _signature(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).removeprefix("nccl:").removeprefix("gloo:")
    sizes, dtypes = entry.get("input_sizes", ()), entry.get("input_dtypes", ())
    if "all_to_all" in name or "gather" in name or "scatter" in name or "broadcast" in name:
        sizes = ()  # sizes may differ between ranks, or are unknown on some ranks
    shapes = ", ".join(f"{list(size)}" for size in sizes)
    kinds = ", ".join(map(str, dtypes)) if sizes else ""
    return f"{name} {shapes} {kinds}".strip()


def _group_name(entry: Mapping[str, Any], group: str) -> str:
    names = entry.get("process_group", ())
    return str(names[1]) if len(names) > 1 and names[1] not in ("", "undefined") else group


def _ranks(text: Any) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", str(text))}


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line outside of torch."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file and "/torch/" not in file and not file.startswith("??"):
            return (
                f"{'/'.join(Path(file).parts[-2:])}:{frame.get('line')} ({frame.get('name')})"
            )
    return ""
