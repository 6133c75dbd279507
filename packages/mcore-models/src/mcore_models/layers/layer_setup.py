"""What the modules of one layer are built from, as one object."""

from collections.abc import Callable, Mapping
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

_NO_EXPERTS, _KEEP_ALL, _ANY_KERNELS = MoEConfig(), RecomputeConfig(), KernelConfig()

Parts = Mapping[str, Callable[["LayerSetup"], nn.Module]]
"""What builds a mixer in place of the one of that name."""
NO_PARTS: Parts = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSetup:
    """What the modules of one layer are built from."""

    config: TransformerConfig
    ctx: ParallelContext
    """``tp`` shares heads and widths, ``cp`` the sequence."""
    layer: int
    """Global number."""
    streams: RngStreams
    """For dropout."""
    moe: MoEConfig = _NO_EXPERTS
    """Says whether this layer has experts, and which."""
    recomputing: RecomputeConfig = _KEEP_ALL
    """Its selective modules; full-layer recompute is handled by the model."""
    kernels: KernelConfig = _ANY_KERNELS
    """Which compute attention."""
    gemms: LinearGemms = PLAIN_GEMMS
    """What multiplies in attention and the dense linears."""
    parts: Parts = field(default_factory=dict)
    """Modules of one's own in place of mixers, by name, see ``TransformerBlock``."""
    device: torch.device | str | None = None
    """Of the parameters."""
    dtype: torch.dtype | None = None
    """Of the parameters."""

    @property
    def placed(self) -> dict[str, Any]:
        """Device and dtype."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def split(self) -> dict[str, Any]:
        """Options of linears that are split over the tensor ranks and filled by the model."""
        cut = {"axis": self.ctx.tp, "sequence_parallel": self.sequence_parallel}
        return {**cut, "init_std": 0.0, **self.placed}

    @property
    def recomputed(self) -> frozenset[str]:
        """Modules that are recomputed by themselves."""
        is_selective = self.recomputing.recompute_granularity == "selective"
        return frozenset(self.recomputing.recompute_modules if is_selective else ())

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are cut over the tensor ranks outside the mixers."""
        return stream_cuts(self.ctx).size > 1
