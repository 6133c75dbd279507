"""A shorter look at a layout than ``case.train_case``: no checkpoint, two steps.

For what changes how a step is computed but nothing of what is saved. Rows may be packed, of
documents whose borders fall on, beside and inside the chunks of context ranks, or ragged:
micro-batches of different lengths.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from parity.case import EXPERTS, ROWS, SEQ_LENGTH, LayoutCase, build_plan

from mcore_parallel.mesh import ParallelContext
from mcore_train.layout_check.rows import Rows
from mcore_train.layout_check.trial import Trial, run_trial

NUM_BRIEF_STEPS = 2


@dataclass(frozen=True)
class Brief:
    """A layout, and the model and data that it trains."""

    world_size: int
    flags: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 2
    micro_batch_size: int = 4
    sparse: bool = False
    rows: str = "plain"
    """plain, packed or ragged."""


class PackedRows(Rows):
    """Rows of several documents each, as ``--dataloader-inter-document-masking`` gives."""

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        row = Rows.__getitem__(self, sample)
        inner = np.flatnonzero(np.random.default_rng(900 + sample).random(SEQ_LENGTH) < 0.25)
        borders = np.unique([0, *inner, SEQ_LENGTH])
        cu_seqlens = np.full(SEQ_LENGTH + 1, SEQ_LENGTH, np.int32)
        cu_seqlens[: len(borders)] = borders
        positions = [np.arange(n) for n in np.diff(borders)]
        return row | {"cu_seqlens": cu_seqlens, "position_ids": np.concatenate(positions)}


class RaggedRows(Rows):
    """Rows of 16, 12 or 8 tokens, four neighbours alike."""

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        length = SEQ_LENGTH - 4 * (sample // 4 % 3)
        return {
            name: values[:length] for name, values in Rows.__getitem__(self, sample).items()
        }


KINDS = {"plain": Rows, "packed": PackedRows, "ragged": RaggedRows}


def train_briefly(case: Brief) -> Trial:
    """Train two steps: the loss of the second shows the update of the first."""
    flags = {"num_layers": case.num_layers, **(EXPERTS if case.sparse else {}), **case.flags}
    if case.rows == "packed":
        flags = {**flags, "dataloader_inter_document_masking": True}
    plan = build_plan(LayoutCase(case.world_size, case.micro_batch_size, flags))
    ctx = ParallelContext.build(plan.config.parallelism, embedding_stages=plan.embedding_stages)
    rows = KINDS[case.rows](
        seq_length=ROWS.seq_length,
        vocab_size=ROWS.vocab_size,
        global_batch_size=ROWS.global_batch_size,
        num_steps=ROWS.num_steps,
        masked=ROWS.masked,
    )
    trial = run_trial(replace(plan, train_iters=NUM_BRIEF_STEPS), ctx, rows)
    ctx.destroy()
    return trial


def train_all(cases: list[Brief]) -> list[Trial] | None:
    """Train one case after the other; rank 0 alone returns."""
    found = [train_briefly(case) for case in cases]
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return found if is_first else None
