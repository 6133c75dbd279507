"""What a decoder-only transformer is: plain frozen data, and what follows from it alone.

Field names are Megatron's flags with underscores; each field's docstring is its help text.
0 means "derive it" or "off": ``mcore_parallel.logical_tensors`` and the functions below derive
it, and no one writes a derived number back. The standard library only.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from mcore_base.field_checks import check_at_least, check_field, flag
from mcore_models.attention_config import check_latent
from mcore_models.layer_config import LayerConfig, layers_skip
from mcore_parallel.logical_tensors import head_dim, is_gated

PositionEmbedding = Literal["rope", "learned_absolute", "alibi", "none"]
Normalization = Literal["RMSNorm", "LayerNorm"]
AttentionBackend = Literal["auto", "flash4", "fused", "flash", "unfused", "local"]
Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(LayerConfig):
    """Shape and numerics of the layers of a GPT."""

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

    max_position_embeddings: int = 0
    """Longest sequence the model takes, in tokens; 0: no limit. Learned positions need it.
    Megatron's default: none."""

    position_embedding_type: PositionEmbedding = "rope"
    """How positions enter: rotated queries and keys, a learned table, scores that fall with
    distance (alibi), or not at all. Megatron's default: learned_absolute."""

    rotary_base: float = 10000.0
    """Base of the rotary wavelengths."""

    rotary_percent: float = 1.0
    """Share of each head's channels that is rotated, above 0 to 1."""

    rotary_interleaved: bool = False
    """Rotate neighbouring channels (2i, 2i+1) together instead of (i, i + half)."""

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

    normalization: Normalization = "RMSNorm"
    """Kind of the norms. Megatron's default: LayerNorm."""

    norm_epsilon: float = 1e-5
    """Added to the mean square inside a norm."""

    apply_layernorm_1p: bool = False
    """Store norm weights minus 1, so that they begin at zero."""

    qk_layernorm: bool = False
    """Norm each head's queries and keys before they are rotated."""

    swiglu: bool = True
    """Feed-forward layers gated by SiLU; --no-swiglu: exact GELU without a gate, or what
    the next three, --geglu or --exact-geglu say. Megatron's default: off."""

    quick_geglu: bool = False
    """Feed-forward layers gated by x * sigmoid(1.702 x); needs --no-swiglu."""

    squared_relu: bool = False
    """Activation relu(x) squared, no gate; needs --no-swiglu."""

    openai_gelu: bool = False
    """GELU by tanh, as Megatron's fused one; no gate; needs --no-swiglu."""

    add_bias_linear: bool = False
    """Biases in all linears but head and router. Megatron's default: on."""

    add_qkv_bias: bool = False
    """Biases of queries, keys and values even where other linears have none."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output head a weight of its own instead of the embedding's."""

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

    make_vocab_size_divisible_by: int = 128
    """Pad each tensor rank's share of the vocabulary to a multiple of this."""

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
        self.check_attention()
        check_latent(self)
        self.check_layers(self.num_layers)
        self.check_hybrid()
        self._check_heads()
        self._check_positions()
        self._check_activation()

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


def _listed(values: Any) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
