"""Chooses the next token from logits: penalties, temperature, cut-off, draw; log probabilities.

The order is Megatron's: temperature, top-k, top-p (Megatron does not combine top-k and top-p),
a draw from the remaining tokens. Each row has its own random generator, so that a text depends
on its seed, and not on the device or on the other rows of the batch.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_infer.config import SamplingConfig
from mcore_infer.engine.stages import agree_on_tokens, from_last_stage, last_stage_logits
from mcore_infer.engine.step_layout import on_device
from mcore_infer.writing.sequence import RunningSequence, TokenRules, Top
from mcore_infer.writing.structured import allowed_tokens
from mcore_models.kernels.batch_invariant import token_log_probs
from mcore_models.protocol import LanguageModel

_SCORED_ROWS = 256
"""Most rows of logits of a prompt to compute at once."""


def sample(
    logits: Float[Tensor, "B V"], sampling: SamplingConfig, draws: Float[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Choose one token for each row of logits, by inverse transform sampling.

    Args:
        logits: scores without padding of the vocabulary.
        sampling: temperature and cut-off.
        draws: uniform in [0, 1), float64; not used with ``top_k=1``.

    Raises:
        ValueError: if ``top_k`` exceeds V.
    """
    if sampling.top_k == 1:
        return logits.argmax(-1)
    prob = filter_logits(logits, sampling).softmax(-1).double()
    total = prob.cumsum(-1)  # [B, V]
    last = total[:, -1:]
    # Inverse transform: the first token whose cumulative probability exceeds draw * total. The
    # product must stay below the total after rounding, or the search ends at a token of
    # probability 0.
    threshold = torch.minimum(draws[:, None].to(last) * last, last.nextafter(-last))
    chosen = torch.searchsorted(total, threshold, right=True).squeeze(-1)
    return chosen.clamp(max=prob.shape[-1] - 1)  # if logits are NaN, searchsorted returns V


def filter_logits(
    logits: Float[Tensor, "B V"], sampling: SamplingConfig
) -> Float[Tensor, "B V"]:
    """Divide logits by the temperature and set cut-off tokens to -inf, in float32 or wider.

    Top-k comes first, then top-p, then min-p. Top-k keeps all tokens that tie with the k-th.
    Top-p keeps a token if the likelier tokens together have at most the probability ``top_p``;
    the likeliest token is always kept.

    Raises:
        ValueError: if ``top_k`` exceeds V.

    Reference:
        Holtzman et al. 2020, nucleus sampling. arXiv:1904.09751. Nguyen et al. 2024, min-p.
        arXiv:2407.01082.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Penalties near 0 make scores infinite, whose softmax is NaN.
    scores = scores.clamp(max=torch.finfo(scores.dtype).max)
    if sampling.temperature != 1:
        # Subtract the maximum first: divided by a temperature near 0 it would be infinite.
        temperature = max(sampling.temperature, torch.finfo(scores.dtype).tiny)
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    if sampling.top_k:
        if sampling.top_k > scores.shape[-1]:
            raise ValueError(
                f"--top-k {sampling.top_k} exceeds the vocabulary of {scores.shape[-1]} tokens."
            )
        smallest = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, -torch.inf)
    if sampling.top_p:  # of the probability of the tokens that top-k kept
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
        # Probability of all likelier tokens: the cumulative sum, shifted by one token.
        before = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0
        is_cut = torch.zeros_like(scores, dtype=torch.bool)
        is_cut = is_cut.scatter(-1, ids, before > sampling.top_p)  # back to vocabulary order
        scores = scores.masked_fill(is_cut, -torch.inf)
    if sampling.min_p:
        # p >= min_p * largest p, in logarithms; a token exactly at the bound is kept.
        lowest = scores.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    return scores


def choose(
    logits: Float[Tensor, "B V"],
    sequences: Sequence[RunningSequence],
    offsets: Sequence[int] | None = None,
) -> Int[Tensor, " B"]:
    """Choose the next token of each text: penalties, rules, structure, then ``sample``.

    Args:
        logits: scores without padding of the vocabulary.
        sequences: text of each row.
        offsets: number of proposed tokens before each row. Random numbers are then drawn ahead
            and not consumed, see ``RunningSequence.draw_ahead``. None: each row is the next
            token of its text, and its random number is consumed.

    Raises:
        ValueError: if a ``top_k`` exceeds V.
    """
    changed = [i for i, sequence in enumerate(sequences) if sequence.changes_scores]
    if changed:
        logits = logits.clone()
        for i in changed:
            text = sequences[i]
            logits[i] = apply_penalties(
                logits[i], text.prompt, text.ids, text.sampling, text.rules
            )
    matchers = {i: text.matcher for i, text in enumerate(sequences) if text.matcher is not None}
    if matchers:
        allowed = allowed_tokens(list(matchers.values()), logits.shape[-1], logits.device)
        logits = logits.clone()
        index = on_device(list(matchers), logits.device)
        logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
    # Greedy rows consume no random number; drawing one costs the host as much as a kernel
    # launch.
    if all(sequence.sampling.top_k == 1 for sequence in sequences):
        return logits.argmax(-1)
    if offsets is None:
        numbers = [0.0 if text.sampling.top_k == 1 else text.draw() for text in sequences]
    else:
        numbers = [
            0.0 if text.sampling.top_k == 1 else text.draw_ahead(offset)
            for text, offset in zip(sequences, offsets, strict=True)
        ]
    draws = on_device(numbers, logits.device, torch.float64)
    # Rows with equal temperature and cut-off are sampled together.
    rows_of: dict[SamplingConfig, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows_of.setdefault(sequence.cut, []).append(row)
    if len(rows_of) == 1:
        return sample(logits, next(iter(rows_of)), draws)
    chosen = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    for cut, rows in rows_of.items():
        index = on_device(rows, logits.device)
        chosen[index] = sample(logits[index], cut, draws[index])
    return chosen


def choose_on_all_ranks(
    logits: Float[Tensor, "R V"],
    sequences: Sequence[RunningSequence],
    offsets: Sequence[int] | None,
    model: LanguageModel,
) -> Int[Tensor, " R"]:
    """Choose tokens by ``choose``; all ranks of ``tp`` and ``pp`` return the same tokens."""
    return agree_on_tokens(choose(logits, sequences, offsets), model.tp, model.pp)


def apply_penalties(
    logits: Float[Tensor, " V"],
    prompt: Sequence[int],
    written: Sequence[int],
    sampling: SamplingConfig,
    rules: TokenRules,
) -> Float[Tensor, " V"]:
    """Return a copy of one row's logits after penalties and rules.

    Args:
        logits: logits of the model.
        prompt: token ids before the text.
        written: token ids of the text.
        sampling: penalties.
        rules: bias, forbidden successors and forbidden ends.

    Reference:
        Keskar et al. 2019, CTRL, section 4.1 (repetition). arXiv:1909.05858.
    """
    scores = logits.clone()
    if sampling.repetition_penalty != 1 and (seen := sorted({*prompt, *written})):
        ids = on_device(seen, logits.device)
        old, penalty = scores[ids], sampling.repetition_penalty
        # Dividing a negative logit would raise it, so that case multiplies.
        scores[ids] = torch.where(old > 0, old / penalty, old * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and written:
        counts = Counter(written)
        reductions = [
            sampling.presence_penalty + sampling.frequency_penalty * count
            for count in counts.values()
        ]
        ids = on_device(list(counts), logits.device)
        scores[ids] -= on_device(reductions, logits.device, scores.dtype)
    if rules.bias:
        tokens, values = zip(*rules.bias, strict=True)
        ids = on_device(tokens, logits.device)
        scores.index_add_(0, ids, on_device(values, logits.device, scores.dtype))
    if len(written) < rules.min_tokens:
        scores[on_device(rules.ends, logits.device)] = -torch.inf
    if rules.never_after and [*prompt, *written][-1] == rules.never_after[0]:
        scores[rules.never_after[1]] = -torch.inf
    return scores


def top_log_probs(logits: Float[Tensor, "B V"], num_top: int) -> Float[Tensor, "2 B k"]:
    """Return each row's likeliest tokens and their log probabilities, float64.

    Raises:
        ValueError: if ``num_top`` exceeds V.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    values, ids = scores.topk(num_top, dim=-1)
    return torch.stack([ids.double(), values.double()])


def top_tokens(top: Float[Tensor, "2 B k"]) -> list[Top]:
    """Copy the result of ``top_log_probs`` to the host, as ids and numbers of each row."""
    rows = zip(top[0].long().tolist(), top[1].tolist(), strict=True)
    return [tuple(zip(ids, values, strict=True)) for ids, values in rows]


def score_prompt(
    model: LanguageModel, sequence: RunningSequence, begin: int, hidden: Float[Tensor, "S 1 D"]
) -> None:
    """Score a chunk of a prompt: the log probability of the token after each chunk token.

    Writes the scores to ``sequence``. All-gathers the vocabulary over ``tp``, all-reduces over
    ``pp``. A chunk that is computed again after a preemption gets the same scores.

    Args:
        model: model of the engine.
        sequence: text with the prompt, and the number of likeliest tokens to record.
        begin: position of the chunk's first token.
        hidden: hidden states of the chunk's tokens.
    """
    prompt, num_top = sequence.prompt, sequence.request.scores.num_top
    end = min(begin + len(hidden), len(prompt) - 1)
    # A few rows at a time: all logits of a prompt would be [S, V] numbers.
    for first in range(begin, end, _SCORED_ROWS):
        last = min(first + _SCORED_ROWS, end)
        logits = last_stage_logits(model, hidden[first - begin : last - begin])
        following = on_device(prompt[first + 1 : last + 1], logits.device)
        log_probs = from_last_stage(token_log_probs(logits, following), model.pp)
        sequence.prompt_log_probs[first:last] = log_probs.tolist()
        if num_top:
            best = from_last_stage(top_log_probs(logits, num_top), model.pp)
            sequence.prompt_top[first:last] = top_tokens(best)
