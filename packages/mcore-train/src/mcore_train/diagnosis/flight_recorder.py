"""Dumps of torch's flight recorder: which ranks did not come to the collective that hung.

A dump is a pickle of plain containers, a file a rank; it is read as data. Its entries are the
last collectives of each group in the order in which the rank called them.
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
    """The first collective that not all ranks of its group called alike."""

    ranks: tuple[int, ...]
    """Those that did not call it, or called another."""
    group: str
    """Of its ranks."""
    number: int
    """Of the call within the group."""
    operation: str
    """Name and shapes as most ranks called it."""
    is_mismatch: bool
    """Whether the named ranks called something else."""
    place: str
    """Line that called it, on a rank that did."""

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
    """Read all dumps below a folder; return the ranks that others waited for, if any.

    Raises:
        CheckpointError: if a dump is damaged.
    """
    if not folder.is_dir():
        return None
    dumps = {
        int(found[1]): load_inert(path.read_bytes(), str(path))
        for path in sorted(folder.rglob("*"))
        if (found := _NAME.search(path.name)) and path.is_file() and path.stat().st_size
    }
    return first_divergence(dumps)


def first_divergence(dumps: Mapping[int, Mapping[str, Any]]) -> AbsentRanks | None:
    """Compare the calls of each group over the ranks that wrote a dump.

    Args:
        dumps: dump by global rank.

    Returns:
        Of the calls that some rank of the group did not make, or made differently, the one that
        was called earliest; None: all ranks agree.
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
    found: list[tuple[int, AbsentRanks]] = []
    for group, by_rank in calls.items():
        is_world = any(e["process_group"][1:] == ("default_pg",) for e in _last(by_rank))
        expected = members[group] or (set(dumps) | members[""] if is_world else set(by_rank))
        for absent in _of_group(group, by_rank, expected & set(dumps), expected):
            began_ns = min(
                entries[absent.number].get("time_created_ns", 0)
                for entries in by_rank.values()
                if absent.number in entries
            )
            found.append((began_ns, absent))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _last(by_rank: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Return the last call of each rank."""
    return [entries[max(entries)] for entries in by_rank.values()]


def _of_group(
    group: str,
    by_rank: Mapping[int, Mapping[int, Mapping[str, Any]]],
    dumped: set[int],
    expected: set[int],
) -> Iterable[AbsentRanks]:
    """Yield the first call of a group that its ranks did not all make alike.

    Where all ranks that wrote a dump agree and their last call is not over, those of
    ``expected`` that wrote none are absent.
    """
    # A ring buffer forgets old calls: compare from where every rank still has some.
    first = max((min(entries) for entries in by_rank.values()), default=0)
    last = max((max(entries) for entries in by_rank.values()), default=-1)
    for number in range(first, last + 1):
        made = {r: by_rank[r][number] for r in by_rank if number in by_rank[r]}
        signatures: dict[str, list[int]] = defaultdict(list)
        for rank, entry in made.items():
            signatures[_signature(entry)].append(rank)
        usual = max(signatures, key=lambda s: len(signatures[s])) if signatures else ""
        missing = dumped - set(made)
        if number == last and not missing and not made[min(made)].get("retired"):
            missing = expected - dumped
        odd = set(made) - set(signatures.get(usual, ()))
        if not (missing or odd):
            continue
        entry = made[signatures[usual][0]]
        is_mismatch = bool(odd)
        place = _place(entry.get("frames", ()))
        ranks = tuple(sorted(odd or missing))
        yield AbsentRanks(ranks, _group_name(entry, group), number, usual, is_mismatch, place)
        return


def _signature(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).removeprefix("nccl:").removeprefix("gloo:")
    sizes, dtypes = entry.get("input_sizes", ()), entry.get("input_dtypes", ())
    if "all_to_all" in name or "gather" in name or "scatter" in name or "broadcast" in name:
        sizes = ()  # these may differ from rank to rank, or are unknown on some
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
