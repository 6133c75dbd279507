"""What a decoder-only transformer is: plain frozen data, and what follows from it alone.

Field names are Megatron's flags with underscores; each field's docstring is its help text.
0 means "derive it" or "off": ``mcore_models.logical_tensors`` and the functions below derive
it, and no one writes a derived number back. The standard library only.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from mcore_base.field_checks import check_above_zero, check_at_least, check_field, flag
from mcore_models.layer_patterns import further_letters, pattern_layers, read_pattern
from mcore_models.logical_tensors import head_dim, is_gated

PositionEmbedding = Literal["rope", "learned_absolute", "alibi", "none"]
Normalization = Literal["RMSNorm", "LayerNorm"]
NormPlacement = Literal["pre", "output", "sandwich"]
ParallelResidual = Literal["off", "two_norms", "one_norm"]
AttentionBackend = Literal["auto", "flash4", "fused", "flash", "unfused", "local"]
Config = TypeVar("Config")

_MUP = {
    "mup_base_hidden_size": 0,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
    "mup_attn_scale_power": 1.0,
    "mup_base_head_dim": 0,
}
"""Defaults of what goes with --use-mup."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """Shape and numerics of the layers of a GPT."""

    # Sizes.

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the residual stream."""

    num_attention_heads: int
    """Query heads of a layer."""

    num_query_groups: int = 0
    """Key/value heads of a layer, each shared by several query heads; 0: as many as query
    heads."""

    kv_channels: int = 0
    """Width of one head; 0: --hidden-size / --num-attention-heads."""

    ffn_hidden_size: int = 0
    """Width inside the feed-forward layer; 0: 4 x --hidden-size, or for gated activations two
    thirds of that, rounded down to a multiple of 64 (at least 64)."""

    # Positions.

    max_position_embeddings: int = 0
    """Longest sequence the model takes, in tokens; 0: no limit. Learned positions need it.
    Megatron's default: none."""

    position_embedding_type: PositionEmbedding = "rope"
    """How positions enter: rotated queries and keys, a learned table, scores that fall with
    distance (alibi), or not at all. Megatron's default: learned_absolute."""

    rotary_base: float = 10000.0
    """Base of the rotary wavelengths."""

    rotary_base_local: float = 0.0
    """Base of the rotary wavelengths in windowed layers, unstretched; 0: as the others."""

    rotary_percent: float = 1.0
    """Share of each head's channels that is rotated, above 0 to 1."""

    rotary_interleaved: bool = False
    """Rotate neighbouring channels (2i, 2i+1) together instead of (i, i + half)."""

    rope_skip_freq: str = "0"
    """Layers without rotation: "N" for every N-th, or a list of 0 and 1 (without), one a
    layer; "0": none."""

    # Stretching of rotary wavelengths for longer contexts: linear, Llama 3.1's, YaRN, LongRoPE.

    rotary_seq_len_interpolation_factor: float = 1.0
    """Positions are divided by this before they are rotated by; 1: not at all."""

    use_rope_scaling: bool = False
    """Stretch long rotary wavelengths as LLaMA 3.1 does, for longer contexts."""

    rope_scaling_factor: float = 8.0
    """By how much the longest wavelengths are stretched."""

    rope_scaling_low_freq_factor: float = 1.0
    """Wavelengths above the original context divided by this are stretched fully."""

    rope_scaling_high_freq_factor: float = 4.0
    """Wavelengths below the original context divided by this stay."""

    rope_scaling_original_max_position_embeddings: int = 8192
    """Context, in tokens, that the model knew before it was stretched."""

    rope_type: Literal["rope", "yarn", "dynamic", "longrope"] = "rope"
    """How rotary wavelengths are stretched for longer contexts: not, as YaRN does, by a base
    that grows with the sequence (dynamic), or by a factor for each channel (longrope).
    Megatron's default: yarn with latent attention."""

    rotary_scaling_factor: float = 40.0
    """By how much --rope-type stretches the longest wavelengths. Megatron's default: 1.0."""

    original_max_position_embeddings: int = 4096
    """Context, in tokens, that the model knew before --rope-type stretched it."""

    beta_fast: float = 32.0
    """Channels that turn more often than this within the original context stay."""

    beta_slow: float = 1.0
    """Channels that turn less often than this are stretched fully."""

    mscale: float = 1.0
    """YaRN multiplies cosines and sines by m(this) / m(--mscale-all-dim), where m(x) is
    0.1 x ln(--rotary-scaling-factor) + 1."""

    mscale_all_dim: float = 0.0
    """In latent attention YaRN multiplies all scores by the square of m(this)."""

    yarn_correction_range_round_to_int: bool = True
    """YaRN's bounds between stretched and other channels are rounded to whole channels."""

    rope_attention_factor: float = 0.0
    """Factor on cosines and sines where --rope-type is yarn or longrope; 0: by its formula."""

    longrope_short_factor: tuple[float, ...] = ()
    """Factor on the wavelength of each pair of channels, in sequences up to
    --original-max-position-embeddings."""

    longrope_long_factor: tuple[float, ...] = ()
    """The same in longer sequences."""

    # Norms, and how a layer adds to the residual stream.

    normalization: Normalization = "RMSNorm"
    """Kind of the norms. Megatron's default: LayerNorm."""

    norm_epsilon: float = 1e-5
    """Added to the mean square inside a norm."""

    apply_layernorm_1p: bool = False
    """Store norm weights minus 1, so that they begin at zero."""

    norm_bias: bool = True
    """Give LayerNorms a bias; --no-norm-bias: a weight only."""

    norm_placement: NormPlacement = "pre"
    """Norms stand before each half of a layer (pre), on what it adds (output, OLMo-2), or
    both (sandwich, Gemma)."""

    embedding_layernorm: bool = False
    """Norm embeddings before the first layer."""

    parallel_residual: ParallelResidual = "off"
    """Attention and feed-forward layer read the same stream, through a norm each (two_norms,
    GPT-NeoX) or one (one_norm, Cohere), and are added together."""

    # Attention: projections, norms of queries and keys, scores.

    add_qkv_bias: bool = False
    """Biases of queries, keys and values even where other linears have none."""

    add_attention_bias: bool = False
    """Biases of queries, keys, values and attention's output even where other linears have
    none."""

    qk_layernorm: bool = False
    """Norm each head's queries and keys before they are rotated."""

    qk_norm_width: Literal["head", "own_head", "layer"] = "head"
    """With --qk-layernorm: norm each head alone, all with one gain; own_head: each with a gain
    of its own and no bias (Command R+); layer: all heads of a layer as one (OLMo-2)."""

    qk_l2_norm: bool = False
    """Divide rotated queries and keys by their root mean square, without weights (Llama 4)."""

    attention_output_gate: bool = False
    """Multiply attention's output, before its last projection, by a sigmoid of a projection
    of the same tokens (Qwen3-Next)."""

    softmax_scale: float = 0.0
    """Factor on attention scores; 0: 1 / sqrt(width of a head)."""

    attn_logit_softcapping: float = 0.0
    """Bound scores smoothly by c x tanh(score / c); 0: not at all."""

    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """Let each head put a learned share of its attention on nothing: a sink (gpt-oss)."""

    # Attention: windows, chunks, temperature.

    window_size: tuple[int, int] = (-1, 0)
    """Tokens that a query sees before and after its own; -1 before: all. The second is 0 in
    a causal model."""

    window_attn_skip_freq: str = "0"
    """Layers that see all earlier tokens though others have a window: "N" for every N-th, or
    a list of 0 (all) and 1 (window), one a layer; "0": none."""

    attention_chunk_size: int = 0
    """Windowed layers attend within chunks of so many tokens instead (Llama 4); 0: off."""

    attention_temperature_span: int = 0
    """In layers without rotation, multiply queries by 1 + --attention-temperature-scale x
    ln(1 + n), n being how many times this many tokens came before; 0: off."""

    attention_temperature_scale: float = 0.1
    """See --attention-temperature-span."""

    attention_temperature_layers: Literal["unrotated", "all"] = "unrotated"
    """Layers of --attention-temperature-span; in all layers the token itself is not counted,
    as Ministral 3 does."""

    # Latent attention.

    multi_latent_attention: bool = False
    """Compress keys and values of all heads to one latent vector a token. DeepSeek's models
    also have --qk-layernorm and --rotary-interleaved."""

    q_lora_rank: int = 0
    """Width of the latent vector of the queries; 0: they are not compressed."""

    kv_lora_rank: int = 512
    """Width of the latent vector of keys and values. Megatron's default: 32."""

    qk_head_dim: int = 128
    """Channels of a latent head's queries and keys that are not rotated."""

    qk_pos_emb_head_dim: int = 64
    """Channels of a latent head's queries that are rotated, and of the one rotated key that
    all heads share."""

    v_head_dim: int = 128
    """Channels of a latent head's values."""

    # Feed-forward layers.

    swiglu: bool = True
    """Feed-forward layers gated by SiLU; --no-swiglu: exact GELU without a gate, or what
    the next three, --geglu or --exact-geglu say. Megatron's default: off."""

    quick_geglu: bool = False
    """Feed-forward layers gated by x * sigmoid(1.702 x); needs --no-swiglu."""

    squared_relu: bool = False
    """Activation relu(x) squared, no gate; needs --no-swiglu."""

    openai_gelu: bool = False
    """GELU by tanh, as Megatron's fused one; no gate; needs --no-swiglu."""

    geglu: bool = False
    """Feed-forward layers gated by GELU by tanh; needs --no-swiglu."""

    exact_geglu: bool = False
    """Feed-forward layers gated by the exact GELU; needs --no-swiglu."""

    activation_func_clamp_value: float = 0.0
    """Clamp gates from above and up-projections on both sides before they meet; 0: off."""

    glu_linear_offset: float = 0.0
    """Added to up-projections before they meet their gate."""

    add_bias_linear: bool = False
    """Biases in all linears but head and router. Megatron's default: on."""

    # Embedding, output head, multipliers.

    untie_embeddings_and_output_weights: bool = False
    """Give the output head a weight of its own instead of the embedding's."""

    make_vocab_size_divisible_by: int = 128
    """Pad each tensor rank's share of the vocabulary to a multiple of this."""

    embedding_multiplier: float = 1.0
    """Factor on embeddings."""

    residual_multiplier: float = 1.0
    """Factor on what attention and feed-forward layers add to the residual stream."""

    logits_multiplier: float = 1.0
    """Factor on the scores of the vocabulary."""

    final_logit_softcapping: float = 0.0
    """Bound the scores of the vocabulary by c x tanh(score / c); 0: not at all."""

    # Dropout and initial weights.

    hidden_dropout: float = 0.0
    """Probability of dropping a channel before it joins the residual stream. Megatron's
    default: 0.1."""

    attention_dropout: float = 0.0
    """Probability of dropping an attention weight. Megatron's default: 0.1."""

    init_method_std: float = 0.02
    """Standard deviation of initial weights; those that write to the residual stream get it
    divided by sqrt(2 x --num-layers)."""

    embedding_init_method_std: float = 0.0
    """Standard deviation of initial embeddings; 0: --init-method-std."""

    # muP.

    use_mup: bool = False
    """Parametrize by muP: --lr, --adam-eps and --init-method-std are those of a model of
    --mup-base-hidden-size, and hold for every width."""

    mup_base_hidden_size: int = 0
    """Width at which muP changes nothing; required with --use-mup."""

    mup_embedding_mult: float = 1.0
    """Factor on embeddings with --use-mup, the same at every width."""

    mup_output_mult: float = 1.0
    """Factor on the scores of the vocabulary with --use-mup, beside the base width over the
    model's."""

    mup_attn_scale_power: float = 1.0
    """With --use-mup attention scores fall with the width of a head to this power."""

    mup_base_head_dim: int = 0
    """Width of a head at which attention scores are as without muP; 0: the model's own."""

    # Multi-token prediction.

    mtp_num_layers: int = 0
    """Layers behind the model, each predicting one token further than the one before; 0:
    none. They share embedding and output head."""

    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean loss of these layers beside the main loss."""

    # Hybrid stacks: which mixers the layers have, and the sizes of recurrent ones.

    hybrid_override_pattern: str = ""
    """One letter a layer instead of attention and feed-forward in each: M Mamba-2, G gated
    delta net, * attention, - feed-forward, E experts; letters in brackets are one layer of
    several, [G-]; | between pipeline stages, a layout of this run that its checkpoints do not
    keep; / before the letters of each layer of multi-token prediction, /*-. Empty: a
    transformer."""

    mamba_state_dim: int = 128
    """Numbers of state for each channel of a Mamba head."""

    mamba_head_dim: int = 64
    """Channels of a Mamba head."""

    mamba_num_heads: int = 0
    """Mamba heads of a layer; 0: 2 x --hidden-size / --mamba-head-dim."""

    mamba_num_groups: int = 8
    """Groups of Mamba heads that enter and read their state alike."""

    mamba_conv_kernel: int = 4
    """Tokens, its own among them, that the convolution of a Mamba layer mixes."""

    mamba_conv_bias: bool = True
    """Bias of that convolution."""

    mamba_proj_bias: bool = False
    """Biases of a Mamba layer's two linears."""

    mamba_norm: Literal["gated", "before_gate", "none"] = "gated"
    """Norm a Mamba layer's output after it is gated (gated), before, or not at all."""

    mamba_chunk_size: int = 128
    """Tokens that a Mamba layer computes together; changes time and memory, not results."""

    mamba_dt_limit: tuple[float, float] = (0.0, 0.0)
    """Smallest and largest step size of a Mamba head; 0 as the second: no limit."""

    mamba_dt_min: float = 0.001
    """Smallest step size that a Mamba head may begin with."""

    mamba_dt_max: float = 0.1
    """Largest step size that a Mamba head may begin with."""

    mamba_dt_init_floor: float = 1e-4
    """Step sizes below it are raised to it at the beginning."""

    linear_num_key_heads: int = 16
    """Key heads of a gated delta net."""

    linear_num_value_heads: int = 32
    """Value heads of a gated delta net; several share a key head."""

    linear_key_head_dim: int = 128
    """Channels of a gated delta net's queries and keys."""

    linear_value_head_dim: int = 128
    """Channels of a gated delta net's values."""

    linear_conv_kernel_dim: int = 4
    """Tokens, its own among them, that the convolution of a gated delta net mixes."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            check_field(self, name, getattr(self, name) >= 1, "1 or more")
        for name in (
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "max_position_embeddings",
            "embedding_init_method_std",
        ):
            check_field(self, name, getattr(self, name) >= 0, "0 or more")
        for name in ("init_method_std", "norm_epsilon", "rotary_base"):
            check_field(self, name, getattr(self, name) > 0, "above 0")
        for name in ("hidden_dropout", "attention_dropout"):
            check_field(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        check_at_least(self, 1, "make_vocab_size_divisible_by")
        self._check_attention()
        _check_latent(self)
        self._check_layers()
        self._check_hybrid()
        self._check_heads()
        self._check_positions()
        self._check_activation()

    def _check_attention(self) -> None:
        check_above_zero(
            self,
            *("rotary_scaling_factor", "original_max_position_embeddings", "beta_slow"),
            *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        )
        check_at_least(self, 0, "q_lora_rank", "mscale", "mscale_all_dim")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"--beta-fast {self.beta_fast} must be --beta-slow {self.beta_slow} or more."
            )

    def _check_layers(self) -> None:
        check_at_least(
            self,
            0,
            *("softmax_scale", "attn_logit_softcapping", "final_logit_softcapping"),
            *("attention_chunk_size", "attention_temperature_span", "rotary_base_local"),
            *("activation_func_clamp_value", "mtp_num_layers", "mtp_loss_scaling_factor"),
        )
        check_above_zero(
            self,
            *("embedding_multiplier", "residual_multiplier", "logits_multiplier"),
        )
        self._check_mup()
        if self.parallel_residual != "off" and self.norm_placement != "pre":
            raise ValueError(
                f"--parallel-residual {self.parallel_residual} has its norms before both "
                f"halves: leave out --norm-placement {self.norm_placement}."
            )
        if self.qk_norm_width == "layer" and self.normalization != "RMSNorm":
            raise ValueError("--qk-norm-width layer needs --normalization RMSNorm.")
        if not self.norm_bias and self.normalization != "LayerNorm":
            raise ValueError("--no-norm-bias has no effect without --normalization LayerNorm.")
        positions = self.position_embedding_type
        if self.attn_logit_softcapping and positions == "alibi":
            raise ValueError(
                "--attn-logit-softcapping and --position-embedding-type alibi exclude each "
                "other: whether distances are capped is not defined. Keep one."
            )
        if self.mtp_num_layers and positions == "learned_absolute":
            raise ValueError(
                "--mtp-num-layers does not work with --position-embedding-type "
                "learned_absolute, whose table is on the first stage: use rope or none."
            )
        if self.mtp_num_layers and self.embedding_layernorm:
            raise ValueError(
                "--embedding-layernorm stands where the model begins, and --mtp-num-layers "
                "embed where it ends: keep one."
            )
        self._check_windows()

    def _check_mup(self) -> None:
        if not self.use_mup:
            for name, default in _MUP.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{flag(name)} has no effect without --use-mup.")
            return
        if self.mup_base_hidden_size < 1:
            raise ValueError(
                f"--mup-base-hidden-size {self.mup_base_hidden_size} must be the width that "
                "the learning rate was found at, 1 or more."
            )
        check_at_least(self, 0, "mup_base_head_dim")
        check_above_zero(self, "mup_embedding_mult", "mup_output_mult", "mup_attn_scale_power")

    def _check_windows(self) -> None:
        before, after = self.window_size
        chunk = self.attention_chunk_size
        if before < -1 or after != 0:
            raise ValueError(
                f"--window-size {before} {after}: the first must be -1 (all) or more tokens, "
                "the second 0, since no token may see a later one."
            )
        if chunk and before >= 0:
            raise ValueError(
                f"--attention-chunk-size {chunk} and --window-size {before} {after} exclude "
                "each other: keep one."
            )
        for name in ("window_attn_skip_freq", "rope_skip_freq"):
            layers_skip(getattr(self, name), self.num_layers, name)
        for name in ("window_attn_skip_freq", "rotary_base_local"):
            if getattr(self, name) not in ("0", 0) and before == -1 and not chunk:
                raise ValueError(f"{flag(name)} has no effect without --window-size.")

    def _check_hybrid(self) -> None:
        layers = pattern_layers(self.hybrid_override_pattern)
        if layers and len(layers) != self.num_layers:
            raise ValueError(
                f"--hybrid-override-pattern {self.hybrid_override_pattern} has {len(layers)} "
                f"layers, --num-layers says {self.num_layers}: leave --num-layers out."
            )
        further = self.hybrid_override_pattern.count("/")
        if layers and further != self.mtp_num_layers:
            raise ValueError(
                f"--hybrid-override-pattern {self.hybrid_override_pattern} has {further} "
                "layers of multi-token prediction, each behind a /, --mtp-num-layers says "
                f"{self.mtp_num_layers}: leave --mtp-num-layers out."
            )
        letters = set("".join(layers) + further_letters(self.hybrid_override_pattern))
        if "M" in letters:
            _check_mamba(self)
        if "G" in letters:
            _check_delta(self)

    def _check_heads(self) -> None:
        heads, groups = self.num_attention_heads, self.num_query_groups
        has_own_width = self.kv_channels or self.multi_latent_attention
        if not has_own_width and self.hidden_size % heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} cannot be split over --num-attention-heads "
                f"{heads}: use a multiple of {heads}, such as "
                f"{-(-self.hidden_size // heads) * heads}, or set --kv-channels."
            )
        if groups and heads % groups:
            raise ValueError(
                f"--num-attention-heads {heads} cannot share --num-query-groups {groups}: "
                f"groups must divide heads. Use {_listed(divisors(heads))}."
            )

    def _check_positions(self) -> None:
        learned = self.position_embedding_type == "learned_absolute"
        if learned and not self.max_position_embeddings:
            raise ValueError(
                "--position-embedding-type learned_absolute needs --max-position-embeddings: "
                "the longest sequence in tokens."
            )
        if self.position_embedding_type != "rope":
            for name, off in (
                ("use_rope_scaling", False),
                ("rotary_interleaved", False),
                ("rope_type", "rope"),
            ):
                if getattr(self, name) != off:
                    raise ValueError(
                        f"{flag(name)} has no effect with --position-embedding-type "
                        f"{self.position_embedding_type}: leave it out, or use rope."
                    )
            return
        holds = 0 < self.rotary_percent <= 1
        check_field(self, "rotary_percent", holds, "above 0 and at most 1")
        factor = self.rotary_seq_len_interpolation_factor
        check_field(self, "rotary_seq_len_interpolation_factor", factor > 0, "above 0")
        if rotary_size(self) < 2 or rotary_size(self) % 2:
            raise ValueError(
                f"--rotary-percent {self.rotary_percent} of heads of {head_dim(self)} "
                f"channels rotates {rotary_size(self)}: that must be an even number, 2 or more."
            )
        if self.rope_type != "rope" and (self.use_rope_scaling or factor != 1):
            raise ValueError(
                f"--rope-type {self.rope_type} excludes --use-rope-scaling and "
                "--rotary-seq-len-interpolation-factor: each stretches positions. Keep one."
            )
        pairs = rotary_size(self) // 2
        for name in ("longrope_short_factor", "longrope_long_factor"):
            count, wanted = len(getattr(self, name)), pairs * (self.rope_type == "longrope")
            if count != wanted:
                raise ValueError(f"{flag(name)} has {count} factors: it must have {wanted}.")
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        if self.use_rope_scaling and not 0 < low <= high:
            raise ValueError(
                f"--rope-scaling-low-freq-factor {low} must be above 0 and at most "
                f"--rope-scaling-high-freq-factor {high}."
            )

    def _check_activation(self) -> None:
        gated = ("swiglu", "geglu", "exact_geglu", "quick_geglu")
        kinds = (*gated, "squared_relu", "openai_gelu")
        chosen = [flag(name) for name in kinds if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(
                f"{' and '.join(chosen)} exclude each other: keep one"
                + (" (--no-swiglu drops the default)." if self.swiglu else ".")
            )
        for name in ("activation_func_clamp_value", "glu_linear_offset"):
            if getattr(self, name) and not is_gated(self):
                raise ValueError(f"{flag(name)} has no effect without a gate: see --swiglu.")


RECOMPUTE_MODULES = (
    *("core_attn", "layernorm", "mla_up_proj", "mlp", "mlp_act", "moe", "moe_act"),
    "shared_experts",
)
"""What --recompute-modules may name; all but mlp_act are Megatron's words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfig:
    """What is computed again in backward instead of being kept."""

    recompute_granularity: Literal["", "full", "selective"] = ""
    """Recompute nothing, whole layers, or the parts that --recompute-modules names."""

    recompute_method: Literal["", "uniform", "block"] = ""
    """With full: every --recompute-num-layers layers together, or only the first
    --recompute-num-layers layers of each stage, one by one; empty: uniform."""

    recompute_num_layers: int = 1
    """Layers recomputed together (uniform), or layers of a stage that are (block)."""

    recompute_modules: tuple[str, ...] = ("core_attn",)
    """With selective: core_attn (attention without its projections), mla_up_proj (latent
    attention behind its latent vectors), mlp, moe, shared_experts; and, whose outputs are
    forgotten: layernorm, mlp_act and moe_act (activations)."""

    distribute_saved_activations: bool = False
    """With full: each tensor rank keeps a piece of what a recomputed layer begins from, and
    gathers the others' in backward."""

    def __post_init__(self) -> None:
        full = self.recompute_granularity == "full"
        check_at_least(self, 1, "recompute_num_layers")
        if not full and (self.recompute_method or self.recompute_num_layers != 1):
            raise ValueError(
                "--recompute-method and --recompute-num-layers have no effect without "
                "--recompute-granularity full."
            )
        known = RECOMPUTE_MODULES
        for module in self.recompute_modules:
            if module not in known:
                raise ValueError(
                    f"--recompute-modules {module} is not known: use {_listed(known)}."
                )
        if self.recompute_granularity != "selective" and self.recompute_modules != known[:1]:
            raise ValueError(
                "--recompute-modules has no effect without --recompute-granularity selective."
            )
        if self.distribute_saved_activations and not full:
            raise ValueError(
                "--distribute-saved-activations has no effect without --recompute-granularity "
                "full."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Which kernels compute a model; none of it changes what is computed."""

    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """What computes linears, norms, experts and, with --attention-backend auto, attention:
    local, this package and torch, or NVIDIA's Transformer Engine (an extra; GPUs, --bf16 or
    --fp16). Weights and checkpoints are the same. Megatron's default: transformer_engine."""

    attention_backend: AttentionBackend = "auto"
    """Kernels of attention: flash4 (flash-attn-4, an extra), fused (cuDNN), flash (flash-attn
    where it is installed, else torch's own), unfused (torch's unfused kernel), local (plain
    torch); auto: the fastest that is there and takes the shapes."""


def rotary_size(config: TransformerConfig) -> int:
    """Channels of each head that are rotated."""
    if config.multi_latent_attention:
        return config.qk_pos_emb_head_dim
    return int(head_dim(config) * config.rotary_percent)


def activation(config: TransformerConfig) -> str:
    """Name of the function in feed-forward layers, see ``mcore_moe.activations``."""
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
    return "gelu_tanh" if config.openai_gelu else "gelu"


def window(config: TransformerConfig, layer: int) -> int:
    """Earlier tokens that a query of this layer (counted from 0) sees; -1: all."""
    return config.window_size[0] if is_local(config, layer) else -1


def chunk(config: TransformerConfig, layer: int) -> int:
    """Tokens of the chunks within which this layer attends; 0: it is not cut."""
    return config.attention_chunk_size if is_local(config, layer) else 0


def is_local(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer (counted from 0) attends within a window or a chunk."""
    if config.window_size[0] < 0 and not config.attention_chunk_size:
        return False
    text = config.window_attn_skip_freq
    return not layers_skip(text, config.num_layers, "window_attn_skip_freq", ones=False)[layer]


def is_rotated(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer (counted from 0) rotates its queries and keys."""
    if config.position_embedding_type != "rope":
        return False
    return not layers_skip(config.rope_skip_freq, config.num_layers, "rope_skip_freq")[layer]


def has_plain_scores(config: TransformerConfig) -> bool:
    """Whether fused kernels compute the scores of attention: no caps, no sinks."""
    return not config.attn_logit_softcapping and config.softmax_type == "vanilla"


def yarn_magnitude(factor: float, scale: float) -> float:
    """How YaRN scales attention for positions stretched by ``factor``; 1 without stretching.

    Reference:
        Peng et al. 2023, YaRN, arXiv:2309.00071, equation 22.
    """
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def layers_skip(text: str, num_layers: int, name: str, ones: bool = True) -> tuple[bool, ...]:
    """Say for each layer whether it goes without something.

    Args:
        text: "N" for every N-th layer, "0" for none, or a list of 0 and 1, one a layer.
        num_layers: how many there are.
        name: of the field, for errors.
        ones: whether 1 in a list stands for the layers without it.
    """
    pattern = read_pattern(text, flag(name))
    if isinstance(pattern, int):
        if pattern < 0:
            raise ValueError(f"{flag(name)} {pattern} must be 0 or more.")
        return tuple(pattern > 0 and (i + 1) % pattern == 0 for i in range(num_layers))
    if len(pattern) != num_layers or not set(pattern) <= {0, 1}:
        raise ValueError(
            f"{flag(name)} {text} must hold one 0 or 1 for each of --num-layers {num_layers}; "
            f"it holds {len(pattern)} entries."
        )
    return tuple((entry == 1) == ones for entry in pattern)


def sizes_of_pattern(pattern: str) -> dict[str, int]:
    """Return the fields of a model that follow from its hybrid pattern, if it has one."""
    layers = pattern_layers(pattern)
    if not layers:
        return {}
    sizes = {"num_layers": len(layers), "mtp_num_layers": pattern.count("/")}
    if "*" not in pattern:
        # Without effect, and checked all the same.
        sizes |= {"num_attention_heads": 1, "num_query_groups": 0}
    return sizes


def stages_of_pattern(pattern: str) -> dict[str, str]:
    """Return the pipeline layout that the | of a hybrid pattern spell, if it has any."""
    stages = pattern.partition("/")[0].split("|")
    if len(stages) == 1:
        return {}
    layers = "|".join("t" * len(pattern_layers(stage)) for stage in stages)
    return {"pipeline_model_parallel_layout": f"E{layers}L"}


def divisors(number: int) -> list[int]:
    """Divide ``number`` evenly: all numbers that do, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def config_to_dict(config: object) -> dict[str, Any]:
    """Turn a config into what JSON and TOML hold: tuples become lists."""
    table = {field.name: getattr(config, field.name) for field in fields(config)}  # pyrefly: ignore
    return {n: list(v) if isinstance(v, tuple) else v for n, v in table.items()}


def config_from_dict(config_type: type[Config], table: Mapping[str, Any]) -> Config:
    """Build a config from what ``config_to_dict`` gave; missing fields keep their defaults."""
    known = {field.name: field.type for field in fields(config_type)}  # pyrefly: ignore
    values = {}
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f": did you mean {near[0]}?" if near else "."
            raise ValueError(f"{config_type.__name__} has no field {name}{hint}")
        values[name] = tuple(value) if isinstance(value, list) else value
    return config_type(**values)


def _check_latent(config: TransformerConfig) -> None:
    heads = config.num_attention_heads
    if not config.multi_latent_attention:
        return
    if config.qk_pos_emb_head_dim % 2:
        raise ValueError(
            f"--qk-pos-emb-head-dim {config.qk_pos_emb_head_dim} must be even: channels are "
            "rotated in pairs."
        )
    if config.position_embedding_type == "alibi":
        raise ValueError(
            "--position-embedding-type alibi is not known with --multi-latent-attention: use "
            "rope or none."
        )
    without_effect = {
        "kv_channels": 0,
        "rotary_percent": 1.0,
        "add_qkv_bias": False,
        "window_size": (-1, 0),
        "add_attention_bias": False,
        "qk_norm_width": "head",
        "qk_l2_norm": False,
        "attention_output_gate": False,
        "softmax_scale": 0.0,
        "attn_logit_softcapping": 0.0,
        "softmax_type": "vanilla",
        "attention_chunk_size": 0,
        "rope_skip_freq": "0",
        "rotary_base_local": 0.0,
        "attention_temperature_span": 0,
    }
    for name, value in without_effect.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{flag(name)} has no effect with --multi-latent-attention: leave it out."
            )
    if config.num_query_groups not in (0, heads):
        raise ValueError(
            f"--num-query-groups {config.num_query_groups}: with --multi-latent-attention "
            f"every head has keys of its own. Use 0 or --num-attention-heads, {heads}."
        )


def _check_mamba(config: TransformerConfig) -> None:
    check_at_least(
        config,
        1,
        *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_conv_kernel"),
        "mamba_chunk_size",
    )
    inner = 2 * config.hidden_size
    if not config.mamba_num_heads and inner % config.mamba_head_dim:
        raise ValueError(
            f"2 x --hidden-size {config.hidden_size} cannot be split into heads of "
            f"--mamba-head-dim {config.mamba_head_dim}: use a divisor of {inner}, or set "
            "--mamba-num-heads."
        )
    heads = config.mamba_num_heads or inner // config.mamba_head_dim
    if heads < 1 or heads % config.mamba_num_groups:
        raise ValueError(
            f"{heads} Mamba heads (--mamba-num-heads) cannot share --mamba-num-groups "
            f"{config.mamba_num_groups}: groups must divide heads."
        )
    low, high = config.mamba_dt_limit
    if low < 0 or (high and high <= low):
        raise ValueError(
            f"--mamba-dt-limit {low} {high}: the first must be 0 or more, the second above it, "
            "or 0 for no limit."
        )
    if not 0 < config.mamba_dt_min <= config.mamba_dt_max:
        raise ValueError(
            f"--mamba-dt-min {config.mamba_dt_min} must be above 0 and at most --mamba-dt-max "
            f"{config.mamba_dt_max}."
        )


def _check_delta(config: TransformerConfig) -> None:
    check_at_least(
        config,
        1,
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim"),
    )
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise ValueError(
            f"--linear-num-value-heads {values} cannot share --linear-num-key-heads {keys}: "
            f"use a multiple of {keys}."
        )


def _listed(values: Any) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
