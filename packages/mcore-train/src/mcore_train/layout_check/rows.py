"""Synthetic rows that a verification trains on, with the entries that each family reads.

Every row is a function of its number. Masked, padded and sampled positions differ from row to
row, and some rows of every step have no valid token.
"""

from dataclasses import dataclass, field

import numpy as np

from mcore_train.resolution import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Sequences by number: random tokens, and masks that differ from row to row.

    A range of rows of every step has no valid token.
    """

    seq_length: int
    vocab_size: int
    global_batch_size: int
    num_steps: int
    masked: range = field(default_factory=lambda: range(0))
    """Positions in a step's batch whose rows have no valid token."""
    is_packed: bool = False
    """Whether rows hold several documents, without attention between them."""

    def __len__(self) -> int:
        return self.global_batch_size * self.num_steps

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        S = self.seq_length
        text = np.random.default_rng(sample).integers(0, self.vocab_size, S + 1)
        place = np.arange(S)
        mask = (place < S - 3 * (sample % 4)) & ((5 * place + sample) % 7 != 0)
        if sample % self.global_batch_size in self.masked:
            mask[:] = False
        borders = self.borders(sample)
        row = {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": mask.astype(np.float32),
            "position_ids": np.concatenate([np.arange(n) for n in np.diff(borders)]),
        }
        packed = {"cu_seqlens": np.array(borders, np.int32)}
        return row | packed if self.is_packed else row

    def borders(self, sample: int) -> list[int]:
        """Return five begins of documents in a row, padded with the row's end.

        Two borders lie inside the last chunk that a context rank holds.
        """
        S, begin = self.seq_length, 3 + 2 * (sample % 3)
        inner = sorted({b for b in (begin, begin + 2, S - 3, S - 2) if 0 < b < S})
        return [0, *inner] + [S] * (5 - len(inner))


@dataclass(frozen=True, slots=True)
class BertRows:
    """BERT rows made of ``Rows``: pairs with masked tokens, padded at the end."""

    rows: Rows

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
    """T5 rows made of ``Rows``: a padded text for the encoder, and one for the decoder."""

    rows: Rows
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


AnyRows = Rows | BertRows | T5Rows
"""Rows of any family."""


def build_rows(plan: Plan) -> AnyRows:
    """Return rows for every step of a plan, with a micro-batch without valid tokens in each."""
    batch, data = plan.config.batch, plan.config.data
    has_room = plan.global_batch_size > batch.micro_batch_size
    masked = range(batch.micro_batch_size, 2 * batch.micro_batch_size)
    rows = Rows(
        seq_length=batch.seq_length,
        vocab_size=plan.vocab_size,
        global_batch_size=plan.global_batch_size,
        num_steps=plan.train_iters,
        masked=masked if has_room else range(0),
        is_packed=data.reset_attention_mask or data.dataloader_inter_document_masking,
    )
    if plan.family.dataset == "bert":
        return BertRows(rows)
    if plan.family.dataset == "t5":
        return T5Rows(rows, getattr(batch, "decoder_seq_length"))  # noqa: B009
    return rows
