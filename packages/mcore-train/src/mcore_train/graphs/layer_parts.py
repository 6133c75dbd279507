"""Splits a layer into the head that a CUDA graph records and the tail launched singly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.residual import Residual
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.rng import RngStreams


@dataclass(frozen=True)
class LayerParts:
    """A layer as two functions: ``tail(*head(stream, inputs))`` equals ``forward``."""

    forward: Callable[[Residual, BlockInputs], Residual]
    """The whole layer, launched singly."""
    head: Callable[[Residual, BlockInputs], tuple[Residual, Any]]
    """The recorded part, in which no size depends on routing."""
    tail: Callable[[Residual, Any], Residual]
    """The rest, a function of both results of the head."""
    parameters: list[nn.Parameter]
    """Parameters of the head."""


def layer_parts(
    layer: Any, streams: RngStreams, is_recomputed: bool, records_experts: bool
) -> LayerParts:
    """Split a layer into head and tail.

    Args:
        layer: a ``TransformerBlock``.
        streams: random streams of its dropout.
        is_recomputed: whether backward computes all of it again.
        records_experts: whether experts are recorded too; else they are the tail.
    """
    forward: Callable[[Residual, BlockInputs], Residual] = layer  # with its hooks

    def whole(stream: Residual, inputs: BlockInputs) -> tuple[Residual, None]:
        return layer.forward(stream, inputs), None  # a graph records no hooks

    head, tail, late = whole, _nothing, set()
    if not records_experts and layer.stops_at_experts:
        head, tail = layer.to_experts, layer.from_experts
        late = set(layer.moe.experts.parameters())
        if is_recomputed or "moe" in layer.recomputed:
            tail = partial(recompute, tail, streams=streams)
    if is_recomputed:
        forward, head = _recomputed(forward, streams), _recomputed(head, streams)
    parameters = [p for p in layer.parameters() if p.requires_grad and p not in late]
    return LayerParts(forward, head, tail, parameters)


def _nothing(stream: Residual, _: None) -> Residual:
    return stream


def _recomputed(function: Callable[..., Any], streams: RngStreams) -> Callable[..., Any]:
    """Return a function of a layer's input that keeps nothing else until backward."""

    def run(stream: Residual, inputs: BlockInputs) -> Any:
        def again(x: Tensor, aux: Tensor) -> Any:
            return function(Residual(x, None, aux), inputs)

        # The sum of the stream and its deferred add: one tensor is kept, not two.
        return recompute(again, stream.total(), stream.aux, streams=streams)

    return run
