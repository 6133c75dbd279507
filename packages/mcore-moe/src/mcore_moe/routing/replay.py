"""Record and replay of the experts that routers choose.

Reinforcement learning trains on tokens that an engine has generated. If scores are close, the
routers of engine and training may choose differently; a replay makes training use the engine's
choices. The router always computes the weights of the choices, so it gets gradients.
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
    """The choices of one router in each forward pass, to record or to replay."""

    def __init__(self, ids: Sequence[Tensor] = (), *, is_given: bool = False) -> None:
        """Start at the first forward pass.

        Args:
            ids: choices of each forward pass.
            is_given: whether the router replays ``ids``; False: it records its own choices.
        """
        self.ids, self.is_given = list(ids), is_given
        # Number of the next forward pass, and of the next recomputed one (key True): backward
        # recomputes forward passes in their order, but later.
        self._next = {False: 0, True: 0}

    def note(self, ids: Int[Tensor, "T k"], is_recomputed: bool) -> None:
        """Record the choices of a forward pass, unless it replays or is recomputed."""
        if not self.is_given and not is_recomputed:
            self.ids.append(ids.detach())

    def next_ids(self, num_tokens: int, topk: int, is_recomputed: bool) -> Int[Tensor, "T k"]:
        """Return the recorded choices of the next forward pass.

        Raises:
            ValueError: if the recording has ended, or the shape is not ``[num_tokens, topk]``.
        """
        number = self._next[is_recomputed]
        if number >= len(self.ids):
            raise ValueError(
                f"the recorded routing ends after {number} forward passes: record as many as "
                "are replayed."
            )
        ids = self.ids[number]
        if tuple(ids.shape) != (num_tokens, topk):
            raise ValueError(
                f"forward pass {number} of the recorded routing has {ids.shape[0]} tokens with "
                f"{ids.shape[1]} experts each, but this pass has {num_tokens} with {topk}: "
                "replay the same batches with the same layout and number of experts per token."
            )
        self._next[is_recomputed] = number + 1
        return ids


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the choices of all routers of a model, by path; no communication.

    Args:
        model: a model or a part of it.

    Yields:
        For each router a list, to which every forward pass appends its choices ``[T, k]``.
    """
    tapes = {path: RoutingTape() for path in _routers(model)}
    with _attached(model, tapes):
        yield {path: tape.ids for path, tape in tapes.items()}


@contextmanager
def replay_routing(model: nn.Module, recorded: RecordedRouting) -> Iterator[None]:
    """Make all routers of a model replay recorded choices; no communication.

    Args:
        model: a model or a part of it, with the routers of the recording.
        recorded: result of ``record_routing``, or other integers on the model's device. The
            host waits for each router's choices once, to check them.

    Raises:
        ValueError: if the routers' paths differ, an expert does not exist, a token has an
            expert twice, or a forward pass has another shape than the recording.
    """
    routers = _routers(model)
    paths = set(routers)
    if paths != set(recorded):
        unmatched = ", ".join(sorted(paths ^ set(recorded)))
        raise ValueError(
            f"the recorded routing and the model differ in these routers: {unmatched}. Replay "
            "into the model of the recording."
        )
    chosen = {path: [ids.long() for ids in passes] for path, passes in recorded.items()}
    for path, ids in chosen.items():
        _check_experts(path, ids, routers[path].config.num_experts)
    tapes = {path: RoutingTape(ids, is_given=True) for path, ids in chosen.items()}
    with _attached(model, tapes):
        yield


def _check_experts(path: str, ids: Sequence[Tensor], num_experts: int) -> None:
    # Smallest and largest expert, and number of repeated experts, of each forward pass; one
    # copy to the host for all of them.
    numbers = [
        torch.stack([x.min(), x.max(), (x.sort(1).values.diff(dim=1) == 0).sum()])
        for x in ids
        if x.numel()
    ]
    if not numbers:
        return
    low, high, twice = torch.stack(numbers).unbind(1)
    low, high, twice = torch.stack([low.min(), high.max(), twice.sum()]).tolist()
    if low < 0 or high >= num_experts:
        raise ValueError(
            f"the recorded routing of {path} has expert {low if low < 0 else high}, but there "
            f"are {num_experts} experts: replay into the model of the recording."
        )
    if twice:
        raise ValueError(
            f"the recorded routing of {path} has an expert twice for one token: the experts "
            "of a token must differ."
        )


@contextmanager
def _attached(model: nn.Module, tapes: Mapping[str, RoutingTape]) -> Iterator[None]:
    routers = _routers(model)
    for path, router in routers.items():
        router.tape = tapes[path]
    try:
        yield
    finally:
        for router in routers.values():
            router.tape = None


def _routers(model: nn.Module) -> dict[str, Any]:
    return {path: m for path, m in model.named_modules() if hasattr(m, "tape")}


def is_replayed() -> bool:
    """Return whether this forward pass is a recomputation inside a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
