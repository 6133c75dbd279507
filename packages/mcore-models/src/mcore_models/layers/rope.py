"""Rotary position embedding: queries and keys rotated by angles proportional to position.

Channel i of the first half of the rotated channels forms a pair with channel i of the second
half (or, interleaved, with its neighbour). Angles are computed in float64: at position 100 000
a float32 angle is wrong by hundredths of a radian.

Su et al. 2021, arXiv:2104.09864.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_models.config import TransformerConfig, rotary_size, yarn_magnitude
from mcore_models.kernels.qk_norm_rope import norm_rotary_split
from mcore_models.kernels.rope import RotaryTables, rotary_split
from mcore_models.logical_tensors import head_dim, qkv_parts
from mcore_parallel.optional_kernels import KernelFunction


def build_rotary(
    config: TransformerConfig,
    positions: Int[Tensor, "*B S"],
    dtype: torch.dtype,
    length: int = 0,
) -> RotaryTables | None:
    """Compute the rotary tables of a model's layers; None if nothing rotates.

    Args:
        config: of the model.
        positions: ``[S]``, or ``[B, S]``.
        dtype: of the activations; the tables are float32 or wider.
        length: tokens of the sequence over all ranks, including those of a state; two kinds
            of scaling depend on it.
    """
    if config.position_embedding_type != "rope":
        return None
    frequencies = rotary_frequencies(config, positions.device, length)
    return rotary_tables(positions, frequencies, dtype, rotary_magnitude(config))


def build_local_rotary(
    config: TransformerConfig, positions: Int[Tensor, "*B S"], dtype: torch.dtype
) -> RotaryTables | None:
    """Compute the rotary tables of layers with a window; None: they have no separate tables."""
    if not config.rotary_base_local or config.position_embedding_type != "rope":
        return None
    frequencies = _base_frequencies(config, config.rotary_base_local, positions.device)
    return rotary_tables(positions, frequencies, dtype)


def query_temperature(
    config: TransformerConfig, positions: Int[Tensor, "*B S"], dtype: torch.dtype
) -> Float[Tensor, "S b 1 1"] | None:
    """Return the factor on queries of layers without rotation, or of all layers; None: 1.

    ``1 + scale * ln(1 + position // span)`` sharpens scores as the context grows, as in the
    releases of Llama 4 and Ministral 3.
    """
    span = config.attention_temperature_span
    if not span:
        return None
    positions = positions.unsqueeze(1) if positions.dim() == 1 else positions.t()
    wide = torch.promote_types(dtype, torch.float32)
    # Llama 4 ("unrotated") counts the token itself, Ministral 3 ("all") only earlier tokens.
    num_tokens = positions + (config.attention_temperature_layers == "unrotated")
    spans = (num_tokens // span).to(wide)
    return (1 + config.attention_temperature_scale * torch.log1p(spans))[..., None, None]


def rotary_frequencies(
    config: TransformerConfig, device: torch.device | str | None = None, length: int = 0
) -> Float[Tensor, " h"]:
    """Return the angle per position of each pair of channels, float64, scaled by the config."""
    base = config.rotary_base
    if config.rope_type == "dynamic":
        base = _grown_base(config, length)
    frequencies = _base_frequencies(config, base, device)
    if config.use_rope_scaling:
        frequencies = _stretch(frequencies, config)
    if config.rope_type == "yarn":
        frequencies = _yarn(frequencies, config)
    if config.rope_type == "proportional":
        num_rotated = int(config.rotary_percent * rotary_size(config)) // 2
        frequencies[num_rotated:] = 0.0  # the other pairs keep angle 0
    if config.rope_type == "longrope":
        is_long = length > config.original_max_position_embeddings
        factors = config.longrope_long_factor if is_long else config.longrope_short_factor
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64, device=device)
    return frequencies / config.rotary_seq_len_interpolation_factor


def rotary_magnitude(config: TransformerConfig) -> float:
    """Return the factor on cosines and sines, hence on rotated queries and keys.

    Reference:
        LongRoPE: Ding et al. 2024, arXiv:2402.13753; the root is in Phi-3's release.
    """
    if config.rope_type not in ("yarn", "longrope"):
        return 1.0
    if config.rope_attention_factor:
        return config.rope_attention_factor
    factor = config.rotary_scaling_factor
    if config.rope_type == "longrope":
        context = config.original_max_position_embeddings
        return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    return yarn_magnitude(factor, config.mscale) / yarn_magnitude(factor, config.mscale_all_dim)


def _base_frequencies(
    config: TransformerConfig, base: float, device: torch.device | str | None
) -> Float[Tensor, " h"]:
    size = rotary_size(config)  # odd: the last of (size + 1) / 2 pairs rotates as well
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    return base**-exponents


def _grown_base(config: TransformerConfig, length: int) -> float:
    """Return the base, increased for sequences beyond the original context ("dynamic NTK").

    Reference:
        The blend is bloc97's and emozilla's of 2023, as in Peng et al. 2023, arXiv:2309.00071,
        section 2.3.
    """
    context, factor = config.original_max_position_embeddings, config.rotary_scaling_factor
    size = rotary_size(config)
    if length <= context:
        return config.rotary_base
    growth = factor * length / context - (factor - 1)
    return config.rotary_base * growth ** (size / (size - 2))


def rotary_tables(
    positions: Int[Tensor, "*B S"],
    frequencies: Float[Tensor, " h"],
    dtype: torch.dtype,
    magnitude: float = 1.0,
) -> RotaryTables:
    """Compute cosine and sine for ``rotate``.

    Args:
        positions: ``[S]``, or ``[B, S]``.
        frequencies: of ``rotary_frequencies``.
        dtype: of the activations; the tables are float32 or wider.
        magnitude: of ``rotary_magnitude``.

    Returns:
        Cosine and sine, sequence first: ``[S, h]`` or ``[S, B, h]``.
    """
    positions = positions if positions.dim() == 1 else positions.t()  # [B, S] -> [S, B]
    angles = positions.unsqueeze(-1) * frequencies
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return cos.to(wide), sin.to(wide)


def rotary_kernel(config: TransformerConfig) -> KernelFunction[..., Any] | None:
    """Return the kernel that splits, norms and rotates the heads of a model, or None."""
    is_rope = config.position_embedding_type == "rope" and not config.multi_latent_attention
    is_plain = not (config.rotary_interleaved or config.qk_l2_norm)
    is_plain = is_plain and not (config.attention_output_gate or config.qk_norm_after_rope)
    is_plain = is_plain and not config.value_norm and qkv_parts(config) == ("q", "k", "v")
    if not (is_rope and is_plain and rotary_size(config) == head_dim(config)):
        return None
    if not config.qk_layernorm:
        return rotary_split
    by_head = config.normalization == "RMSNorm" and config.qk_norm_width == "head"
    return norm_rotary_split if by_head else None


def _stretch(frequencies: Tensor, config: TransformerConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high frequencies, and blend in between.

    LLaMA 3.1: Grattafiori et al. 2024, arXiv:2407.21783; the blend is in the model's release.
    """
    context = config.rope_scaling_original_max_position_embeddings
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    # Rotations of a pair within the original context: pairs with few rotations are stretched.
    turns = context * frequencies / (2 * math.pi)
    # Share of each frequency that is not divided. If both bounds are equal, the small
    # denominator makes the blend a step.
    unscaled = ((turns - low) / max(high - low, 1e-9)).clamp(0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / config.rope_scaling_factor)


def _yarn(frequencies: Tensor, config: TransformerConfig) -> Tensor:
    """Divide frequencies of pairs with few rotations by the factor; blend towards the others.

    The bounds of the blend are rounded outwards to channels, as in most published models.

    Reference:
        Peng et al. 2023, YaRN, arXiv:2309.00071, section 3.2.
    """
    size, context = rotary_size(config), config.original_max_position_embeddings

    def channel(turns: float) -> float:
        """Return the index of the pair that rotates ``turns`` times in the original context."""
        ratio = context / (2 * math.pi * turns)
        return size / 2 * math.log(ratio) / math.log(config.rotary_base)

    ends = channel(config.beta_fast), channel(config.beta_slow)
    if config.yarn_correction_range_round_to_int:
        ends = math.floor(ends[0]), math.ceil(ends[1])
    low, high = max(ends[0], 0), min(ends[1], size - 1)
    index = torch.arange(frequencies.shape[0], dtype=torch.float64, device=frequencies.device)
    # If both bounds are equal, the small denominator makes the blend a step.
    stretched = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return frequencies * (1 - stretched + stretched / config.rotary_scaling_factor)
