"""Recording the experts that routers choose, and replaying the choices.

Reinforcement learning trains on tokens that an engine has generated. Where scores are close,
the routers of engine and training choose differently; a replay gives training the engine's
choices. The weights of the choices are always computed by the router, which keeps its gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

RecordedRouting = Mapping[str, Sequence[Tensor]]
"""The chosen experts ``[T, k]`` of each forward in order, by the path of the router."""


class RoutingTape:
    """The choices of one router in each forward: recorded, or to be replayed."""

    def __init__(self, ids: Sequence[Tensor] = (), *, is_given: bool = False) -> None:
        """Start at the first forward.

        Args:
            ids: choices of each forward.
            is_given: whether the router replays ``ids``; else it records its own choices.
        """
        self.ids, self.is_given = list(ids), is_given
        # Number of the next forward, and of the next recomputed forward: backward recomputes
        # forwards in their order, but later.
        self._next = {False: 0, True: 0}

    def note(self, ids: Int[Tensor, "T k"], is_recomputed: bool) -> None:
        """Record the choices of a forward, unless it replays or is recomputed."""
        if not self.is_given and not is_recomputed:
            self.ids.append(ids.detach())

    def next_ids(self, num_tokens: int, topk: int, is_recomputed: bool) -> Int[Tensor, "T k"]:
        """Return the recorded choices of the next forward.

        Raises:
            ValueError: if there are no more, or the shape is not ``[num_tokens, topk]``.
        """
        at = self._next[is_recomputed]
        if at >= len(self.ids):
            raise ValueError(f"the recorded routing ends after {at} forwards: record as many.")
        ids = self.ids[at]
        if tuple(ids.shape) != (num_tokens, topk):
            raise ValueError(
                f"forward {at} of the recorded routing has {ids.shape[0]} tokens with "
                f"{ids.shape[1]} experts each, and this one {num_tokens} with {topk}: replay "
                "the same batches under the same layout, into the same experts."
            )
        self._next[is_recomputed] = at + 1
        return ids


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the choices of all routers of a model, by path; no communication.

    Args:
        model: or a part of it.

    Yields:
        For each router a list that grows by one ``[T, k]`` a forward.
    """
    tapes = {path: RoutingTape() for path in _routers(model)}
    with _attached(model, tapes):
        yield {path: tape.ids for path, tape in tapes.items()}


@contextmanager
def replay_routing(model: nn.Module, recorded: RecordedRouting) -> Iterator[None]:
    """Make all routers of a model replay recorded choices; no communication.

    Args:
        model: or a part of it, with the routers of the recording.
        recorded: result of ``record_routing``, or other integers on the model's device.

    Raises:
        ValueError: if the routers' paths differ, an expert does not exist, a token names an
            expert twice, or the recording does not fit a forward. The host waits once for each
            router.
    """
    routers = _routers(model)
    paths = set(routers)
    if paths != set(recorded):
        odd = ", ".join(sorted(paths ^ set(recorded)))
        raise ValueError(f"the recorded routing and the model differ in these routers: {odd}.")
    chosen = {path: [one.long() for one in ids] for path, ids in recorded.items()}
    for path, ids in chosen.items():
        _check_experts(path, ids, routers[path].config.num_experts)
    tapes = {path: RoutingTape(ids, is_given=True) for path, ids in chosen.items()}
    with _attached(model, tapes):
        yield


def _check_experts(path: str, ids: Sequence[Tensor], num_experts: int) -> None:
    found = [
        torch.stack([one.min(), one.max(), (one.sort(1).values.diff(dim=1) == 0).sum()])
        for one in ids
        if one.numel()
    ]
    if not found:
        return
    low, high, twice = torch.stack(found).unbind(1)
    low, high, twice = torch.stack([low.min(), high.max(), twice.sum()]).tolist()
    if low < 0 or high >= num_experts:
        raise ValueError(
            f"the recorded routing of {path} names expert {low if low < 0 else high} of "
            f"{num_experts}: replay into the model of the recording."
        )
    if twice:
        raise ValueError(
            f"the recorded routing of {path} names an expert twice for a token: give each "
            "token different experts."
        )


@contextmanager
def _attached(model: nn.Module, tapes: Mapping[str, RoutingTape]) -> Iterator[None]:
    found = _routers(model)
    for path, router in found.items():
        router.tape = tapes[path]
    try:
        yield
    finally:
        for router in found.values():
            router.tape = None


def _routers(model: nn.Module) -> dict[str, Any]:
    return {path: m for path, m in model.named_modules() if hasattr(m, "tape")}


def is_replayed() -> bool:
    """Return whether this forward is a recomputation inside a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
