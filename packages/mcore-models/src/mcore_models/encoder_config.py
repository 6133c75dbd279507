"""What models with an encoder are: BERT. Plain frozen data, the standard library only.

They have the fields of a GPT's layers, with the defaults of their own papers, and a few more.
"""

from dataclasses import dataclass

from mcore_models.config import Normalization, PositionEmbedding, TransformerConfig

BERT_HEADS = ("pooler", "lm", "binary")
"""What --bert-heads may name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig(TransformerConfig):
    """Shape and numerics of a BERT."""

    position_embedding_type: PositionEmbedding = "learned_absolute"
    """How tokens know their place: only learned_absolute, a learned table."""

    max_position_embeddings: int = 512
    """Longest sequence the model takes, in tokens."""

    normalization: Normalization = "LayerNorm"
    """Kind of the norms."""

    norm_epsilon: float = 1e-12
    """Added to the variance inside a norm."""

    swiglu: bool = False
    """Feed-forward layers gated by SiLU; off: exact GELU without a gate."""

    add_bias_linear: bool = True
    """Biases in all linears."""

    hidden_dropout: float = 0.1
    """Probability of dropping a channel before it joins the residual stream."""

    attention_dropout: float = 0.1
    """Probability of dropping an attention weight."""

    num_tokentypes: int = 2
    """Kinds of tokens that have an embedding of their own: the parts of a pair; 0: none."""

    post_layer_norm: bool = False
    """Norms after each half of a layer and on the embeddings, as BERT was published; off:
    before each half and after the last layer, as Megatron trains it."""

    bert_heads: tuple[str, ...] = BERT_HEADS
    """What is on top: pooler (of the first token), lm (hidden tokens), binary (order of the
    two parts, on the pooler). Training needs lm."""

    def __post_init__(self) -> None:
        """Check what a BERT alone decides.

        Raises:
            ValueError: with the flag and what it may be.
        """
        super(BertConfig, self).__post_init__()
        if self.position_embedding_type != "learned_absolute":
            raise ValueError(
                f"--position-embedding-type {self.position_embedding_type}: BERT has learned "
                "positions; leave it out."
            )
        if self.untie_embeddings_and_output_weights:
            raise ValueError(
                "--untie-embeddings-and-output-weights: BERT's head is its embedding; leave it "
                "out."
            )
        if self.num_tokentypes < 0:
            raise ValueError(f"--num-tokentypes {self.num_tokentypes} must be 0 or more.")
        if strange := set(self.bert_heads) - set(BERT_HEADS):
            raise ValueError(
                f"--bert-heads {min(strange)} is not known: use {', '.join(BERT_HEADS)}."
            )
        if "binary" in self.bert_heads and "pooler" not in self.bert_heads:
            raise ValueError(
                "--bert-heads binary reads the pooler: add pooler, or drop binary."
            )
