"""Rows that a verification trains on, of the entries that each family reads.

A GPT's are ``trial.Rows``. The others are made from them: what is masked, padded and sampled
differs from row to row, and a stretch of rows of every step counts nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class BertRows:
    """Pairs with hidden tokens, padded at the end, of rows of plain text."""

    rows: Any
    """``trial.Rows``."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        row = self.rows[sample]
        S, text = self.rows.seq_length, row["tokens"]
        place = np.arange(S)
        num_real = S - 2 * (sample % 4)
        mask = row["loss_mask"] * (place < num_real) * (place % 3 == sample % 3)
        return {
            "text": text,
            "types": ((place > S // 3) & (place < num_real)).astype(np.int64),
            "labels": np.where(mask > 0, row["labels"], -1),
            "loss_mask": mask.astype(np.float32),
            "padding_mask": (place < num_real).astype(np.int64),
            "is_random": np.array(sample % 2, np.int64),
        }


@dataclass(frozen=True, slots=True)
class T5Rows:
    """A text for the encoder, padded at its end, and one for the decoder."""

    rows: Any
    """``trial.Rows``."""
    decoder_seq_length: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        row, D = self.rows[sample], self.decoder_seq_length
        place = np.arange(self.rows.seq_length)
        return {
            "text_enc": row["labels"],
            "text_dec": row["tokens"][:D],
            "labels": row["labels"][:D],
            "loss_mask": row["loss_mask"][:D],
            "enc_mask": (place < self.rows.seq_length - 2 * (sample % 4)).astype(np.int64),
        }
