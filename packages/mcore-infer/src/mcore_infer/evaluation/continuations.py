"""Log probability of continuations, and whether greedy decoding would write them.

LAMBADA and multiple-choice tasks need both: the log probability of the last tokens of a row
given the earlier ones, and whether each of them is the likeliest.
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
"""Most rows of logits to compute at once."""


class Continuation(NamedTuple):
    """A row of tokens, the last of which are the continuation."""

    ids: Sequence[int]
    """Context and continuation; the first token is always context."""
    num_targets: int
    """Number of tokens of the continuation."""


class Judgement(NamedTuple):
    """A model's score of a continuation."""

    log_prob: float
    """Log probability of all its tokens, in nats."""
    is_greedy: bool
    """Whether each token is the likeliest at its position."""


def judge(
    model: LanguageModel, rows: Sequence[Continuation], *, batch: int = 8, axis: Axis = SINGLE
) -> list[Judgement]:
    """Score continuations, each in its context.

    Communicates over the model's ``tp``, and sums over ``axis`` at the end.

    Args:
        model: in eval mode.
        rows: at least one token of context and one target each.
        batch: rows in one forward pass.
        axis: data ranks that share the work; each gets all rows.

    Raises:
        ValueError: if the model is in training mode, or a row has no context or no target.
    """
    check_eval_mode(model)
    for row in rows:
        if not 1 <= row.num_targets < len(row.ids):
            raise ValueError(
                f"a row of {len(row.ids)} tokens cannot have {row.num_targets} targets: it "
                "needs at least one token of each, context and target."
            )
    device = next(model.parameters()).device
    scores = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
    # Longest first: little padding in a batch, and rows too large for memory fail at once.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    for first in range(0, len(rows), batch * axis.size):
        # All ranks run equally many forwards: experts communicate across them.
        begin = first + batch * axis.rank
        mine = order[begin : begin + batch]
        shape = (batch, len(rows[order[first]].ids) - 1)
        if mine:
            index = torch.tensor(mine, device=device)
            scores[index] = _judged(model, [rows[i] for i in mine], shape)
        else:
            _judged(model, [], shape)
    totals = all_reduce(scores, axis).tolist()
    return [Judgement(log_prob, is_greedy > 0) for log_prob, is_greedy in totals]


def _judged(
    model: LanguageModel, rows: Sequence[Continuation], shape: tuple[int, int]
) -> Tensor:
    """Return log probability and whether greedy, ``[rows, 2]``; short rows are padded."""
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
            logits = last_stage_logits(model, hidden[part[:, 1], part[:, 0]].unsqueeze(1))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            chosen = logits.log_softmax(-1).gather(1, part[:, 2:])[:, 0]
            log_probs.append(chosen.double())
            hits.append((logits.argmax(-1) == part[:, 2]).double())
        out = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
        out[:, 1] = 1
        owner = index[:, 0]
        if targets:
            out[:, 0].index_add_(0, owner, torch.cat(log_probs))
            out[:, 1].scatter_reduce_(0, owner, torch.cat(hits), "amin")
        return from_last_stage(out, model.pp)
