"""``Execution`` (how a model computes) and ``LayerSetup`` (from which a layer is built)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from mcore_models.config import KernelConfig, RecomputeConfig, TransformerConfig
from mcore_models.layers.residual import stream_cuts
from mcore_moe.config import MoEConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.fp8 import PLAIN_GEMMS, LinearGemms
from mcore_parallel.rng import RngStreams
from mcore_parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearOutput,
    RowParallelLinear,
)

_NO_EXPERTS, _KEEP_ALL, _ANY_KERNELS = MoEConfig(), RecomputeConfig(), KernelConfig()

Parts = Mapping[str, Callable[["LayerSetup"], nn.Module]]
"""Builders of modules that replace mixers, by the mixer's name."""
NO_PARTS: Parts = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Recomputation, kernels, GEMMs and random streams of a model; no shapes."""

    recomputing: RecomputeConfig = _KEEP_ALL
    """Recomputation in backward."""
    kernels: KernelConfig = _ANY_KERNELS
    """Kernels of the computation."""
    gemms: Sequence[LinearGemms] = ()
    """GEMMs of every layer, by global number (``layer_gemms``); empty: GEMMs in the model's
    dtype."""
    parts: Parts = field(default_factory=lambda: NO_PARTS)
    """Replacements for mixers of a GPT, see ``TransformerBlock``."""
    streams: RngStreams | None = None
    """Random streams; None: made from the model's seed. Chunks of one rank share them."""


PLAIN_EXECUTION = Execution()
"""Nothing is recomputed, any kernel, GEMMs in the model's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSetup:
    """Config, context and options from which the modules of one layer are built."""

    config: TransformerConfig
    ctx: ParallelContext
    """``tp`` splits heads and widths, ``cp`` the sequence."""
    layer: int
    """Global number of the layer."""
    streams: RngStreams
    """Random streams of dropout."""
    moe: MoEConfig = _NO_EXPERTS
    """Options of experts; they determine whether this layer has experts."""
    recomputing: RecomputeConfig = _KEEP_ALL
    """Modules to recompute; the model itself recomputes complete layers."""
    kernels: KernelConfig = _ANY_KERNELS
    """Kernels of attention."""
    gemms: LinearGemms = PLAIN_GEMMS
    """GEMMs of attention and the dense linears."""
    parts: Parts = field(default_factory=dict)
    """Builders of modules that replace mixers, by name, see ``TransformerBlock``."""
    device: torch.device | str | None = None
    """Device of the parameters."""
    dtype: torch.dtype | None = None
    """Dtype of the parameters."""

    @property
    def factory_kwargs(self) -> dict[str, Any]:
        """Device and dtype."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def split(self) -> dict[str, Any]:
        """Keyword arguments of split linears whose weights the model fills."""
        split = {"axis": self.ctx.tp, "sequence_parallel": self.sequence_parallel}
        return {**split, "init_std": 0.0, **self.factory_kwargs}

    def column_linear(
        self, in_features: int, outputs: int | Sequence[LinearOutput], *, bias: bool = False
    ) -> ColumnParallelLinear:
        """Build a linear whose outputs are split over the tensor ranks, with zero weights."""
        gemm = self.gemms.column
        return ColumnParallelLinear(in_features, outputs, bias=bias, gemm=gemm, **self.split)

    def row_linear(
        self, in_features: int, out_features: int, *, bias: bool = False
    ) -> RowParallelLinear:
        """Build a linear whose inputs are split over the tensor ranks, with zero weights."""
        gemm = self.gemms.row
        return RowParallelLinear(in_features, out_features, bias=bias, gemm=gemm, **self.split)

    @property
    def recomputed(self) -> frozenset[str]:
        """Modules that are recomputed individually."""
        is_selective = self.recomputing.recompute_granularity == "selective"
        return frozenset(self.recomputing.recompute_modules if is_selective else ())

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are split over the tensor ranks between mixers."""
        return stream_cuts(self.ctx).size > 1
