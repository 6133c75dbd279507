"""A small language for renaming, fusing, splitting and transposing tensors, both ways.

A ``Rule`` pairs our logical names with one foreign name. ``*`` stands for a number: the first
is the layer, the second the expert. A ``Table`` of rules, expanded for a model's size, lists
every tensor of both sides, so a missing or an unused tensor is an error that names it and no
tensor can be taken twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mcore_ckpt.index import TensorEntry
from mcore_ckpt.planning import listed, name_problems


@dataclass(frozen=True, slots=True)
class Rule:
    """Our tensors, one or several stacked by rows, and the foreign one that holds them."""

    ours: str | tuple[str, ...]
    """Logical names, without the ``model.`` of checkpoints."""
    theirs: str
    """Foreign name."""
    transposed: bool = False
    """The foreign tensor is stored [in, out]; ours are [out, in]."""
    sizes: tuple[int, ...] = ()
    """Rows of each of ours within the foreign tensor; empty: equal shares."""
    layers: tuple[int, ...] | None = None
    """Layers that the first ``*`` stands for; None: all."""


@dataclass(frozen=True, slots=True)
class Table:
    """All rules of a model, and how many layers and experts they run over."""

    rules: tuple[Rule, ...]
    """In the order in which a foreign folder lists its tensors."""
    num_layers: int
    """Range of the first ``*``."""
    num_experts: int = 0
    """Range of the second ``*``."""
    droppable: tuple[str, ...] = ()
    """Foreign names, ``*`` for anything, that hold nothing a model needs (cached angles)."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Foreign names that may be present as equal copies of another (a tied head)."""


@dataclass(frozen=True, slots=True)
class Link:
    """A rule with its numbers filled in."""

    ours: tuple[str, ...]
    """Logical names, stacked by rows in this order."""
    theirs: str
    """Foreign name."""
    transposed: bool = False
    """As in the rule."""
    sizes: tuple[int, ...] = ()
    """As in the rule."""

    def rows(self, their_shape: Sequence[int]) -> list[tuple[int, int]]:
        """First and one-past-last row of each of ours within the foreign tensor.

        Raises:
            ValueError: if the foreign tensor does not hold them.
        """
        if len(self.ours) == 1:
            return [(0, our_shape(their_shape, self.transposed)[0] if their_shape else 1)]
        total = our_shape(their_shape, self.transposed)[0]
        sizes = self.sizes or (total // len(self.ours),) * len(self.ours)
        if sum(sizes) != total:
            raise ValueError(
                f"{self.theirs} of shape {list(their_shape)} does not hold {list(sizes)} "
                f"rows of {', '.join(self.ours)}"
            )
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return list(zip([0, *ends[:-1]], ends, strict=True))


def our_shape(their_shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Return the shape of a foreign tensor, or of all of ours stacked, the other way."""
    return tuple(reversed(their_shape)) if transposed else tuple(their_shape)


def expand(table: Table) -> list[Link]:
    """Write out a table for its number of layers and experts.

    Layers come in order, and each foreign tensor once.

    Raises:
        ValueError: if two rules speak of one tensor.
    """
    links: list[Link] = []
    layer = 0
    waiting: list[Rule] = []
    for rule in (*table.rules, None):
        if rule is not None and "*" in rule.theirs:
            waiting.append(rule)
            continue
        # Rules with a layer number stand together: go layer by layer through all of them.
        for layer in range(table.num_layers if waiting else 0):
            links += [link for r in waiting for link in _of_layer(r, layer, table.num_experts)]
        waiting = []
        if rule is not None:
            links.append(Link(_names(rule), rule.theirs, rule.transposed, rule.sizes))
    for names in ([n for link in links for n in link.ours], [link.theirs for link in links]):
        twice = (
            sorted({name for name in names if names.count(name) > 1})
            if len(set(names)) < len(names)
            else []
        )
        if twice:
            raise ValueError(f"two rules speak of {', '.join(twice)}")
    return links


def match_theirs(table: Table, links: Sequence[Link], names: Iterable[str]) -> list[str]:
    """Check that foreign tensors are exactly those that the links take.

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
    """Check that our tensors are exactly those that the links take, and stack.

    Raises:
        ValueError: naming every missing and every unused tensor, or those that cannot be
            put into one.
    """
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
        raise ValueError(f"the tensors are not those of this model: {listed(problems)}")


def _names(rule: Rule) -> tuple[str, ...]:
    return (rule.ours,) if isinstance(rule.ours, str) else rule.ours


def _of_layer(rule: Rule, layer: int, num_experts: int) -> list[Link]:
    if rule.layers is not None and layer not in rule.layers:
        return []
    experts = range(num_experts) if rule.theirs.count("*") > 1 else (0,)
    return [
        Link(
            tuple(_filled(name, layer, expert) for name in _names(rule)),
            _filled(rule.theirs, layer, expert),
            rule.transposed,
            rule.sizes,
        )
        for expert in experts
    ]


def _filled(name: str, layer: int, expert: int) -> str:
    return name.replace("*", str(layer), 1).replace("*", str(expert), 1)
