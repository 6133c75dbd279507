"""Attention of decoding in plain torch: the requests of a step side by side, padded.

For what the kernels of decoding do not have. Every request's pages are gathered
up to the width of the tables, so it waits for nothing and can be recorded.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mcore_infer.engine.fp8_cache import from_codes
from mcore_infer.engine.step_plans import Scales

GATHERED_BYTES = 1 << 28
"""Of keys and values that are gathered at a time, or those of one request."""


def padded_decode(
    q: Float[Tensor, "R N H"],
    keys: Shaped[Tensor, "P Z G H"],
    values: Shaped[Tensor, "P Z G J"],
    tables: Int[Tensor, "R M"],
    lengths: Int[Tensor, " R"],
    *,
    window: int = -1,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Float[Tensor, " N"] | None = None,
    slopes: Float[Tensor, " N"] | None = None,
    scale: float | None = None,
    kv_scales: Scales | None = None,
) -> Float[Tensor, "R N J"]:
    """Let one query of each request attend to its keys, which are in the pages.

    See ``paged_decode`` for the arguments, and ``attend`` of mcore-models for ``slopes``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    token_bytes = q.element_size() * (keys[0, 0].numel() + values[0, 0].numel())
    at_once = max(1, GATHERED_BYTES // (tables.shape[1] * keys.shape[1] * token_bytes))
    mixed = []
    parts = zip(*(x.split(at_once) for x in (q, tables, lengths)), strict=True)
    for queries, pages, ends in parts:
        seen = [memory[pages].flatten(1, 2) for memory in (keys, values)]  # [R, M*Z, G, .]
        if kv_scales is not None:
            pairs = zip(seen, kv_scales, strict=True)
            seen = [from_codes(codes, own, q.dtype) for codes, own in pairs]
        places = torch.arange(seen[0].shape[1], device=q.device)
        is_seen = _seen_keys(places, ends[:, None] - 1, window, chunk)
        # What is behind the end may be another request's: none of it is mixed, were it NaN.
        k, v = seen[0], seen[1].masked_fill(~is_seen[..., None, None], 0)
        groups = queries.unflatten(1, (k.shape[2], -1))  # [R, N, H] -> [R, G, N/G, H]
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("rgnh,rzgh->rgnz", groups, k).to(wide).flatten(1, 2) * scale
        if slopes is not None:
            distances = places - ends[:, None, None] + 1
            scores = scores + slopes.to(wide)[:, None] * distances
        probs = _weights(scores, is_seen[:, None], softcap, sinks).to(q.dtype)
        groups = probs.unflatten(1, (k.shape[2], -1))
        mixed.append(torch.einsum("rgnz,rzgj->rgnj", groups, v).flatten(1, 2))
    return torch.cat(mixed)


def _seen_keys(
    places: Int[Tensor, " Z"], last: Int[Tensor, "R 1"], window: int, chunk: int
) -> Bool[Tensor, "R Z"]:
    """Say which keys the query at each request's last place sees."""
    seen = places <= last
    if chunk:
        seen = seen & (places // chunk == last // chunk)
    return seen if window < 0 else seen & (places >= last - window)


def _weights(
    scores: Float[Tensor, "R N Z"],
    is_seen: Bool[Tensor, "R 1 Z"],
    softcap: float,
    sinks: Float[Tensor, " N"] | None,
) -> Float[Tensor, "R N Z"]:
    """Return what each key weighs; a sink takes part in the sum and mixes nothing."""
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None].expand(len(scores), -1, 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : is_seen.shape[-1]]
