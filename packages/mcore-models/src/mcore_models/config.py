"""Configuration of a decoder-only transformer, and functions of it alone.

Field names are Megatron's flags with underscores; each field's docstring is its help text.
0 means "derived" or "off": ``mcore_models.logical_tensors`` and the functions below compute
derived values, which are never written back. The standard library only.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from mcore_base.options import ON, Because, Options, Rule, When, flag, listed, option, rules
from mcore_models.layer_patterns import further_letters, is_local, layers_skip, pattern_layers
from mcore_models.logical_tensors import expert_size, head_dim, is_gated

PositionEmbedding = Literal["rope", "learned_absolute", "alibi", "none"]
Normalization = Literal["RMSNorm", "LayerNorm"]
NormPlacement = Literal["pre", "output", "sandwich", "post"]
ParallelResidual = Literal["off", "two_norms", "one_norm"]
AttentionBackend = Literal["auto", "flash4", "fused", "flash", "unfused", "local"]
Config = TypeVar("Config")


def expert_sizes(values: Any) -> tuple[int, int]:
    """Return the input and inner widths of an expert.

    Args:
        values: options of a model with experts, as ``Values``.
    """
    return values.moe_latent_size or values.hidden_size, expert_size(values, values)


def _letters_of(pattern: str) -> set[str]:
    """Return the set of letters in a hybrid pattern; empty if the pattern is invalid."""
    try:
        return set("".join(pattern_layers(pattern)) + further_letters(pattern))
    except ValueError:
        return set()


_MAMBA = (
    When(
        "hybrid_override_pattern",
        lambda pattern: "M" in _letters_of(pattern),
        "M in --hybrid-override-pattern",
    ),
)
_DELTA_NET = (
    When(
        "hybrid_override_pattern",
        lambda pattern: bool({"G", "K"} & _letters_of(pattern)),
        "G or K in --hybrid-override-pattern",
    ),
)
_SHORT_CONV = (
    When(
        "hybrid_override_pattern",
        lambda pattern: "C" in _letters_of(pattern),
        "C in --hybrid-override-pattern",
    ),
)


def _wrong_heads(values: Any) -> str:
    """Return the error if heads do not divide the width; empty otherwise."""
    heads, width = values.num_attention_heads, values.hidden_size
    if values.kv_channels or values.multi_latent_attention or width % heads == 0:
        return ""
    return (
        f"--hidden-size {width} cannot be split over --num-attention-heads {heads}: use a "
        f"multiple of {heads}, such as {-(-width // heads) * heads}, or set --kv-channels."
    )


def _wrong_rotation(values: Any) -> Iterator[str]:
    """Yield errors of the numbers of rotated channels and of LongRoPE factors."""
    if values.position_embedding_type != "rope":
        return
    size = rotary_size(values)
    if size < 2 or size + size % 2 > head_dim(values):
        yield (
            f"--rotary-percent {values.rotary_percent} rotates {size} of the "
            f"{head_dim(values)} channels of a head: use a share that rotates 2 channels or "
            "more, in pairs that fit into the head."
        )
        return
    for name in ("longrope_short_factor", "longrope_long_factor"):
        pairs = (size + 1) // 2
        count, required = len(getattr(values, name)), pairs * (values.rope_type == "longrope")
        if count != required:
            yield (
                f"{flag(name)} has {count} factors, but --rope-type {values.rope_type} needs "
                f"{required}: one for each pair of rotated channels with longrope, else none."
            )


def _wrong_layers(values: Any, name: str) -> str:
    """Return the error of parsing a list of layers; empty if it is valid."""
    try:
        layers_skip(getattr(values, name), values.num_layers, name)
    except ValueError as error:
        return str(error)
    return ""


def _wrong_sharing(values: Any) -> str:
    """Return the error if sharing layers have no earlier layer of their kind; else empty."""
    shared, count = values.num_kv_shared_layers, values.num_layers
    if not shared or _wrong_layers(values, "window_attn_skip_freq"):
        return ""
    kinds = [is_local(values, layer) for layer in range(count)]
    if shared < count and {*kinds[count - shared :]} <= {*kinds[: count - shared]}:
        return ""
    return (
        f"--num-kv-shared-layers {shared} of --num-layers {count}: a sharing layer with a "
        "window needs an earlier layer with a window, and one without a window needs an "
        "earlier layer without. Share fewer layers, or change --window-attn-skip-freq."
    )


def _several_activations(values: Any) -> str:
    """Return the error if several activations are chosen; empty otherwise."""
    kinds = (
        *("swiglu", "geglu", "exact_geglu", "quick_geglu", "squared_relu", "openai_gelu"),
        *("relu", "xielu"),
    )
    chosen = [flag(name) for name in kinds if getattr(values, name)]
    if len(chosen) < 2:
        return ""
    hint = " (--no-swiglu drops the default)." if values.swiglu else "."
    return f"{' and '.join(chosen)} exclude each other: keep one{hint}"


def _wrong_pattern(values: Any) -> str:
    """Return the error of a hybrid pattern that is invalid or contradicts layer counts."""
    pattern = values.hybrid_override_pattern
    try:
        layers = pattern_layers(pattern)
        further_letters(pattern)
    except ValueError as error:
        return str(error)
    if layers and len(layers) != values.num_layers:
        return (
            f"--hybrid-override-pattern {pattern} has {len(layers)} layers, but --num-layers "
            f"is {values.num_layers}: leave --num-layers out."
        )
    further = pattern.count("/")
    if layers and further != values.mtp_num_layers:
        return (
            f"--hybrid-override-pattern {pattern} has {further} layers of multi-token "
            "prediction, each after a /, but --mtp-num-layers is "
            f"{values.mtp_num_layers}: leave --mtp-num-layers out."
        )
    return ""


def _wrong_mamba_heads(values: Any) -> str:
    """Return the error if heads or groups do not divide a Mamba layer; empty otherwise."""
    inner = 2 * values.hidden_size
    if not values.mamba_num_heads and inner % values.mamba_head_dim:
        return (
            f"2 x --hidden-size {values.hidden_size} cannot be split into heads of "
            f"--mamba-head-dim {values.mamba_head_dim}: use a divisor of {inner}, or set "
            "--mamba-num-heads."
        )
    heads = values.mamba_num_heads or inner // values.mamba_head_dim
    if heads < 1 or heads % values.mamba_num_groups:
        return (
            f"{heads} Mamba heads (--mamba-num-heads) cannot share --mamba-num-groups "
            f"{values.mamba_num_groups}: groups must divide heads."
        )
    return ""


_GATED = (When("is_gated_mlp", bool, "a gate (--swiglu)"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(Options):
    """Shape and numerics of the layers of a GPT."""

    # Sizes.

    num_layers: int = field(metadata=rules(minimum=1))
    """Transformer layers."""

    hidden_size: int = field(metadata=rules(minimum=1))
    """Width of the residual stream."""

    num_attention_heads: int = field(metadata=rules(minimum=1))
    """Query heads of a layer."""

    num_query_groups: int = option(0, minimum=0)
    """Key/value heads of a layer, each shared by several query heads; 0: as many as query
    heads."""

    kv_channels: int = option(0, minimum=0, idle_with={"multi_latent_attention": ON})
    """Width of one head; 0: --hidden-size / --num-attention-heads."""

    ffn_hidden_size: int = option(0, minimum=0)
    """Width inside the feed-forward layer; 0: 4 x --hidden-size, or for gated activations two
    thirds of that, rounded down to a multiple of 64 (at least 64)."""

    # Positions.

    max_position_embeddings: int = option(0, minimum=0)
    """Longest sequence of the model, in tokens; 0: no limit. Required by learned positions.
    Megatron's default: none."""

    position_embedding_type: PositionEmbedding = "rope"
    """Encoding of positions: rotated queries and keys, a learned table, scores that fall with
    distance (alibi), or none. Megatron's default: learned_absolute."""

    position_embedding_offset: int = option(
        0, minimum=0, needs={"position_embedding_type": "learned_absolute"}
    )
    """Rows of the learned table before the row of the first token (OPT, RoBERTa: 2)."""

    rotary_base: float = option(10000.0, above=0, part_of={"position_embedding_type": "rope"})
    """Base of the rotary wavelengths."""

    rotary_base_local: float = option(
        0.0,
        minimum=0,
        part_of={"position_embedding_type": "rope"},
        idle_with={"multi_latent_attention": ON},
        needs=(When("has_windows", bool, "--window-size"),),
    )
    """Base of the rotary wavelengths in windowed layers, without scaling; 0: the same as in
    other layers."""

    rotary_percent: float = option(
        1.0,
        above=0,
        maximum=1,
        part_of={"position_embedding_type": "rope"},
        idle_with={"multi_latent_attention": ON},
    )
    """Share of each head's channels that are rotated, above 0 to 1."""

    rotary_interleaved: bool = option(False, needs={"position_embedding_type": "rope"})
    """Rotate neighbouring channels (2i, 2i+1) together instead of (i, i + half)."""

    rope_skip_freq: str = option(
        "0",
        part_of={"position_embedding_type": "rope"},
        idle_with={"multi_latent_attention": ON},
    )
    """Layers without rotation: "N" for every N-th layer, or a list with one entry for each
    layer, 1 for layers without rotation; "0": rotation in all layers."""

    # Stretching of rotary wavelengths for longer contexts: linear, Llama 3.1's, YaRN, LongRoPE.

    rotary_seq_len_interpolation_factor: float = option(
        1.0, above=0, part_of={"position_embedding_type": "rope"}
    )
    """Positions are divided by this number before rotation; 1: unchanged."""

    use_rope_scaling: bool = option(False, needs={"position_embedding_type": "rope"})
    """Stretch long rotary wavelengths for longer contexts, as in LLaMA 3.1."""

    rope_scaling_factor: float = option(8.0, part_of={"use_rope_scaling": ON})
    """Factor by which --use-rope-scaling stretches the longest wavelengths."""

    rope_scaling_low_freq_factor: float = option(1.0, part_of={"use_rope_scaling": ON})
    """Wavelengths above the original context divided by this number are stretched fully."""

    rope_scaling_high_freq_factor: float = option(4.0, part_of={"use_rope_scaling": ON})
    """Wavelengths below the original context divided by this number are unchanged."""

    rope_scaling_original_max_position_embeddings: int = option(
        8192, part_of={"use_rope_scaling": ON}
    )
    """Context, in tokens, of the model before its wavelengths were stretched."""

    rope_type: Literal["rope", "yarn", "dynamic", "longrope", "proportional"] = option(
        "rope", needs={"position_embedding_type": "rope"}
    )
    """Scaling of rotary wavelengths for longer contexts: rope, none; yarn; dynamic, a base that
    grows with the sequence; longrope, a factor for each pair of channels; proportional, no
    scaling, but wavelengths and pairs of complete heads of which only the share
    --rotary-percent is rotated, in layers with --rotary-base (Gemma 4). Megatron's default:
    yarn with latent attention."""

    rotary_scaling_factor: float = option(
        40.0, above=0, part_of={"rope_type": ("yarn", "dynamic", "longrope")}
    )
    """Factor by which --rope-type stretches the longest wavelengths. Megatron's default:
    1.0."""

    original_max_position_embeddings: int = option(
        4096, above=0, part_of={"rope_type": ("yarn", "dynamic", "longrope")}
    )
    """Context, in tokens, of the model before --rope-type stretched it."""

    beta_fast: float = option(32.0, part_of={"rope_type": "yarn"})
    """With yarn, channels with more rotations than this in the original context are
    unchanged."""

    beta_slow: float = option(1.0, above=0, part_of={"rope_type": "yarn"})
    """With yarn, channels with fewer rotations than this in the original context are stretched
    fully."""

    mscale: float = option(1.0, minimum=0, part_of={"rope_type": "yarn"})
    """YaRN multiplies cosines and sines by m(--mscale) / m(--mscale-all-dim), where m(x) is
    0.1 x ln(--rotary-scaling-factor) + 1."""

    mscale_all_dim: float = option(0.0, minimum=0, part_of={"rope_type": "yarn"})
    """In latent attention YaRN multiplies all scores by the square of m(--mscale-all-dim)."""

    yarn_correction_range_round_to_int: bool = option(True, part_of={"rope_type": "yarn"})
    """Round YaRN's bounds between stretched and unchanged channels to whole channels."""

    rope_attention_factor: float = option(0.0, part_of={"rope_type": ("yarn", "longrope")})
    """Factor on cosines and sines with --rope-type yarn or longrope; 0: the method's
    formula."""

    longrope_short_factor: tuple[float, ...] = ()
    """Factor on the wavelength of each pair of channels, in sequences up to
    --original-max-position-embeddings."""

    longrope_long_factor: tuple[float, ...] = ()
    """Factor on the wavelength of each pair of channels, in sequences longer than
    --original-max-position-embeddings."""

    # Norms, and the addition to the residual stream.

    normalization: Normalization = "RMSNorm"
    """Kind of the norms. Megatron's default: LayerNorm."""

    norm_epsilon: float = option(1e-5, above=0)
    """Number added to the mean square or variance inside a norm."""

    apply_layernorm_1p: bool = False
    """Store norm weights minus 1, so that they start at zero."""

    norm_bias: bool = option(True, needs={"normalization": "LayerNorm"})
    """Give LayerNorms a bias; --no-norm-bias: a weight only."""

    norm_weight: bool = True
    """Give norms a weight; --no-norm-weight: neither weight nor bias (OLMo)."""

    norm_placement: NormPlacement = "pre"
    """Norms before attention and before the feed-forward layer (pre), on their outputs (output,
    OLMo-2), or both (sandwich, Gemma); post: before both, and the output of attention or of the
    feed-forward layer is added to the normed residual stream (MiniMax-M1)."""

    residual_stream_factors: tuple[float, float, float] = option(
        (1.0, 1.0, 1.0), needs={"norm_placement": "post"}
    )
    """With --norm-placement post, factors on the normed stream before the outputs of attention,
    recurrent layers and feed-forward layers are added (DeepNorm's alpha)."""

    residual_output_factors: tuple[float, float, float] = option(
        (1.0, 1.0, 1.0), needs={"norm_placement": "post"}
    )
    """With --norm-placement post, factors on the outputs of attention, recurrent layers and
    feed-forward layers."""

    embedding_layernorm: bool = False
    """Norm embeddings before the first layer; in BERT this norm replaces the norm before the
    first attention (ModernBERT)."""

    parallel_residual: ParallelResidual = option(
        "off", needs={"norm_placement": Because("as its norms are before both halves", "pre")}
    )
    """Attention and MLP read the same stream, through separate norms (two_norms, GPT-NeoX) or
    one norm (one_norm, Cohere), and both outputs are added to it."""

    # Attention: projections, norms of queries and keys, scores.

    add_qkv_bias: bool = option(False, idle_with={"multi_latent_attention": ON})
    """Give queries, keys and values biases, also without --add-bias-linear."""

    add_attention_bias: bool = option(False, idle_with={"multi_latent_attention": ON})
    """Give queries, keys, values and attention's output biases, also without
    --add-bias-linear."""

    qk_layernorm: bool = False
    """Norm each head's queries and keys before they are rotated."""

    qk_norm_width: Literal["head", "own_head", "layer"] = option(
        "head", idle_with={"multi_latent_attention": ON}, part_of={"qk_layernorm": ON}
    )
    """With --qk-layernorm: head, norm each head separately with a weight shared by all heads;
    own_head, with a separate weight for each head and no bias (Command R+); layer, norm all
    heads of a layer together (OLMo-2)."""

    qk_norm_after_rope: bool = option(
        False, idle_with={"multi_latent_attention": ON}, part_of={"qk_layernorm": ON}
    )
    """With --qk-layernorm: norm each head's queries and keys after they are rotated
    (Hunyuan)."""

    qk_l2_norm: bool = option(False, idle_with={"multi_latent_attention": ON})
    """Divide rotated queries and keys by their root mean square, without weights (Llama 4)."""

    attention_output_gate: bool = option(False, idle_with={"multi_latent_attention": ON})
    """Multiply attention's output, before its last projection, by a sigmoid of a projection
    of the same tokens (Qwen3-Next)."""

    softmax_scale: float = option(0.0, minimum=0, idle_with={"multi_latent_attention": ON})
    """Factor on attention scores; 0: 1 / sqrt(width of a head)."""

    attn_logit_softcapping: float = option(
        0.0,
        minimum=0,
        idle_with={"multi_latent_attention": ON},
        excludes={
            "position_embedding_type": Because(
                "as whether distances are capped is not defined", "alibi"
            )
        },
    )
    """Cap scores smoothly by c x tanh(score / c); 0: no cap."""

    softmax_type: Literal["vanilla", "learnable"] = option(
        "vanilla", idle_with={"multi_latent_attention": ON}
    )
    """Softmax of attention: vanilla, or learnable, with a learned score for each head that
    takes a share of attention without a value (a sink, gpt-oss)."""

    value_norm: bool = option(False, idle_with={"multi_latent_attention": ON})
    """Divide each head's values by their root mean square, without weights (Gemma 4)."""

    num_kv_shared_layers: int = option(
        0,
        minimum=0,
        idle_with={"multi_latent_attention": ON},
        excludes={
            "hybrid_override_pattern": Because("whose layers have keys of their own"),
            "mtp_num_layers": Because("which have keys of their own"),
            "cuda_graph_impl": Because("which runs layers one by one", "local"),
        },
    )
    """Number of last layers that compute no keys and values: a layer with a window reads those
    of the last other layer with a window, a layer without one those of the last other layer
    without one (Gemma 3n)."""

    # Attention: layers with and without a window.

    window_size: tuple[int, int] = option((-1, 0), idle_with={"multi_latent_attention": ON})
    """Numbers of tokens before and after its own that a query attends to. First number -1: all
    tokens. The second number is 0 in a causal model, and in BERT equal to the first."""

    window_attn_skip_freq: str = option(
        "0", needs=(When("has_windows", bool, "--window-size"),)
    )
    """Layers without a window: "N" for every N-th layer, or a list with one entry for each
    layer, 0 for all tokens and 1 for a window; "0": all layers have a window."""

    global_kv_channels: int = option(
        0,
        minimum=0,
        idle_with={"multi_latent_attention": ON},
        needs=(When("has_windows", bool, "--window-size"),),
    )
    """Width of one head in layers without a window, if other layers have one; 0: the same
    width (Gemma 4)."""

    global_num_query_groups: int = option(
        0,
        minimum=0,
        idle_with={"multi_latent_attention": ON},
        needs=(When("has_windows", bool, "--window-size"),),
    )
    """Key/value heads of layers without a window, if other layers have one; 0: as many."""

    attention_k_eq_v: bool = option(
        False,
        idle_with={"multi_latent_attention": ON},
        needs=(When("has_windows", bool, "--window-size"),),
    )
    """In layers without a window, use keys, before they are normed and rotated, as values,
    which then have no projection (Gemma 4)."""

    attention_chunk_size: int = option(0, minimum=0, idle_with={"multi_latent_attention": ON})
    """Tokens of a chunk: layers that otherwise have a window attend within chunks instead
    (Llama 4); 0: off."""

    attention_temperature_span: int = option(
        0, minimum=0, idle_with={"multi_latent_attention": ON}
    )
    """In layers without rotation, multiply queries by 1 + --attention-temperature-scale x
    ln(1 + n), where n is the number of tokens so far divided by this span, rounded down; 0:
    off."""

    attention_temperature_scale: float = option(0.1, part_of={"attention_temperature_span": ON})
    """Factor on the logarithm in the formula of --attention-temperature-span."""

    attention_temperature_layers: Literal["unrotated", "all"] = option(
        "unrotated", part_of={"attention_temperature_span": ON}
    )
    """Layers that --attention-temperature-span applies to; with all, the token itself is not
    counted, as in Ministral 3."""

    # Latent attention.

    multi_latent_attention: bool = False
    """Compress keys and values of all heads to one latent vector per token. DeepSeek's models
    also have --qk-layernorm and --rotary-interleaved."""

    q_lora_rank: int = option(0, minimum=0, part_of={"multi_latent_attention": ON})
    """Width of the latent vector of queries; 0: queries are not compressed."""

    kv_lora_rank: int = option(512, above=0, part_of={"multi_latent_attention": ON})
    """Width of the latent vector of keys and values. Megatron's default: 32."""

    qk_head_dim: int = option(128, above=0, part_of={"multi_latent_attention": ON})
    """Channels of a latent head's queries and keys that are not rotated."""

    qk_pos_emb_head_dim: int = option(64, above=0, part_of={"multi_latent_attention": ON})
    """Rotated channels of a latent head's queries, and of the rotated key that all heads
    share."""

    v_head_dim: int = option(128, above=0, part_of={"multi_latent_attention": ON})
    """Channels of a latent head's values."""

    dsa_indexer_topk: int = option(
        0,
        minimum=0,
        part_of={"multi_latent_attention": ON},
        needs={"q_lora_rank": ON, "position_embedding_type": "rope"},
        excludes={"qk_clip": Because("which does not see which keys are selected")},
        shrinks_to=8,
    )
    """Number of keys that a token attends to, selected by an indexer (DeepSeek-V3.2); 0: all
    keys. The indexer is not trained."""

    dsa_indexer_n_heads: int = option(64, above=0, part_of={"dsa_indexer_topk": ON})
    """Heads of the indexer. Megatron's default: none."""

    dsa_indexer_head_dim: int = option(128, above=0, part_of={"dsa_indexer_topk": ON})
    """Channels of a head of the indexer. Megatron's default: none."""

    # Feed-forward layers.

    swiglu: bool = True
    """Feed-forward layers gated by SiLU. With --no-swiglu: exact GELU without a gate, unless
    another activation is chosen, such as --geglu or --squared-relu. Megatron's default: off."""

    quick_geglu: bool = False
    """Feed-forward layers gated by x * sigmoid(1.702 x); needs --no-swiglu."""

    squared_relu: bool = False
    """Activation relu(x) squared, no gate; needs --no-swiglu."""

    relu: bool = False
    """Activation relu(x), no gate; needs --no-swiglu."""

    xielu: bool = option(
        False,
        excludes={"num_experts": Because("which have no activation with parameters")},
    )
    """Activation xIELU, quadratic for positive and exponential for negative inputs, with two
    slopes that each layer learns (Apertus), no gate; needs --no-swiglu."""

    openai_gelu: bool = False
    """Activation GELU by its tanh approximation, as in Megatron's fused kernel, no gate; needs
    --no-swiglu."""

    geglu: bool = False
    """Feed-forward layers gated by the tanh approximation of GELU; needs --no-swiglu."""

    exact_geglu: bool = False
    """Feed-forward layers gated by the exact GELU; needs --no-swiglu."""

    use_double_wide_mlp: bool = option(False, needs={"num_kv_shared_layers": ON})
    """Make the feed-forward layers of --num-kv-shared-layers twice as wide."""

    activation_sparsity_pattern: tuple[float, ...] = option(
        (),
        needs=_GATED,
        excludes={"num_experts": Because("whose feed-forward layers are not sparse")},
    )
    """For each layer the share of a token's gates that are set to 0 before the activation, 0 to
    1 (Gemma 3n). Gates below a quantile are set to 0, by a normal distribution with the mean
    and standard deviation of the token's gates. Empty: no layer does."""

    activation_func_clamp_value: float = option(0.0, minimum=0, needs=_GATED)
    """Clamp gates from above and up-projections on both sides before the multiplication; 0:
    off."""

    glu_linear_offset: float = option(0.0, needs=_GATED)
    """Number added to up-projections before the multiplication by the gate."""

    add_bias_linear: bool = False
    """Biases in all linears except head and router. Megatron's default: on."""

    # Embedding, output head, multipliers.

    untie_embeddings_and_output_weights: bool = False
    """Give the output head a separate weight; by default it uses the embedding's."""

    add_output_bias: bool = False
    """Give the output head a bias for each token of the vocabulary (Phi-2)."""

    make_vocab_size_divisible_by: int = option(128, minimum=1)
    """Pad each tensor rank's share of the vocabulary to a multiple of this."""

    per_layer_embedding_size: int = option(
        0,
        minimum=0,
        shrinks_to=4,
        excludes={
            "hybrid_override_pattern": Because("which has no letter for it"),
            "mtp_num_layers": Because("which have no such vectors"),
            "norm_placement": Because("whose factors it does not have", "post"),
            "parallel_residual": Because(
                "which has one sum for a layer", "two_norms", "one_norm"
            ),
            "cuda_graph_impl": Because("which runs layers one by one", "local"),
        },
    )
    """Width of the vector that every layer looks up for each token and adds to the residual
    stream, gated and projected (Gemma 3n); 0: no such vectors."""

    per_layer_embedding_vocab_size: int = option(
        0, minimum=0, needs={"per_layer_embedding_size": ON}, shrinks_to=7
    )
    """Rows of the table of --per-layer-embedding-size; tokens of higher ids look up row 0
    (Gemma 3n). 0: a row for each token."""

    altup_num_inputs: int = option(0, minimum=0, needs={"per_layer_embedding_size": ON})
    """Number of residual streams (AltUp, Gemma 3n). Each layer predicts all streams as mixtures
    of them, runs attention and feed-forward layer on the first one, and corrects all streams
    by the error of its prediction. 0: one stream, without AltUp."""

    laurel_rank: int = option(0, minimum=0, shrinks_to=3, needs={"altup_num_inputs": ON})
    """Rank of a linear branch parallel to attention (LAuReL, Gemma 3n); 0: no branch."""

    layer_output_scale: bool = option(
        False,
        excludes={
            "parallel_residual": Because(
                "which has one sum for a layer", "two_norms", "one_norm"
            )
        },
    )
    """Multiply the residual stream after each layer by a number that each layer stores and
    training does not change (Gemma 4)."""

    embedding_multiplier: float = option(1.0, above=0)
    """Factor on embeddings."""

    residual_multiplier: float = option(1.0, above=0)
    """Factor on the outputs of attention and feed-forward layers in the residual stream."""

    logits_multiplier: float = option(1.0, above=0)
    """Factor on the scores of the vocabulary."""

    final_logit_softcapping: float = option(0.0, minimum=0)
    """Cap the scores of the vocabulary by c x tanh(score / c); 0: no cap."""

    # Regularization of the loss, dropout and initial weights.

    label_smoothing: float = option(0.0, minimum=0, below=1)
    """Share of each target that is spread evenly over the vocabulary, in training only; reduces
    overconfidence on noisy labels. The logged loss is the smoothed loss."""
    z_loss_coeff: float = option(0.0, minimum=0)
    """Coefficient of the squared log-sum-exp of the scores that is added to each token's loss,
    in training only; keeps the scores of the vocabulary from drifting to sizes that 16 bits
    round. PaLM used 1e-4."""

    hidden_dropout: float = option(0.0, minimum=0, below=1, shrinks_to=0.0)
    """Probability of dropping a channel before it joins the residual stream. Megatron's
    default: 0.1."""

    attention_dropout: float = option(0.0, minimum=0, below=1, shrinks_to=0.0)
    """Probability of dropping an attention weight. Megatron's default: 0.1."""

    init_method_std: float = option(0.02, above=0)
    """Standard deviation of initial weights; divided by sqrt(2 x --num-layers) for weights that
    write to the residual stream."""

    embedding_init_method_std: float = option(0.0, minimum=0)
    """Standard deviation of initial embeddings; 0: --init-method-std."""

    # muP.

    use_mup: bool = option(
        False,
        excludes={
            "optimizer": Because("as it sets rates for Adam and Muon only", "sgd"),
            "peft": Because("as it sets no rates for adapters", "lora", "dora"),
            "softmax_scale": Because("as it sets the scale of scores"),
        },
    )
    """Use muP: --lr, --adam-eps and --init-method-std are the values of a model of width
    --mup-base-hidden-size, and transfer to every width."""

    mup_base_hidden_size: int = option(0, needs={"use_mup": ON}, shrinks_to=4)
    """Width at which muP has no effect; required with --use-mup."""

    mup_embedding_mult: float = option(1.0, above=0, needs={"use_mup": ON})
    """Factor on embeddings with --use-mup, the same at every width."""

    mup_output_mult: float = option(1.0, above=0, needs={"use_mup": ON})
    """Factor on the scores of the vocabulary with --use-mup, in addition to the base width over
    the model's."""

    mup_attn_scale_power: float = option(1.0, above=0, needs={"use_mup": ON})
    """With --use-mup, attention scores are divided by the width of a head to this power."""

    mup_base_head_dim: int = option(0, minimum=0, needs={"use_mup": ON})
    """Width of a head at which attention scores equal those without muP; 0: the model's own."""

    # Multi-token prediction.

    mtp_num_layers: int = option(
        0,
        minimum=0,
        excludes={
            "position_embedding_type": Because(
                "whose table is on the first stage",
                "learned_absolute",
                instead="use rope or none",
            ),
            "embedding_layernorm": Because(
                "as the norm is at the first stage, and further layers embed at the last"
            ),
        },
    )
    """Layers after the model, each of which predicts one token further ahead than the previous
    one; 0: none. These layers share the model's embedding and output head."""

    mtp_loss_scaling_factor: float = option(0.1, minimum=0, part_of={"mtp_num_layers": ON})
    """Weight of the mean loss of --mtp-num-layers relative to the main loss."""

    # Hybrid stacks: the mixers of layers, and the sizes of recurrent mixers.

    hybrid_override_pattern: str = ""
    """One letter for each layer, instead of attention and feed-forward in every layer: M
    Mamba-2, G gated delta net, C gated short convolution, L lightning attention (with the heads
    of attention), K Kimi Delta Attention (with the heads of a delta net), * attention, -
    feed-forward, E experts. Letters in brackets are one layer, as in [G-]. | separates pipeline
    stages, which checkpoints do not store. / precedes the letters of each layer of multi-token
    prediction, as in /*-. Empty: a transformer."""

    mamba_state_dim: int = option(128, minimum=1, part_of=_MAMBA, shrinks_to=6)
    """Size of the state of each channel of a Mamba head."""

    mamba_head_dim: int = option(64, minimum=1, part_of=_MAMBA, shrinks_to=4)
    """Channels of a Mamba head."""

    mamba_num_heads: int = option(0, minimum=0, part_of=_MAMBA)
    """Mamba heads of a layer; 0: 2 x --hidden-size / --mamba-head-dim."""

    mamba_num_groups: int = option(8, minimum=1, part_of=_MAMBA)
    """Groups of Mamba heads that share B and C."""

    mamba_conv_kernel: int = option(4, minimum=1, part_of=_MAMBA)
    """Kernel size of the convolution of a Mamba layer, including the current token."""

    mamba_conv_bias: bool = option(True, part_of=_MAMBA)
    """Bias of the convolution of a Mamba layer."""

    mamba_proj_bias: bool = option(False, part_of=_MAMBA)
    """Biases of a Mamba layer's two linears."""

    mamba_norm: Literal["gated", "before_gate", "none"] = option("gated", part_of=_MAMBA)
    """Norm of a Mamba layer's output: after the gate (gated), before it, or none."""

    mamba_chunk_size: int = option(128, minimum=1, part_of=_MAMBA, shrinks_to=4)
    """Tokens in a chunk of a Mamba layer's scan; affects time and memory, not results."""

    mamba_dt_limit: tuple[float, float] = option((0.0, 0.0), part_of=_MAMBA)
    """Smallest and largest step size of a Mamba head; 0 as the largest: no limit."""

    mamba_dt_min: float = option(0.001, part_of=_MAMBA, above=0)
    """Smallest initial step size of a Mamba head."""

    mamba_dt_max: float = option(0.1, part_of=_MAMBA)
    """Largest initial step size of a Mamba head."""

    mamba_dt_init_floor: float = option(1e-4, part_of=_MAMBA)
    """Lower bound of initial step sizes."""

    linear_num_key_heads: int = option(16, minimum=1, part_of=_DELTA_NET)
    """Query and key heads of a gated delta net."""

    linear_num_value_heads: int = option(32, minimum=1, part_of=_DELTA_NET)
    """Value heads of a gated delta net; several share a key head."""

    linear_key_head_dim: int = option(128, minimum=1, part_of=_DELTA_NET, shrinks_to=4)
    """Channels of a gated delta net's queries and keys."""

    linear_value_head_dim: int = option(128, minimum=1, part_of=_DELTA_NET, shrinks_to=6)
    """Channels of a gated delta net's values."""

    linear_conv_kernel_dim: int = option(4, minimum=1, part_of=_DELTA_NET)
    """Kernel size of the convolution of a gated delta net, including the current token."""

    short_conv_kernel_dim: int = option(3, minimum=1, part_of=_SHORT_CONV)
    """Kernel size of a gated short convolution, including the current token."""

    short_conv_bias: bool = option(False, part_of=_SHORT_CONV)
    """Biases of a gated short convolution and its two linears."""

    rules = (
        Rule(
            ("label_smoothing", "z_loss_coeff", "is_causal"),
            lambda v: (v.label_smoothing or v.z_loss_coeff) and not v.is_causal,
            "--label-smoothing and --z-loss-coeff change the loss of mcore-train gpt, not of "
            "BERT or T5: leave them out.",
        ),
        Rule(
            ("moe_experts_dtype", "hidden_size", "moe_latent_size"),
            lambda v: (
                v.moe_experts_dtype
                and any(size % 16 for size in expert_sizes(v))
                and (
                    f"--moe-experts-dtype {v.moe_experts_dtype} needs experts whose input and "
                    f"inner widths are multiples of 16, not {expert_sizes(v)}: change "
                    "--hidden-size, --moe-latent-size or --moe-ffn-hidden-size."
                )
            ),
        ),
        Rule(("hidden_size", "num_attention_heads", "kv_channels"), _wrong_heads),
        Rule(
            ("num_attention_heads", "num_query_groups"),
            lambda v: (
                v.num_query_groups
                and v.num_attention_heads % v.num_query_groups
                and (
                    f"--num-attention-heads {v.num_attention_heads} cannot share "
                    f"--num-query-groups {v.num_query_groups}: groups must divide heads. Use "
                    f"{listed(divisors(v.num_attention_heads))}."
                )
            ),
        ),
        Rule(
            ("num_query_groups", "num_attention_heads", "multi_latent_attention"),
            lambda v: (
                v.multi_latent_attention
                and v.num_query_groups not in (0, v.num_attention_heads)
            ),
            "--num-query-groups {num_query_groups}: with --multi-latent-attention every head "
            "has its own keys. Use 0 or --num-attention-heads, {num_attention_heads}.",
        ),
        Rule(
            ("qk_pos_emb_head_dim",),
            lambda v: v.qk_pos_emb_head_dim % 2,
            "--qk-pos-emb-head-dim {qk_pos_emb_head_dim} must be even: channels are rotated in "
            "pairs.",
        ),
        Rule(
            ("dsa_indexer_head_dim", "qk_pos_emb_head_dim", "dsa_indexer_topk"),
            lambda v: v.dsa_indexer_topk and v.dsa_indexer_head_dim < v.qk_pos_emb_head_dim,
            "--dsa-indexer-head-dim {dsa_indexer_head_dim} must be --qk-pos-emb-head-dim, "
            "{qk_pos_emb_head_dim}, or more: the indexer rotates as many channels.",
        ),
        Rule(
            ("position_embedding_type", "multi_latent_attention"),
            lambda v: v.multi_latent_attention and v.position_embedding_type == "alibi",
            "--multi-latent-attention does not support --position-embedding-type alibi: use "
            "rope or none.",
        ),
        Rule(
            ("position_embedding_type", "max_position_embeddings"),
            lambda v: (
                v.position_embedding_type == "learned_absolute"
                and not v.max_position_embeddings
            ),
            "--position-embedding-type learned_absolute needs --max-position-embeddings: the "
            "longest sequence in tokens.",
        ),
        Rule(
            (
                *("hidden_size", "num_attention_heads", "kv_channels", "rotary_percent"),
                *("position_embedding_type", "multi_latent_attention"),
            ),
            _wrong_rotation,
        ),
        Rule(
            ("rope_type", "use_rope_scaling", "rotary_seq_len_interpolation_factor"),
            lambda v: (
                v.rope_type != "rope"
                and (v.use_rope_scaling or v.rotary_seq_len_interpolation_factor != 1)
            ),
            "--rope-type {rope_type} excludes --use-rope-scaling and "
            "--rotary-seq-len-interpolation-factor: each stretches positions. Keep one.",
        ),
        Rule(
            ("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
            lambda v: not 0 < v.rope_scaling_low_freq_factor <= v.rope_scaling_high_freq_factor,
            "--rope-scaling-low-freq-factor {rope_scaling_low_freq_factor} must be above 0 and "
            "at most --rope-scaling-high-freq-factor {rope_scaling_high_freq_factor}.",
        ),
        Rule(
            ("beta_fast", "beta_slow"),
            lambda v: v.beta_fast < v.beta_slow,
            "--beta-fast {beta_fast} must be --beta-slow {beta_slow} or more.",
        ),
        Rule(
            ("qk_norm_width", "normalization"),
            lambda v: v.qk_norm_width == "layer" and v.normalization != "RMSNorm",
            "--qk-norm-width layer needs --normalization RMSNorm.",
        ),
        Rule(
            ("add_output_bias", "z_loss_coeff"),
            lambda v: v.add_output_bias and v.z_loss_coeff,
            "--z-loss-coeff {z_loss_coeff} is not computed with --add-output-bias: leave one "
            "of the two out.",
        ),
        Rule(
            ("norm_weight", "apply_layernorm_1p", "qk_layernorm"),
            lambda v: not v.norm_weight and (v.apply_layernorm_1p or v.qk_layernorm),
            "--no-norm-weight excludes --apply-layernorm-1p and --qk-layernorm, which concern "
            "weights of norms: leave them out (--qk-l2-norm norms without weights).",
        ),
        Rule(
            ("qk_norm_width", "qk_norm_after_rope"),
            lambda v: v.qk_norm_width == "layer" and v.qk_norm_after_rope,
            "--qk-norm-after-rope norms each head: use --qk-norm-width head or own_head.",
        ),
        Rule(
            ("global_kv_channels", "rotary_base_local", "position_embedding_type"),
            lambda v: (
                v.global_kv_channels
                and v.position_embedding_type == "rope"
                and not v.rotary_base_local
            ),
            "--global-kv-channels {global_kv_channels} needs --rotary-base-local: heads of "
            "another width need separate rotary tables.",
        ),
        Rule(
            ("global_num_query_groups", "num_attention_heads"),
            lambda v: (
                v.global_num_query_groups and v.num_attention_heads % v.global_num_query_groups
            ),
            "--num-attention-heads {num_attention_heads} cannot share "
            "--global-num-query-groups {global_num_query_groups}: groups must divide heads.",
        ),
        Rule(
            ("num_kv_shared_layers", "num_layers", "window_attn_skip_freq", "window_size"),
            _wrong_sharing,
        ),
        Rule(
            ("activation_sparsity_pattern", "num_layers"),
            lambda v: (
                v.activation_sparsity_pattern
                and len(v.activation_sparsity_pattern) != v.num_layers
            ),
            "--activation-sparsity-pattern {activation_sparsity_pattern} must hold one share "
            "for each of --num-layers {num_layers}.",
        ),
        Rule(
            ("activation_sparsity_pattern",),
            lambda v: not all(0 <= share < 1 for share in v.activation_sparsity_pattern),
            "--activation-sparsity-pattern {activation_sparsity_pattern}: each share must be "
            "at least 0 and below 1.",
        ),
        Rule(
            ("use_mup", "mup_base_hidden_size"),
            lambda v: v.use_mup and v.mup_base_hidden_size < 1,
            "--mup-base-hidden-size {mup_base_hidden_size}: --use-mup needs the width at which "
            "the learning rate was tuned, 1 or more.",
        ),
        Rule(
            ("window_size", "is_causal"),
            lambda v: (
                v.window_size[0] < -1
                or v.window_size[1] != (0 if v.is_causal else max(v.window_size[0], 0))
            ),
            "--window-size {window_size}: the first number must be -1 (all tokens) or more; "
            "the second 0 in a causal model, and in BERT equal to the first.",
        ),
        Rule(
            ("attention_chunk_size", "window_size"),
            lambda v: v.attention_chunk_size and v.window_size[0] >= 0,
            "--attention-chunk-size {attention_chunk_size} and --window-size {window_size} "
            "exclude each other: keep one.",
        ),
        *(
            Rule((name, "num_layers"), lambda v, name=name: _wrong_layers(v, name))
            for name in ("window_attn_skip_freq", "rope_skip_freq")
        ),
        Rule(
            (
                *("swiglu", "geglu", "exact_geglu", "quick_geglu", "squared_relu"),
                *("openai_gelu", "relu", "xielu"),
            ),
            _several_activations,
        ),
        Rule(("hybrid_override_pattern", "num_layers", "mtp_num_layers"), _wrong_pattern),
        Rule(("mamba_head_dim", "mamba_num_heads", "mamba_num_groups"), _wrong_mamba_heads),
        Rule(
            ("mamba_dt_limit",),
            lambda v: v.mamba_dt_limit[0] < 0 or 0 < v.mamba_dt_limit[1] <= v.mamba_dt_limit[0],
            "--mamba-dt-limit {mamba_dt_limit}: the first must be 0 or more, the second above "
            "it, or 0 for no limit.",
        ),
        Rule(
            ("mamba_dt_min", "mamba_dt_max"),
            lambda v: v.mamba_dt_min > v.mamba_dt_max,
            "--mamba-dt-min {mamba_dt_min} must be above 0 and at most --mamba-dt-max "
            "{mamba_dt_max}.",
        ),
        Rule(
            ("linear_num_value_heads", "linear_num_key_heads"),
            lambda v: v.linear_num_value_heads % v.linear_num_key_heads,
            "--linear-num-value-heads {linear_num_value_heads} cannot share "
            "--linear-num-key-heads {linear_num_key_heads}: use a multiple of "
            "{linear_num_key_heads}.",
        ),
    )

    @property
    def is_gated_mlp(self) -> bool:
        """Whether feed-forward layers have a gate."""
        return is_gated(self)

    @property
    def depth(self) -> int:
        """Number of layers that pipeline stages share, without multi-token prediction."""
        return self.num_layers

    @property
    def is_causal(self) -> bool:
        """Whether the model is a GPT: BERT and T5 are not."""
        return type(self) is TransformerConfig

    @property
    def has_windows(self) -> bool:
        """Whether some layers attend within a window or a chunk."""
        return self.window_size[0] >= 0 or self.attention_chunk_size > 0


RECOMPUTE_MODULES = (
    *("core_attn", "layernorm", "mla_up_proj", "mlp", "mlp_act", "moe", "moe_act"),
    "shared_experts",
)
"""Choices of --recompute-modules; all but mlp_act are Megatron's."""


def _unknown_modules(values: Any) -> Iterator[str]:
    """Yield an error for each unknown module."""
    for module in values.recompute_modules:
        if module not in RECOMPUTE_MODULES:
            yield (
                f"--recompute-modules {module}: unknown module. Use "
                f"{listed(RECOMPUTE_MODULES)}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfig(Options):
    """Activations that backward recomputes instead of storing them in forward."""

    recompute_granularity: Literal["", "full", "selective"] = ""
    """Recompute nothing (empty), complete layers (full), or the modules of --recompute-modules
    (selective)."""

    recompute_method: Literal["", "uniform", "block"] = option(
        "", needs={"recompute_granularity": "full"}
    )
    """With full: recompute all layers in groups of --recompute-num-layers (uniform), or only
    the first --recompute-num-layers layers of each stage, one by one (block); empty:
    uniform."""

    recompute_num_layers: int = option(1, minimum=1, needs={"recompute_granularity": "full"})
    """Layers of a group (uniform), or recomputed layers of a stage (block)."""

    recompute_modules: tuple[str, ...] = option(
        ("core_attn",), needs={"recompute_granularity": "selective"}
    )
    """With selective: core_attn (attention without its projections), mla_up_proj (latent
    attention from the latent vectors on), mlp, moe, shared_experts; layernorm, mlp_act and
    moe_act (norms and activations, whose outputs are recomputed)."""

    distribute_saved_activations: bool = option(False, needs={"recompute_granularity": "full"})
    """With full: each tensor rank stores a slice of the input of a recomputed layer, and
    gathers the other slices in backward."""

    rules = (
        Rule(("recompute_modules",), _unknown_modules),
        Rule(
            ("recompute_modules", "recompute_granularity", "norm_placement"),
            lambda v: (
                v.recompute_granularity == "selective"
                and "layernorm" in v.recompute_modules
                and v.norm_placement == "post"
            ),
            "--recompute-modules layernorm saves no memory with --norm-placement post, where "
            "the normed stream is stored: leave layernorm out.",
        ),
        Rule(
            ("distribute_saved_activations", "tensor_model_parallel_size", "sequence_parallel"),
            lambda v: (
                v.distribute_saved_activations
                and (v.tensor_model_parallel_size == 1 or v.sequence_parallel)
            ),
            "--distribute-saved-activations has no effect with --tensor-model-parallel-size 1, "
            "nor with --sequence-parallel, which already splits inputs: leave it out.",
        ),
        *(
            Rule(
                ("recompute_modules", "recompute_granularity", feature),
                lambda v, module=module, feature=feature: (
                    v.recompute_granularity == "selective"
                    and module in v.recompute_modules
                    and not getattr(v, feature)
                ),
                f"--recompute-modules {module} has no effect without {flag(feature)}.",
            )
            for module, feature in (
                ("moe", "num_experts"),
                ("moe_act", "num_experts"),
                ("shared_experts", "num_experts"),
                ("mla_up_proj", "multi_latent_attention"),
            )
        ),
    )


_TE = "--transformer-impl transformer_engine"
_OTHERWISE = "leave one of the two out."
_TE_ATTENTION = f"attention by {_TE}"
_NAME_ONE = "name an --attention-backend, to use a kernel of this package."
_NOT_IN_TRANSFORMER_ENGINE: tuple[tuple[tuple[str, ...], Callable[[Any], Any], str], ...] = (
    (
        ("bf16", "fp16"),
        lambda v: not (v.bf16 or v.fp16),
        f"{_TE} computes in 16 bits only: add --bf16 or --fp16.",
    ),
    (
        ("is_causal",),
        lambda v: not v.is_causal,
        f"{_TE} supports mcore-train gpt, not BERT or T5: leave it out.",
    ),
    (
        ("hybrid_override_pattern",),
        lambda v: v.hybrid_override_pattern,
        f"{_TE} does not support --hybrid-override-pattern: {_OTHERWISE}",
    ),
    (
        ("fp8_recipe",),
        lambda v: v.fp8_recipe == "rowwise",
        f"{_TE} does not support --fp8-recipe rowwise: use tensorwise, delayed or blockwise.",
    ),
    *(
        (
            (name,),
            lambda v, name=name, off=off: getattr(v, name) != off,
            f"{_TE} is not tested with {flag(name)}: {_OTHERWISE}",
        )
        for name, off in (
            ("moe_experts_dtype", ""),
            ("fp8_param_gather", False),
            ("cuda_graph_impl", "none"),
            ("deterministic_mode", False),
            ("cpu_offloading", False),
            ("peft", "none"),
        )
    ),
    (
        ("attention_backend", "attention_chunk_size"),
        lambda v: v.attention_backend == "auto" and v.attention_chunk_size,
        f"{_TE_ATTENTION} does not support --attention-chunk-size: {_NAME_ONE}",
    ),
    (
        ("attention_backend", "softmax_type"),
        lambda v: v.attention_backend == "auto" and v.softmax_type != "vanilla",
        f"{_TE_ATTENTION} does not support --softmax-type {{softmax_type}}: {_NAME_ONE}",
    ),
    (
        ("attention_backend", "position_embedding_type"),
        lambda v: v.attention_backend == "auto" and v.position_embedding_type == "alibi",
        f"{_TE_ATTENTION} does not support --position-embedding-type alibi: {_NAME_ONE}",
    ),
    (
        ("attention_backend", "context_parallel_size", "cp_comm_type"),
        lambda v: (
            v.attention_backend == "auto"
            and v.context_parallel_size > 1
            and v.cp_comm_type != "a2a"
        ),
        f"{_TE_ATTENTION} needs --cp-comm-type a2a over context ranks: use a2a, or {_NAME_ONE}",
    ),
)
"""Combinations that Transformer Engine does not support: options, condition, message."""


def _unless_ours(is_broken: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the condition, limited to runs with --transformer-impl transformer_engine."""
    return lambda v: v.transformer_impl == "transformer_engine" and is_broken(v)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig(Options):
    """Kernels that compute a model; all compute the same function."""

    transformer_impl: Literal["local", "transformer_engine"] = option(
        "local", selects_path="layers.{transformer_impl}"
    )
    """Library of linears, norms, experts and, with --attention-backend auto, attention: local
    (this package and torch), or transformer_engine (NVIDIA's, an extra; requires GPUs and
    --bf16 or --fp16). Weights and checkpoints are the same. Megatron's default:
    transformer_engine."""

    attention_backend: AttentionBackend = option(
        "auto", selects_path="attention.{attention_backend}"
    )
    """Kernels of attention: flash4 (flash-attn-4, an extra), fused (cuDNN), flash (flash-attn
    if installed, else torch's own), unfused (torch's unfused kernel), local (plain torch);
    auto: the fastest available kernel for the shapes."""

    batch_invariant_mode: bool = option(
        False, excludes={"attention_backend": ("flash4", "fused", "flash", "unfused", "local")}
    )
    """Sum in an order that does not depend on the batch, in forward, so that log probabilities
    equal those of an inference engine in this mode to the bit. Slower; for GPT models on one
    tensor and context rank. An option that the mode does not support is an error."""

    rules = (
        *(
            Rule(("transformer_impl", *fields), _unless_ours(is_broken), message, is_note=True)
            for fields, is_broken, message in _NOT_IN_TRANSFORMER_ENGINE
        ),
    )


def rotary_size(config: TransformerConfig) -> int:
    """Return the number of rotated channels of each head; if it is odd, one more is rotated."""
    if config.multi_latent_attention:
        return config.qk_pos_emb_head_dim
    if config.rope_type == "proportional":
        return head_dim(config)
    return int(head_dim(config) * config.rotary_percent)


def activation(config: TransformerConfig) -> str:
    """Return the name of the feed-forward activation, see ``mcore_moe.activations``.

    "xielu" is the module ``layers.xielu``, which has parameters; the others are functions.
    """
    if config.swiglu:
        return "silu"
    if config.geglu:
        return "gelu_tanh"
    if config.exact_geglu:
        return "gelu"
    if config.quick_geglu:
        return "quick_gelu"
    if config.squared_relu:
        return "squared_relu"
    if config.relu:
        return "relu"
    if config.xielu:
        return "xielu"
    return "gelu_tanh" if config.openai_gelu else "gelu"


def window(config: TransformerConfig, layer: int) -> int:
    """Return how many earlier tokens a query of this layer (from 0) attends to; -1: all."""
    return config.window_size[0] if is_local(config, layer) else -1


def chunk(config: TransformerConfig, layer: int) -> int:
    """Return the chunk length of this layer's attention, in tokens; 0: no chunks."""
    return config.attention_chunk_size if is_local(config, layer) else 0


def is_rotated(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer (counted from 0) rotates its queries and keys."""
    if config.position_embedding_type != "rope":
        return False
    return not layers_skip(config.rope_skip_freq, config.num_layers, "rope_skip_freq")[layer]


def has_plain_scores(config: TransformerConfig) -> bool:
    """Whether fused kernels can compute the attention scores: no caps, no sinks."""
    return not config.attn_logit_softcapping and config.softmax_type == "vanilla"


def yarn_magnitude(factor: float, scale: float) -> float:
    """Return YaRN's factor on attention for positions stretched by ``factor``.

    Reference:
        Peng et al. 2023, YaRN, arXiv:2309.00071, equation 22.
    """
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def sizes_of_pattern(pattern: str) -> dict[str, int]:
    """Return the fields that follow from a hybrid pattern; empty without a pattern."""
    layers = pattern_layers(pattern)
    if not layers:
        return {}
    sizes = {"num_layers": len(layers), "mtp_num_layers": pattern.count("/")}
    if not set(pattern) & set("*L"):
        # No layer has attention, but these fields are required and validated.
        sizes |= {"num_attention_heads": 1, "num_query_groups": 0}
    return sizes


def stages_of_pattern(pattern: str) -> dict[str, str]:
    """Return the pipeline layout that | in a hybrid pattern defines; empty without |."""
    stages = pattern.partition("/")[0].split("|")
    if len(stages) == 1:
        return {}
    layers = "|".join("t" * len(pattern_layers(stage)) for stage in stages)
    return {"pipeline_model_parallel_layout": f"E{layers}L"}


def divisors(number: int) -> list[int]:
    """Return all divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def config_to_dict(config: object) -> dict[str, Any]:
    """Convert a config to JSON and TOML types: tuples become lists."""
    table = {field.name: getattr(config, field.name) for field in fields(config)}  # pyrefly: ignore
    return {n: list(v) if isinstance(v, tuple) else v for n, v in table.items()}


def config_from_dict(config_type: type[Config], table: Mapping[str, Any]) -> Config:
    """Build a config from ``config_to_dict``'s result; missing fields get their defaults."""
    field_names = [field.name for field in fields(config_type)]  # pyrefly: ignore
    values = {}
    for name, value in table.items():
        if name not in field_names:
            near = difflib.get_close_matches(name, field_names, n=1, cutoff=0.5)
            hint = f": did you mean {near[0]}?" if near else "."
            raise ValueError(f"{config_type.__name__} has no field {name}{hint}")
        values[name] = tuple(value) if isinstance(value, list) else value
    return config_type(**values)
