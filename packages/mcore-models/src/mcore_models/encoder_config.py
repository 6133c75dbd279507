"""Configuration of models with an encoder, BERT and T5. The standard library only.

Both configs have the fields of ``TransformerConfig``, some with other defaults, and their own.
"""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import Rule, flag, option
from mcore_models.config import Normalization, PositionEmbedding, TransformerConfig

BERT_HEADS = ("pooler", "lm", "binary")
"""Choices of --bert-heads."""


FeedForward = Literal[
    "gelu", "gelu_tanh", "relu", "silu", "gated-gelu", "gated-silu", "gated-relu"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig(TransformerConfig):
    """Shape and numerics of a BERT."""

    position_embedding_type: PositionEmbedding = "learned_absolute"
    """Encoding of positions: a learned table (learned_absolute), or rotated queries and keys
    (rope, ModernBERT)."""

    max_position_embeddings: int = 512
    """Longest sequence of the model, in tokens."""

    normalization: Normalization = "LayerNorm"
    """Kind of the norms."""

    norm_epsilon: float = 1e-12
    """Number added to the variance inside a norm."""

    swiglu: bool = False
    """Feed-forward layers gated by SiLU; off: exact GELU without a gate."""

    add_bias_linear: bool = True
    """Biases in all linears."""

    hidden_dropout: float = 0.1
    """Probability of dropping a channel before it joins the residual stream."""

    attention_dropout: float = 0.1
    """Probability of dropping an attention weight."""

    num_tokentypes: int = option(2, minimum=0)
    """Number of token type embeddings, one for each segment; 1: all tokens share one (RoBERTa);
    0: none."""

    post_layer_norm: bool = False
    """Norms after attention, after the MLP and on the embeddings, as in published BERT; off:
    norms before attention and MLP and after the last layer, as in Megatron."""

    bert_heads: tuple[str, ...] = BERT_HEADS
    """Heads: pooler (on the first token), lm (masked tokens), binary (order of the two
    segments, on the pooler). Training requires lm."""

    rules = (
        Rule(
            ("position_embedding_type",),
            lambda v: v.position_embedding_type not in ("learned_absolute", "rope"),
            "--position-embedding-type {position_embedding_type}: BERT supports "
            "learned_absolute and rope only.",
        ),
        Rule(
            ("post_layer_norm", "embedding_layernorm"),
            lambda v: v.post_layer_norm and v.embedding_layernorm,
            "--post-layer-norm norms embeddings already: leave --embedding-layernorm out.",
        ),
        Rule(
            ("untie_embeddings_and_output_weights",),
            lambda v: v.untie_embeddings_and_output_weights,
            "--untie-embeddings-and-output-weights: BERT's head uses the embedding's weight; "
            "leave it out.",
        ),
        Rule(
            ("bert_heads",),
            lambda v: not set(v.bert_heads) <= set(BERT_HEADS),
            f"--bert-heads {{bert_heads}}: use only {', '.join(BERT_HEADS)}.",
        ),
        Rule(
            ("bert_heads",),
            lambda v: "binary" in v.bert_heads and "pooler" not in v.bert_heads,
            "--bert-heads binary reads the pooler: add pooler, or drop binary.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class T5Config(TransformerConfig):
    """Shape and numerics of a T5; defaults are Megatron's."""

    num_layers: int = 12
    """Layers of the encoder and of the decoder, unless --encoder-num-layers or
    --decoder-num-layers is set."""

    encoder_num_layers: int = option(0, minimum=0)
    """Layers of the encoder; 0: --num-layers."""

    decoder_num_layers: int = option(0, minimum=0)
    """Layers of the decoder; 0: --num-layers."""

    position_embedding_type: Literal["learned_absolute", "relative"] = "learned_absolute"  # pyrefly: ignore
    """Encoding of positions: a learned table, or a bias on attention scores for each distance
    and head, as T5 was published."""

    relative_attention_num_buckets: int = 32
    """With relative positions: number of ranges of distances, each with a bias."""

    relative_attention_max_distance: int = 128
    """With relative positions: all distances from this one on share a bias."""

    max_position_embeddings: int = 512
    """Longest sequence of encoder or decoder, in tokens; 0: no limit."""

    normalization: Normalization = "LayerNorm"
    """Kind of the norms; RMSNorm as published."""

    swiglu: bool = False
    """Not supported by T5: use --feed-forward-proj."""

    feed_forward_proj: FeedForward = "gelu"
    """Activation of feed-forward layers: exact GELU, tanh approximation of GELU, ReLU (T5),
    SiLU, or gated by the tanh approximation of GELU (T5 1.1), SiLU or ReLU."""

    add_bias_linear: bool = True
    """Biases in all linears except the head; off as published."""

    add_output_bias: bool = True
    """A bias for each token of the vocabulary in a tied head; off as published."""

    scale_attention_scores: bool = True
    """Divide attention scores by the square root of the head's width; off as published."""

    scale_decoder_outputs: bool = False
    """Divide the input of a tied head by the square root of --hidden-size; on as published."""

    hidden_dropout: float = 0.1
    """Probability of dropping a channel before it joins the residual stream."""

    attention_dropout: float = 0.1
    """Probability of dropping an attention weight."""

    rules = (
        *(
            Rule(
                (name,),
                lambda v, name=name: getattr(v, name),
                f"{flag(name)}: --feed-forward-proj sets the activation of a T5; leave it out.",
            )
            for name in (
                *("swiglu", "geglu", "exact_geglu", "quick_geglu", "squared_relu"),
                *("openai_gelu", "relu", "xielu"),
            )
        ),
        Rule(
            ("relative_attention_num_buckets", "relative_attention_max_distance"),
            lambda v: (
                v.relative_attention_num_buckets < 4
                or v.relative_attention_num_buckets % 4
                or v.relative_attention_max_distance <= v.relative_attention_num_buckets // 2
            ),
            "--relative-attention-num-buckets {relative_attention_num_buckets} must be a "
            "multiple of 4, and --relative-attention-max-distance "
            "{relative_attention_max_distance} more than half of it.",
        ),
    )

    @property
    def depth(self) -> int:
        """Layers of encoder and decoder."""
        return num_stack_layers(self)


def encoder_layers(config: T5Config) -> int:
    """Return the number of layers of the encoder."""
    return config.encoder_num_layers or config.num_layers


def decoder_layers(config: T5Config) -> int:
    """Return the number of layers of the decoder."""
    return config.decoder_num_layers or config.num_layers


def num_stack_layers(config: T5Config) -> int:
    """Return the number of layers that pipeline stages share: encoder and decoder."""
    return encoder_layers(config) + decoder_layers(config)


def feed_forward(config: T5Config) -> tuple[bool, str]:
    """Return whether feed-forward layers are gated, and the name of their activation."""
    kind = config.feed_forward_proj
    if kind.startswith("gated-"):
        return True, {"gated-gelu": "gelu_tanh"}.get(kind, kind.removeprefix("gated-"))
    return False, kind
