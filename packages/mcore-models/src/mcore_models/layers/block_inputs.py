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
from mcore_models.protocol import ModelState
from mcore_parallel.context_parallel.packed_sequences import Documents


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockInputs:
    """One micro-batch as the layers see it, equal for all of them."""

    rotary: RotaryTables | None = None
    """Tables of ``rope.rotary_tables``; None: positions are not rotated."""
    local_rotary: RotaryTables | None = None
    """Tables of layers with a window, where they are others (``--rotary-base-local``)."""
    temperature: Tensor | None = None
    """Factor on queries of layers without rotation, ``[S, 1, 1, 1]`` or ``[S, B, 1, 1]``."""
    documents: Documents | None = None
    """Packed in the rows; none sees another."""
    state: ModelState | None = None
    """What the layers remember of earlier tokens, extended by these; None: nothing."""


def build_inputs(
    config: TransformerConfig,
    positions: Int[Tensor, "*B S"],
    length: int,
    dtype: torch.dtype,
    documents: Documents | None = None,
    state: ModelState | None = None,
) -> BlockInputs:
    """Make the tables of some tokens, and put all inputs together.

    Args:
        config: of the model.
        positions: of the tokens.
        length: of the whole sequence, remembered tokens among it.
        dtype: of the activations.
        documents: packed in the rows.
        state: what the layers remember of earlier tokens.
    """
    return BlockInputs(
        rotary=build_rotary(config, positions, dtype, length),
        local_rotary=build_local_rotary(config, positions, dtype),
        temperature=query_temperature(config, positions, dtype),
        documents=documents,
        state=state,
    )
