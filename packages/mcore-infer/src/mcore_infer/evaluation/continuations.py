"""Scores continuations: log probability, and whether greedy decoding writes them.

LAMBADA and multiple-choice tasks need both numbers for the last tokens of a row, given the
earlier tokens of the row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_infer.engine.stages import from_last_stage, last_stage_logits, run_stages
from mcore_infer.evaluation.scoring import check_eval_mode
from mcore_models.protocol import LanguageModel
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis

_MOST_TARGETS = 512
"""Most rows of logits to compute at once, because a row has one number per vocabulary entry."""


class Continuation(NamedTuple):
    """A row of tokens: context, then the continuation to score."""

    ids: Sequence[int]
    """Context and continuation; the first token is always context."""
    num_targets: int
    """Number of tokens of the continuation."""


class ContinuationScore(NamedTuple):
    """A model's score of a continuation."""

    log_prob: float
    """Sum of the log probabilities of the continuation's tokens, in nats."""
    is_greedy: bool
    """Whether each of these tokens is the likeliest at its position."""


def score_continuations(
    model: LanguageModel, rows: Sequence[Continuation], *, batch: int = 8, axis: Axis = SINGLE
) -> list[ContinuationScore]:
    """Score each continuation after its context.

    Communicates over the model's ``tp``, and sums over ``axis`` at the end.

    Args:
        model: in eval mode.
        rows: at least one token of context and one target each.
        batch: rows in one forward pass.
        axis: data ranks that share the work; each rank passes all rows.

    Raises:
        ValueError: if the model is in training mode, or a row has no context or no target.
    """
    check_eval_mode(model)
    for row in rows:
        if not 1 <= row.num_targets < len(row.ids):
            raise ValueError(
                f"a row of {len(row.ids)} tokens cannot have {row.num_targets} targets: it "
                "needs at least one token of context and one target."
            )
    device = next(model.parameters()).device
    scores = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
    # Longest first: batches have little padding, and rows too large for memory fail at once.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    for first in range(0, len(rows), batch * axis.size):
        # All ranks run the same number of forwards with equal shapes, because experts may
        # communicate over the data ranks.
        begin = first + batch * axis.rank
        local_rows = order[begin : begin + batch]
        shape = (batch, len(rows[order[first]].ids) - 1)
        if local_rows:
            index = torch.tensor(local_rows, device=device)
            scores[index] = _judged(model, [rows[i] for i in local_rows], shape)
        else:
            _judged(model, [], shape)
    totals = all_reduce(scores, axis).tolist()
    return [ContinuationScore(log_prob, is_greedy > 0) for log_prob, is_greedy in totals]


def _judged(
    model: LanguageModel, rows: Sequence[Continuation], shape: tuple[int, int]
) -> Tensor:
    """Score one batch; return log probability and 1.0 if greedy, ``[rows, 2]``.

    Rows are padded to ``shape``.
    """
    device = next(model.parameters()).device
    tokens = torch.zeros(shape, dtype=torch.int64)
    targets = []  # row, position and token of each target
    for number, row in enumerate(rows):
        length = len(row.ids) - 1
        tokens[number, :length] = torch.tensor(row.ids[:-1])
        targets += [
            (number, position, row.ids[position + 1])
            for position in range(length - row.num_targets, length)
        ]
    with torch.no_grad():
        hidden = run_stages(model, tokens.to(device))
        log_probs, hits = [], []
        index = torch.tensor(targets, dtype=torch.int64, device=device).view(-1, 3)
        for part in index.split(_MOST_TARGETS):
            # Compute logits of targets only: [S, B, D] -> [T, 1, D].
            logits = last_stage_logits(model, hidden[part[:, 1], part[:, 0]].unsqueeze(1))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            chosen = logits.log_softmax(-1).gather(1, part[:, 2:])[:, 0]
            log_probs.append(chosen.double())
            hits.append((logits.argmax(-1) == part[:, 2]).double())
        scores = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
        scores[:, 1] = 1
        row_of_target = index[:, 0]
        if targets:
            scores[:, 0].index_add_(0, row_of_target, torch.cat(log_probs))
            # A row is greedy if all its targets are: the minimum of their hits.
            scores[:, 1].scatter_reduce_(0, row_of_target, torch.cat(hits), "amin")
        return from_last_stage(scores, model.pp)
