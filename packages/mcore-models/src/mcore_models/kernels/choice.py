"""List of the optional kernels that a model may use, on which ranks agree before training."""

from collections.abc import Hashable

import torch

from mcore_models.config import KernelConfig, TransformerConfig, activation, has_plain_scores
from mcore_models.kernels import flash4_attention as flash4
from mcore_models.kernels.batch_invariant import fixed_order_attention, fixed_order_product
from mcore_models.kernels.conv import conv_silu
from mcore_models.kernels.delta import gated_delta_rule, kernel_widths
from mcore_models.kernels.gated_fp8 import cast_gated, largest_gated
from mcore_models.kernels.gated_norm import gated_norm
from mcore_models.kernels.norm import NARROWEST, WIDEST, add_and_norm, norm
from mcore_models.kernels.ssd import NARROW, is_kernel_width, ssd
from mcore_models.layers.rope import rotary_kernel
from mcore_models.logical_tensors import head_dim, is_gated, num_kv_heads, value_dim
from mcore_moe.config import MoEConfig
from mcore_moe.kernels import quack_gemm, rows
from mcore_moe.kernels.gate import KINDS, gated, weighted_gated
from mcore_moe.kernels.topk import top_experts
from mcore_parallel.kernels import fp8_cast, fp8_fine_cast, loss
from mcore_parallel.kernels.adam import adamw_update
from mcore_parallel.kernels.embedding import add_rows_
from mcore_parallel.kernels.rounding import round_by_salt_
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optional_kernels import OptionalKernel
from mcore_parallel.precision.config import Fp8Config

Choice = tuple[OptionalKernel, tuple[Hashable, ...]]
"""A kernel and the key that it is compiled for."""
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
) -> list[Choice]:
    """Return the kernels that a training step may use on a GPU, for ``agree_on_kernels``."""
    H = head_dim(config)
    choices: list[Choice] = [
        (add_rows_, ()),
        (adamw_update, ()),
    ]
    if dtype == torch.float64:
        return choices
    if dtype == torch.bfloat16:
        choices.append((round_by_salt_, ()))
    choices += [(loss.row_stats, (dtype,)), (loss.softmax_gradient_, (dtype,))]
    choices += _of_fp8(config, dtype, fp8)
    if kernels.batch_invariant_mode:
        choices.append((fixed_order_product, (dtype,)))
        choices.append((fixed_order_attention, (dtype, head_dim(config))))
    if NARROWEST <= config.hidden_size <= WIDEST:
        choices += [(norm, (dtype,)), (add_and_norm, (dtype,))]
    if is_gated(config) and activation(config) in KINDS:
        choices.append((gated, (dtype,)))
    if moe.num_experts:
        of_rows = rows.plan_choices, rows.copy_to_rows, rows.sum_rows, rows.put_rows
        choices += [(kernel, ()) for kernel in (*of_rows, top_experts)]
        if is_gated(config) and activation(config) in KINDS:
            choices.append((weighted_gated, (dtype,)))
        if dtype == torch.bfloat16 and quack_gemm.fits(device):
            choices.append((quack_gemm.multiply_by_tile, ()))
            choices.append((quack_gemm.add_weight_gradient, ()))
    pattern = config.hybrid_override_pattern
    choices += _of_recurrent_layers(config, dtype)
    if pattern and "*" not in pattern:
        return choices
    if rotary := rotary_kernel(config):
        choices.append((rotary, (dtype, H)))
    if kernels.attention_backend in ("auto", "flash4") and has_plain_scores(config):
        heads = config.num_attention_heads // tp.size, max(1, num_kv_heads(config) // tp.size)
        shapes = zip(heads, (H, value_dim(config)), strict=True)
        q, v = (torch.empty(1, 1, *shape, device=device, dtype=dtype) for shape in shapes)
        if not flash4.misfit(q, v, config.attention_dropout):
            choices.append((flash4.flash4_attention, flash4.kind(q, v)))
    return choices


def _of_fp8(config: TransformerConfig, dtype: torch.dtype, fp8: Fp8Config) -> list[Choice]:
    if not fp8.fp8_format:
        return []
    if fp8.fp8_recipe in ("rowwise", "blockwise"):
        fine = fp8_fine_cast.largest_of_lines, fp8_fine_cast.cast_lines_by
        casts = fine if fp8.fp8_recipe == "rowwise" else (fp8_fine_cast.cast_blocks,)
        return [(kernel, (dtype,)) for kernel in casts]
    flat = fp8_cast.cast_flat, fp8_cast.dequantize_flat
    casts = fp8_cast.largest_magnitude, fp8_cast.cast_by, *flat
    choices: list[Choice] = [(kernel, (dtype,)) for kernel in casts]
    if is_gated(config) and activation(config) in KINDS:
        choices += [(largest_gated, (dtype,)), (cast_gated, (dtype,))]
    return choices


def _of_recurrent_layers(config: TransformerConfig, dtype: torch.dtype) -> list[Choice]:
    letters = set(config.hybrid_override_pattern)
    choices: list[Choice] = []
    if "G" in letters or ("M" in letters and config.mamba_norm != "none"):
        choices.append((gated_norm, (dtype,)))
    if letters & {"M", "G", "K"}:
        choices.append((conv_silu, (dtype,)))
    if "G" in letters:
        fitting = kernel_widths(config.linear_key_head_dim, config.linear_value_head_dim)
        if dtype in NARROW and fitting:
            choices.append((gated_delta_rule, (dtype, *fitting)))
    if "M" in letters:
        widths = config.mamba_head_dim, config.mamba_state_dim
        if dtype in NARROW and is_kernel_width(*widths):
            choices.append((ssd, (dtype, *widths)))
    if "L" in letters:
        widths = head_dim(config), head_dim(config)
        if dtype in NARROW and is_kernel_width(*widths):
            choices.append((ssd, (dtype, *widths)))
    return choices
