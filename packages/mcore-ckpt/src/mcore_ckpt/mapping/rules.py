"""A small language for renaming, fusing, splitting and transposing tensors, in both directions.

A ``Rule`` pairs logical names ("ours") with one foreign name ("theirs"). ``*`` stands for a
number: the first ``*`` is the layer, the second the expert. If a foreign tensor holds all
layers or experts along leading dimensions, the number is in brackets: ``fc1.weight[*,*]``. A
``Table`` of rules, expanded for a model's size, lists every tensor of both sides, so that
missing, unused and repeated tensors are errors that name them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from math import prod

from mcore_ckpt.storage.index import DTYPE_BYTES, StoredBox, TensorEntry
from mcore_ckpt.storage.shard_plans import list_problems, name_problems


@dataclass(frozen=True, slots=True)
class Rule:
    """Logical tensors, stacked by rows, and the foreign tensor that holds them."""

    ours: str | tuple[str, ...]
    """Logical names, without the ``model.`` of checkpoints."""
    theirs: str
    """Foreign name."""
    transposed: bool = False
    """The foreign tensor is stored [in, out]; ours are [out, in]."""
    sizes: tuple[int, ...] = ()
    """Rows of each mcore tensor within the foreign tensor; empty: equal shares."""
    layers: tuple[int, ...] | None = None
    """Layers that the first ``*`` ranges over; None: all."""
    groups: int = 1
    """Number of equal blocks of the foreign rows; each block has an equal share of the rows of
    each logical tensor."""
    padding: int = 0
    """Rows of zeros at the end of the foreign tensor (a padded vocabulary)."""
    head_rows: tuple[int, ...] = ()
    """For each foreign row of a head, the logical row that it holds; empty: the same order.
    Only for a single logical tensor, neither transposed nor in groups."""


def interleaved_rows(width: int) -> tuple[int, ...]:
    """Return ``head_rows`` of heads that rotate neighbouring rows together, as Meta's do."""
    half = width // 2
    return tuple(row for pair in range(half) for row in (pair, pair + half))


def swapped_rows(width: int) -> tuple[int, ...]:
    """Return ``head_rows`` of heads that rotate in the other direction: swapped halves."""
    half = width // 2
    return (*range(half, width), *range(half))


@dataclass(frozen=True, slots=True)
class Table:
    """All rules of a model, and the numbers of layers and experts for which they apply."""

    rules: tuple[Rule, ...]
    """Rules in the order in which a foreign folder lists its tensors."""
    num_layers: int
    """Range of the first ``*``."""
    num_experts: int = 0
    """Range of the second ``*``."""
    droppable: tuple[str, ...] = ()
    """Patterns of foreign names that are ignored, ``*`` for anything (cached angles)."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Original of each foreign name that may be present as an equal copy (a tied head)."""


def native_table(names: Iterable[str]) -> Table:
    """Return the table that maps each logical name to itself."""
    return Table(tuple(Rule(name, name) for name in names), 0)


@dataclass(frozen=True, slots=True)
class Link:
    """A rule applied to one layer and expert."""

    ours: tuple[str, ...]
    """Logical names, stacked by rows in this order."""
    theirs: str
    """Foreign name."""
    transposed: bool = False
    """As in ``Rule``."""
    sizes: tuple[int, ...] = ()
    """As in ``Rule``."""
    groups: int = 1
    """As in ``Rule``."""
    padding: int = 0
    """As in ``Rule``."""
    head_rows: tuple[int, ...] = ()
    """As in ``Rule``."""

    @property
    def is_plain(self) -> bool:
        """Whether each logical tensor is a contiguous range of the foreign rows, in order."""
        return not self.transposed and self.groups == 1 and not self.head_rows

    def shares(self, their_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the number of rows of each logical tensor.

        Raises:
            ValueError: if the foreign tensor has another number of rows.
        """
        if not their_shape:
            return (1,)
        total = our_shape(their_shape, self.transposed)[0] - self.padding
        sizes = self.sizes or (total // len(self.ours),) * len(self.ours)
        if sum(sizes) != total or any(n % self.groups for n in sizes):
            blocks = f" in {self.groups} blocks" if self.groups > 1 else ""
            raise ValueError(
                f"{self.theirs} of shape {list(their_shape)} does not hold {list(sizes)} "
                f"rows of {', '.join(self.ours)}{blocks}"
            )
        return sizes

    def rows(self, their_shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first and one-past-last foreign row of each logical tensor.

        If the link is not plain, these are rows of the stack before it is interleaved.

        Raises:
            ValueError: if the foreign tensor has another number of rows.
        """
        sizes = self.shares(their_shape)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return list(zip([0, *ends[:-1]], ends, strict=True))


def split_index(name: str) -> tuple[str, tuple[int, ...]]:
    """Split the leading indices off a name: ``("X", (3, 7))`` for ``X[3,7]``."""
    stem, bracket, numbers = name.partition("[")
    return stem, tuple(map(int, numbers[:-1].split(","))) if bracket else ()


def unstacked(
    entries: Mapping[str, TensorEntry], links: Iterable[Link]
) -> dict[str, TensorEntry]:
    """Replace tensors that links address by leading indices with one entry for each index.

    Args:
        entries: complete tensors; chunks are row-major, so that an index is contiguous too.
        links: links of the table, whose indices determine the leading dimensions.
    """
    depths = {name: len(index) for name, index in (split_index(k.theirs) for k in links)}
    unstacked_entries: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        depth = depths.get(name, 0)
        if not depth:
            unstacked_entries[name] = entry
            continue
        if len(entry.shape) < depth:
            raise ValueError(f"{name} of shape {list(entry.shape)} has no {depth} indices")
        parts: dict[tuple[int, ...], list[StoredBox]] = {
            index: [] for index in product(*map(range, entry.shape[:depth]))
        }
        for chunk in entry.chunks:
            size = prod(chunk.lengths[depth:]) * DTYPE_BYTES[entry.dtype]
            inside = product(*map(range, chunk.lengths[:depth]))
            for number, index in enumerate(inside):
                where = tuple(o + i for o, i in zip(chunk.offsets, index, strict=False))
                rest = (chunk.offsets[depth:], chunk.lengths[depth:])
                parts[where].append(StoredBox(chunk.file, chunk.offset + number * size, *rest))
        for index, chunks in parts.items():
            view = f"{name}[{','.join(map(str, index))}]"
            unstacked_entries[view] = TensorEntry(
                entry.shape[depth:], entry.dtype, tuple(chunks)
            )
    return unstacked_entries


def our_shape(their_shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Return the shape after a transposition, if any."""
    return tuple(reversed(their_shape)) if transposed else tuple(their_shape)


def expand(table: Table) -> list[Link]:
    """Return the links of a table, for all its layers and experts.

    Layers come in order; each foreign tensor occurs once.
    """
    links: list[Link] = []
    layer = 0
    layer_rules: list[Rule] = []
    for rule in (*table.rules, None):
        if rule is not None and "*" in rule.theirs:
            layer_rules.append(rule)
            continue
        # Rules with a layer number are adjacent: expand them layer by layer.
        for layer in range(table.num_layers if layer_rules else 0):
            links += [
                link for r in layer_rules for link in _of_layer(r, layer, table.num_experts)
            ]
        layer_rules = []
        if rule is not None:
            links.append(_link(rule, _names(rule), rule.theirs))
    for names in ([n for link in links for n in link.ours], [link.theirs for link in links]):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ValueError(f"several rules name {', '.join(twice)}")
    return links


def match_theirs(table: Table, links: Sequence[Link], names: Iterable[str]) -> list[str]:
    """Check that the foreign tensors are exactly those of the links.

    Returns:
        Copies that are present and must be compared with their originals.

    Raises:
        ValueError: naming every missing and every unused tensor.
    """
    present = {
        name
        for name in names
        if not any(fnmatchcase(name, pattern) for pattern in table.droppable)
    }
    copies = sorted(present & table.copies.keys())
    _check([link.theirs for link in links], present - set(copies))
    return copies


def match_ours(links: Sequence[Link], tensors: Mapping[str, TensorEntry]) -> None:
    """Check that the logical tensors are exactly those of the links, and can be stacked."""
    _check([name for link in links for name in link.ours], tensors)
    for link in links:
        first, *rest = (tensors[name] for name in link.ours)
        for name, other in zip(link.ours[1:], rest, strict=True):
            if (other.shape[1:], other.dtype) != (first.shape[1:], first.dtype):
                raise ValueError(
                    f"{name} {other.dtype} {list(other.shape)} cannot be stacked on "
                    f"{link.ours[0]} {first.dtype} {list(first.shape)} into {link.theirs}"
                )


def _check(wanted: Iterable[str], present: Iterable[str]) -> None:
    missing, unused = name_problems(wanted, present)
    problems = [f"missing: {text}" for text in missing]
    problems += [f"not used by any rule: {name}" for name in unused]
    if problems:
        raise ValueError(f"the tensors do not match this model: {list_problems(problems)}")


def _names(rule: Rule) -> tuple[str, ...]:
    return (rule.ours,) if isinstance(rule.ours, str) else rule.ours


def _of_layer(rule: Rule, layer: int, num_experts: int) -> list[Link]:
    if rule.layers is not None and layer not in rule.layers:
        return []
    experts = range(num_experts) if rule.theirs.count("*") > 1 else (0,)
    return [
        _link(
            rule,
            tuple(_filled(name, layer, expert) for name in _names(rule)),
            _filled(rule.theirs, layer, expert),
        )
        for expert in experts
    ]


def _link(rule: Rule, ours: tuple[str, ...], theirs: str) -> Link:
    same_fields = (rule.transposed, rule.sizes, rule.groups, rule.padding, rule.head_rows)
    return Link(ours, theirs, *same_fields)


def _filled(name: str, layer: int, expert: int) -> str:
    return name.replace("*", str(layer), 1).replace("*", str(expert), 1)
