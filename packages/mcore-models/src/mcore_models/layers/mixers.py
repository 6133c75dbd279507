"""The table of mixers: attention, feed-forward layers, experts, recurrent layers.

A layer is a sequence of residual halves, each a norm and one mixer;
``logical_tensors.layer_mixers`` lists the mixers of each layer. CONTRIBUTING.md lists the other
tables in which a new kind of layer needs a row ("A new layer kind").
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from mcore_models.config import activation
from mcore_models.layers.attention import Attention
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.fp8_gated_mlp import Fp8GatedMLP
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.mla import LatentAttention
from mcore_models.layers.mlp import MLP
from mcore_models.layers.per_layer_embedding import LayerInput
from mcore_models.layers.recurrent.delta_net import DeltaNet
from mcore_models.layers.recurrent.kimi_delta import KimiDelta
from mcore_models.layers.recurrent.lightning import LightningAttention
from mcore_models.layers.recurrent.mamba import Mamba
from mcore_models.layers.recurrent.short_conv import ShortConv
from mcore_models.layers.sparse_mlp import SparseMLP
from mcore_models.logical_tensors import ffn_size, is_gated
from mcore_moe.axes import moe_axes
from mcore_moe.experts.network import ExpertNetwork
from mcore_moe.layer import MoELayer, MoERuntime


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """How one kind of mixer is built and called."""

    build: Callable[[LayerSetup], nn.Module]
    """Allocates this rank's share; weights are zero until the model fills them."""
    run: Callable[[Any, BlockInputs, Tensor], Any] | None = None
    """Calls the module on the normed stream; returns the mixer's output, or the output and an
    auxiliary loss. None: ``module(x, inputs=inputs)``."""
    recomputed_as: str = ""
    """Name of the complete mixer among ``--recompute-modules``; empty: it has no such name."""


def build_mlp(setup: LayerSetup, network: ExpertNetwork | None = None) -> MLP:
    """Build the dense feed-forward layer; ``network`` replaces the network of the config."""
    network = network or feed_forward_network(setup, recomputed_as="mlp_act")
    kind = Fp8GatedMLP if Fp8GatedMLP.supports(network, setup.gemms) else MLP
    pattern = setup.config.activation_sparsity_pattern
    if pattern and pattern[setup.layer]:
        kind = partial(SparseMLP, sparsity=pattern[setup.layer])
    return kind(
        setup.config.hidden_size,
        ffn_size(setup.config),
        network,
        axis=setup.ctx.tp,
        sequence_parallel=setup.sequence_parallel,
        gemms=setup.gemms,
        **setup.factory_kwargs,
    )


def feed_forward_network(setup: LayerSetup, recomputed_as: str) -> ExpertNetwork:
    """Return the network of the dense layer, or of each expert, without initial weights.

    Args:
        setup: of the layer.
        recomputed_as: name of the activation among ``--recompute-modules``.
    """
    config = setup.config
    return ExpertNetwork(
        gated=is_gated(config),
        activation=activation(config),
        bias=config.add_bias_linear,
        clamp=config.activation_func_clamp_value,
        offset=config.glu_linear_offset,
        init_std=0.0,
        recompute_activation=recomputed_as in setup.recomputed,
    )


def _build_experts(setup: LayerSetup) -> MoELayer:
    # --moe-experts-dtype applies in the layers whose linears run in fp8: the first and last
    # layers may be excluded from fp8.
    is_narrow = setup.moe.moe_experts_dtype and setup.gemms.casts is not None
    return MoELayer(
        setup.config.hidden_size,
        ffn_size(setup.config),
        setup.moe if is_narrow else replace(setup.moe, moe_experts_dtype=""),
        feed_forward_network(setup, recomputed_as="moe_act"),
        axes=moe_axes(setup.ctx),
        runtime=MoERuntime(
            streams=setup.streams,
            fp8_casts=setup.gemms.casts,
            equal_tokens=True,
            recompute_shared="shared_experts" in setup.recomputed,
        ),
        **setup.factory_kwargs,
    )


def _run_mlp(mlp: MLP, _: BlockInputs, x: Tensor) -> Tensor:
    return mlp(x)


def _run_experts(moe: MoELayer, _: BlockInputs, x: Tensor) -> tuple[Tensor, Tensor]:
    y, aux = moe(x.flatten(0, 1), num_sequences=x.shape[1])  # [S, B, D] -> [T, D]
    return y.view(x.shape), aux


MIXERS: Mapping[str, Mixer] = {
    "attention": Mixer(build=Attention),
    "mla": Mixer(build=LatentAttention),
    "mlp": Mixer(build=build_mlp, run=_run_mlp, recomputed_as="mlp"),
    "moe": Mixer(build=_build_experts, run=_run_experts, recomputed_as="moe"),
    "mamba": Mixer(build=Mamba),
    "delta_net": Mixer(build=DeltaNet),
    "short_conv": Mixer(build=ShortConv),
    "lightning": Mixer(build=LightningAttention),
    "kda": Mixer(build=KimiDelta),
    "layer_input": Mixer(build=LayerInput),
}
"""Mixers by name, which is also the name of the module in its block."""
