"""Logits of a step's rows, whatever layout computes them: as shards of whole tensors."""

from collections.abc import Sequence

import torch

from mcore_models.protocol import MicroBatch, TrainableModel
from mcore_parallel.context_parallel.zigzag import zigzag_positions
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_parallel.sharding import Piece, Shard
from mcore_train.assembly import Run
from mcore_train.evaluation import forward_pass


def logit_shards(run: Run, batches: Sequence[MicroBatch]) -> dict[str, Shard]:
    """Compute this rank's part of a step's logits: ``rows.<n>.logits``, each ``[S, V]``.

    All ranks call it together; those without the last stage hold none of it.
    """
    ctx, V = run.ctx, run.plan.vocab_size
    shards: dict[str, Shard] = {}

    def keep(model: TrainableModel, output: Payload, microbatch: int) -> None:
        logits = model.stage_logits(output)
        v = logits.shape[-1]
        begin, width = ctx.tp.rank * v, max(0, min(v, V - ctx.tp.rank * v))
        num_tokens, num_rows = logits.shape[:2]
        places = zigzag_positions(num_tokens * ctx.cp.size, ctx.cp).tolist()
        first_row = (microbatch * ctx.dp.size + ctx.dp.rank) * num_rows
        for row in range(num_rows):
            pieces, at = [], 0
            for start, length in _runs_of(places):
                part = logits[at : at + length, row, :width].clone()
                pieces.append(Piece((start, begin), (length, width), part))
                at += length
            shape = (num_tokens * ctx.cp.size, V)
            held = tuple(pieces) if width else ()
            shards[f"rows.{first_row + row}.logits"] = Shard(shape, run.dtype, held)

    for chunk in run.chunks:
        chunk.eval()
    with torch.no_grad():
        forward_pass(run, batches, keep)
    for chunk in run.chunks:
        chunk.train()
    return shards


def _runs_of(places: list[int]) -> list[tuple[int, int]]:
    """Cut places into runs of neighbours: first place and length of each."""
    runs: list[tuple[int, int]] = []
    for number in places:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
