"""Options of a run of a T5 beside those of every run. The standard library only."""

from dataclasses import dataclass
from typing import Any

from mcore_base.options import Rule, option
from mcore_train.config import BatchConfig


def _uneven_cuts(values: Any) -> str:
    """Return why ranks cannot cut the decoder's sequences; empty: they can."""
    length, cp = values.decoder_seq_length, values.context_parallel_size
    cuts = cp * (2 if cp > 1 else 1)
    cuts *= values.tensor_model_parallel_size if values.sequence_parallel else 1
    if length % cuts == 0:
        return ""
    return (
        f"--decoder-seq-length {length} cannot be cut by context and tensor ranks: use a "
        f"multiple of {cuts}, such as {-(-length // cuts) * cuts}."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class T5BatchConfig(BatchConfig):
    """The batches of a T5, whose rows have two texts."""

    decoder_seq_length: int = option(128, minimum=1)
    """Tokens of the decoder in one sequence; --seq-length are the encoder's.
    Megatron's default: none."""

    rules = (
        Rule(
            ("decoder_seq_length", "context_parallel_size", "sequence_parallel"),
            _uneven_cuts,
        ),
        Rule(
            ("decoder_seq_length", "max_position_embeddings"),
            lambda v: 0 < v.max_position_embeddings < v.decoder_seq_length,
            "--decoder-seq-length {decoder_seq_length} is longer than "
            "--max-position-embeddings {max_position_embeddings}: use as many or fewer.",
        ),
    )
