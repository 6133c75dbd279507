"""Sampling of the next token from its logits: temperature, cut-off, draw.

The order is Megatron's: temperature first, then top-k or top-p, then a draw from what is
left. The caller passes one random number a row, so that a row's text depends on its seed
alone: not on the device, nor on the other rows of its batch.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_infer.config import SamplingConfig


def sample(
    logits: Float[Tensor, "B V"], sampling: SamplingConfig, draws: Float[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Choose one token a row.

    Args:
        logits: scores without padding of the vocabulary.
        sampling: temperature and cut-off.
        draws: uniform in [0, 1), float64; not used with ``top_k=1``.

    Raises:
        ValueError: if ``top_k`` exceeds V.
    """
    if sampling.top_k == 1:
        return logits.argmax(-1)
    prob = filtered(logits, sampling).softmax(-1).double()
    total = prob.cumsum(-1)  # [B, V]
    last = total[:, -1:]
    # Below the total also after rounding, so that the token found has a probability.
    reached = torch.minimum(draws[:, None].to(last) * last, last.nextafter(-last))
    return torch.searchsorted(total, reached, right=True).squeeze(-1)


def filtered(logits: Float[Tensor, "B V"], sampling: SamplingConfig) -> Float[Tensor, "B V"]:
    """Divide by the temperature and set what is cut off to -inf, in float32 or better.

    Tokens that tie with the k-th all stay. Under top-p a token stays if the probability of
    those before it is not above ``top_p``; the likeliest always stays.

    Raises:
        ValueError: if ``top_k`` exceeds V.

    Reference:
        Holtzman et al. 2020, nucleus sampling. arXiv:1904.09751.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if sampling.top_k:
        if sampling.top_k > scores.shape[-1]:
            raise ValueError(
                f"--top-k {sampling.top_k} exceeds the vocabulary of {scores.shape[-1]} tokens."
            )
        smallest = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        return scores.masked_fill(scores < smallest, -torch.inf)
    if sampling.top_p:
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0
        left_out = torch.zeros_like(scores, dtype=torch.bool)
        left_out = left_out.scatter(-1, ids, before > sampling.top_p)
        return scores.masked_fill(left_out, -torch.inf)
    return scores


def log_probs_of(logits: Float[Tensor, "B V"], ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Log probability that the model gives to tokens, before temperature and cut-off."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return scores.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
