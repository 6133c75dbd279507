"""Options of a run of a T5 beside those of every run. The standard library only."""

from dataclasses import dataclass

from mcore_train.config import BatchConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class T5BatchConfig(BatchConfig):
    """The batches of a T5, whose rows have two texts."""

    decoder_seq_length: int = 128
    """Tokens of the decoder in one sequence; --seq-length are the encoder's.
    Megatron's default: none."""

    def __post_init__(self) -> None:
        super(T5BatchConfig, self).__post_init__()
        if self.decoder_seq_length < 1:
            raise ValueError(
                f"--decoder-seq-length {self.decoder_seq_length} must be 1 or more."
            )
