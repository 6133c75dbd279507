"""Options in which decoder families differ: where norms stand, how scores are made, factors.

``LayerConfig`` is a base of ``TransformerConfig`` and never used alone. The standard library
only.
"""

from dataclasses import dataclass
from typing import Literal

from mcore_base.field_checks import check_above_zero, check_at_least, flag
from mcore_models.attention_config import AttentionConfig
from mcore_parallel.layer_patterns import read_pattern

NormPlacement = Literal["pre", "output", "sandwich"]
ParallelResidual = Literal["off", "two_norms", "one_norm"]


_MUP = {
    "mup_base_hidden_size": 0,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
    "mup_attn_scale_power": 1.0,
    "mup_base_head_dim": 0,
}
"""Defaults of what goes with --use-mup."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig(AttentionConfig):
    """What sets the layers of one decoder family apart from another's."""

    norm_placement: NormPlacement = "pre"
    """Norms stand before each half of a layer (pre), on what it adds (output, OLMo-2), or
    both (sandwich, Gemma)."""

    embedding_layernorm: bool = False
    """Norm embeddings before the first layer."""

    norm_bias: bool = True
    """Give LayerNorms a bias; --no-norm-bias: a weight only."""

    parallel_residual: ParallelResidual = "off"
    """Attention and feed-forward layer read the same stream, through a norm each (two_norms,
    GPT-NeoX) or one (one_norm, Cohere), and are added together."""

    add_attention_bias: bool = False
    """Biases of queries, keys, values and attention's output even where other linears have
    none."""

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

    window_size: tuple[int, int] = (-1, 0)
    """Tokens that a query sees before and after its own; -1 before: all. The second is 0 in
    a causal model."""

    window_attn_skip_freq: str = "0"
    """Layers that see all earlier tokens though others have a window: "N" for every N-th, or
    a list of 0 (all) and 1 (window), one a layer; "0": none."""

    attention_chunk_size: int = 0
    """Windowed layers attend within chunks of so many tokens instead (Llama 4); 0: off."""

    yarn_correction_range_round_to_int: bool = True
    """YaRN's bounds between stretched and other channels are rounded to whole channels."""

    rope_attention_factor: float = 0.0
    """Factor on cosines and sines where --rope-type is yarn or longrope; 0: by its formula."""

    longrope_short_factor: tuple[float, ...] = ()
    """Factor on the wavelength of each pair of channels, in sequences up to
    --original-max-position-embeddings."""

    longrope_long_factor: tuple[float, ...] = ()
    """The same in longer sequences."""

    rope_skip_freq: str = "0"
    """Layers without rotation: "N" for every N-th, or a list of 0 and 1 (without), one a
    layer; "0": none."""

    rotary_base_local: float = 0.0
    """Base of the rotary wavelengths in windowed layers, unstretched; 0: as the others."""

    attention_temperature_span: int = 0
    """In layers without rotation, multiply queries by 1 + --attention-temperature-scale x
    ln(1 + n), n being how many times this many tokens came before; 0: off."""

    attention_temperature_scale: float = 0.1
    """See --attention-temperature-span."""

    attention_temperature_layers: Literal["unrotated", "all"] = "unrotated"
    """Layers of --attention-temperature-span; in all layers the token itself is not counted,
    as Ministral 3 does."""

    geglu: bool = False
    """Feed-forward layers gated by GELU by tanh; needs --no-swiglu."""

    exact_geglu: bool = False
    """Feed-forward layers gated by the exact GELU; needs --no-swiglu."""

    activation_func_clamp_value: float = 0.0
    """Clamp gates from above and up-projections on both sides before they meet; 0: off."""

    glu_linear_offset: float = 0.0
    """Added to up-projections before they meet their gate."""

    embedding_multiplier: float = 1.0
    """Factor on embeddings."""

    residual_multiplier: float = 1.0
    """Factor on what attention and feed-forward layers add to the residual stream."""

    logits_multiplier: float = 1.0
    """Factor on the scores of the vocabulary."""

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

    final_logit_softcapping: float = 0.0
    """Bound the scores of the vocabulary by c x tanh(score / c); 0: not at all."""

    mtp_num_layers: int = 0
    """Layers behind the model, each predicting one token further than the one before; 0:
    none. They share embedding and output head."""

    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean loss of these layers beside the main loss."""

    def check_layers(self, num_layers: int) -> None:
        """Check the fields above, for ``TransformerConfig``."""
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
        normalization = getattr(self, "normalization")  # noqa: B009 - a field of the heir
        if self.qk_norm_width == "layer" and normalization != "RMSNorm":
            raise ValueError("--qk-norm-width layer needs --normalization RMSNorm.")
        if not self.norm_bias and normalization != "LayerNorm":
            raise ValueError("--no-norm-bias has no effect without --normalization LayerNorm.")
        positions = getattr(self, "position_embedding_type")  # noqa: B009 - likewise
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
        self._check_windows(num_layers)

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

    def _check_windows(self, num_layers: int) -> None:
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
            layers_skip(getattr(self, name), num_layers, name)
        for name in ("window_attn_skip_freq", "rotary_base_local"):
            if getattr(self, name) not in ("0", 0) and before == -1 and not chunk:
                raise ValueError(f"{flag(name)} has no effect without --window-size.")


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
