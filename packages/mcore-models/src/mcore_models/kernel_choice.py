"""Which optional kernels a model would take, so that ranks can agree on them at the start."""

from collections.abc import Hashable

import torch

from mcore_models.config import KernelConfig, TransformerConfig, activation, has_plain_scores
from mcore_models.kernels import flash4_attention as flash4
from mcore_models.layers.fp8_gated_mlp import GATED_CAST_KERNEL
from mcore_models.layers.norm import NARROWEST, NORM_KERNELS, WIDEST
from mcore_models.layers.recurrent.causal_conv import CONV_KERNELS
from mcore_models.layers.recurrent.delta_rule import DELTA_KERNELS, kernel_widths
from mcore_models.layers.recurrent.gated_norm import GATED_NORM_KERNELS
from mcore_models.layers.recurrent.kernel_fit import NARROW
from mcore_models.layers.recurrent.ssd import SSD_KERNELS, is_kernel_width
from mcore_models.layers.rope import rotary_kernel
from mcore_models.logical_tensors import head_dim, is_gated, num_kv_heads, value_dim
from mcore_moe.activations import FUSED, GATE_KERNELS
from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.permutation import ROWS_KERNELS
from mcore_moe.kernels import quack_gemm
from mcore_moe.routing.topk import TOP_KERNEL
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optimizers.adamw import ADAM_KERNEL
from mcore_parallel.optimizers.rounding import ROUNDING_KERNEL
from mcore_parallel.optional_kernels import OptionalKernel
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8_cast import CAST_KERNEL
from mcore_parallel.precision.fp8_fine_cast import FINE_CAST_KERNEL
from mcore_parallel.tensor_parallel.embedding import ROWS_KERNEL
from mcore_parallel.tensor_parallel.linear_cross_entropy import LOSS_KERNELS

_NO_FP8 = Fp8Config()
_NO_EXPERTS = MoEConfig()


def optional_kernels(
    config: TransformerConfig,
    kernels: KernelConfig,
    device: torch.device,
    dtype: torch.dtype,
    tp: Axis = SINGLE,
    fp8: Fp8Config = _NO_FP8,
    moe: MoEConfig = _NO_EXPERTS,
) -> list[tuple[OptionalKernel, tuple[Hashable, ...]]]:
    """List what a training step of a model may choose on a GPU, for ``agree_on_kernels``."""
    H = head_dim(config)
    found: list[tuple[OptionalKernel, tuple[Hashable, ...]]] = [
        (ROWS_KERNEL, ()),
        (ADAM_KERNEL, ()),
    ]
    if dtype == torch.float64:
        return found
    if dtype == torch.bfloat16:
        found.append((ROUNDING_KERNEL, ()))
    found.append((LOSS_KERNELS, (dtype,)))
    found += _of_fp8(config, dtype, fp8)
    if NARROWEST <= config.hidden_size <= WIDEST:
        found.append((NORM_KERNELS, (dtype,)))
    if is_gated(config) and activation(config) in FUSED:
        found.append((GATE_KERNELS, (dtype,)))
    if moe.num_experts:
        found += [(ROWS_KERNELS, ()), (TOP_KERNEL, ())]
        if dtype == torch.bfloat16 and quack_gemm.fits(device):
            found.append((quack_gemm.QUACK_KERNELS, ()))
    pattern = config.hybrid_override_pattern
    found += _of_recurrent_layers(config, dtype)
    if pattern and "*" not in pattern:
        return found
    if rotary := rotary_kernel(config):
        found.append((rotary, (dtype, H)))
    if kernels.attention_backend in ("auto", "flash4") and has_plain_scores(config):
        heads = config.num_attention_heads // tp.size, max(1, num_kv_heads(config) // tp.size)
        shapes = zip(heads, (H, value_dim(config)), strict=True)
        q, v = (torch.empty(1, 1, *shape, device=device, dtype=dtype) for shape in shapes)
        if not flash4.misfit(q, v, config.attention_dropout):
            found.append((flash4.FLASH4_KERNEL, flash4.kind(q, v)))
    return found


def _of_fp8(
    config: TransformerConfig, dtype: torch.dtype, fp8: Fp8Config
) -> list[tuple[OptionalKernel, tuple[Hashable, ...]]]:
    if not fp8.fp8_format:
        return []
    if fp8.fp8_recipe in ("rowwise", "blockwise"):
        return [(FINE_CAST_KERNEL, (dtype,))]
    found: list[tuple[OptionalKernel, tuple[Hashable, ...]]] = [(CAST_KERNEL, (dtype,))]
    if is_gated(config) and activation(config) in FUSED:
        found.append((GATED_CAST_KERNEL, (dtype,)))
    return found


def _of_recurrent_layers(
    config: TransformerConfig, dtype: torch.dtype
) -> list[tuple[OptionalKernel, tuple[Hashable, ...]]]:
    letters = set(config.hybrid_override_pattern)
    found: list[tuple[OptionalKernel, tuple[Hashable, ...]]] = []
    if "G" in letters or ("M" in letters and config.mamba_norm != "none"):
        found.append((GATED_NORM_KERNELS, (dtype,)))
    if letters & {"M", "G"}:
        found.append((CONV_KERNELS, (dtype,)))
    if "G" in letters:
        fitting = kernel_widths(config.linear_key_head_dim, config.linear_value_head_dim)
        if dtype in NARROW and fitting:
            found.append((DELTA_KERNELS, (dtype, *fitting)))
    if "M" in letters:
        widths = config.mamba_head_dim, config.mamba_state_dim
        if dtype in NARROW and is_kernel_width(*widths):
            found.append((SSD_KERNELS, (dtype, *widths)))
    return found
