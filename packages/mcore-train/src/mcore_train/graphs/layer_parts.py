"""Splits a layer into a head, recorded as a CUDA graph, and a tail without a graph."""

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
    """The complete layer, without a graph."""
    head: Callable[[Residual, BlockInputs], tuple[Residual, Any]]
    """The recorded part, in which no size depends on routing."""
    tail: Callable[[Residual, Any], Residual]
    """The rest of the layer, a function of the head's two results."""
    parameters: list[nn.Parameter]
    """Parameters of the head."""


def layer_parts(
    layer: Any, streams: RngStreams, is_recomputed: bool, records_experts: bool
) -> LayerParts:
    """Split a layer into head and tail.

    Args:
        layer: a ``TransformerBlock``.
        streams: random streams of its dropout.
        is_recomputed: whether backward recomputes the complete layer.
        records_experts: whether the graph includes experts; else they are the tail.
    """
    forward: Callable[[Residual, BlockInputs], Residual] = layer  # __call__ runs hooks

    def complete(stream: Residual, inputs: BlockInputs) -> tuple[Residual, None]:
        return layer.forward(stream, inputs), None  # a graph does not record hooks

    head, tail, tail_parameters = complete, _identity, set()
    if not records_experts and layer.stops_at_experts:
        head, tail = layer.to_experts, layer.from_experts
        tail_parameters = set(layer.moe.experts.parameters())
        if is_recomputed or "moe" in layer.recomputed:
            tail = partial(recompute, tail, streams=streams)
    if is_recomputed:
        forward, head = _with_recompute(forward, streams), _with_recompute(head, streams)
    parameters = [p for p in layer.parameters() if p.requires_grad and p not in tail_parameters]
    return LayerParts(forward, head, tail, parameters)


def _identity(stream: Residual, _: None) -> Residual:
    return stream


def _with_recompute(function: Callable[..., Any], streams: RngStreams) -> Callable[..., Any]:
    """Return a function that stores only the layer's input; backward recomputes the rest."""

    def run(stream: Residual, inputs: BlockInputs) -> Any:
        def of_tensors(x: Tensor, aux: Tensor) -> Any:
            return function(Residual(x, None, aux), inputs)

        # The stream and its deferred add are summed first, so that one tensor is stored, not
        # two.
        return recompute(of_tensors, stream.total(), stream.aux, streams=streams)

    return run
