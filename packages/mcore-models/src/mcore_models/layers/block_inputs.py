"""Inputs of all blocks of a model other than the residual stream."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mcore_models.config import TransformerConfig
from mcore_models.layers.rope import (
    RotaryTables,
    build_local_rotary,
    build_rotary,
    query_temperature,
)
from mcore_models.logical_tensors import global_config
from mcore_models.protocol import ModelState
from mcore_parallel.context_parallel.packed_sequences import Documents


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockInputs:
    """Inputs of one micro-batch that are equal for all layers."""

    rotary: RotaryTables | None = None
    """Tables of ``rope.rotary_tables``; None: positions are not rotated."""
    local_rotary: RotaryTables | None = None
    """Tables of layers with a window, if they differ (``--rotary-base-local``)."""
    temperature: Tensor | None = None
    """Factor on queries of layers without rotation, or of all layers: ``[S, 1, 1, 1]`` or
    ``[S, B, 1, 1]``."""
    layer_inputs: Tensor | None = None
    """Vectors of ``--per-layer-embedding-size`` of all layers, ``[s, B, L, P]``."""
    shared_keys: dict[bool, tuple[Tensor, Tensor]] | None = None
    """With ``--num-kv-shared-layers``: keys and values of the last layer with a window (True)
    and of the last layer without one (False). These two layers write the entries; layers
    without keys read them."""
    documents: Documents | None = None
    """Documents packed in the rows; they do not attend to each other."""
    state: ModelState | None = None
    """State of earlier tokens, to which the layers append this micro-batch; None: no state."""


def build_inputs(
    config: TransformerConfig,
    positions: Int[Tensor, "*B S"],
    length: int,
    dtype: torch.dtype,
    documents: Documents | None = None,
    state: ModelState | None = None,
) -> BlockInputs:
    """Compute rotary tables and return the inputs of all blocks.

    Args:
        config: of the model.
        positions: of the tokens.
        length: tokens of the complete sequence, including those of the state.
        dtype: of the activations.
        documents: packed in the rows.
        state: of earlier tokens in the layers.
    """
    return BlockInputs(
        rotary=build_rotary(global_config(config), positions, dtype, length),
        local_rotary=build_local_rotary(config, positions, dtype),
        shared_keys={} if config.num_kv_shared_layers else None,
        temperature=query_temperature(config, positions, dtype),
        documents=documents,
        state=state,
    )
