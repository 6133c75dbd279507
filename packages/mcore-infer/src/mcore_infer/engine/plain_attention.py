"""Attention of decoding in plain torch: on a CPU, and for models that no kernel supports.

``padded_decode`` gathers the pages of every request up to the width of the tables, so it never
waits for the device and can be recorded as a CUDA graph. ``decode_on_cpu`` reads lengths on the
host and avoids copies. ``reference_decode`` is the reference of all decoding kernels.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mcore_infer.engine.fp8_cache import from_codes, to_codes
from mcore_infer.engine.limits import Scales
from mcore_infer.engine.step_layout import DecodeTensors
from mcore_models.kernels.attention_backends import attend
from mcore_models.kernels.selected_attention import Selection, attend_packed

GATHERED_BYTES = 1 << 28
"""Most bytes of keys and values to gather at once; one request is always gathered whole."""


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
    selection: Selection | None = None,
) -> Float[Tensor, "R N J"]:
    """Attend with one query of each request to the keys in its pages.

    See ``paged_decode`` for the arguments, and ``attend`` of mcore-models for ``slopes``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    token_bytes = q.element_size() * (keys[0, 0].numel() + values[0, 0].numel())
    # Requests whose gathered pages, up to the width of the tables, fit into GATHERED_BYTES.
    at_once = max(1, GATHERED_BYTES // (tables.shape[1] * keys.shape[1] * token_bytes))
    mixed = []
    parts = zip(*(x.split(at_once) for x in (q, tables, lengths)), strict=True)
    for queries, pages, ends in parts:
        seen = [memory[pages].flatten(1, 2) for memory in (keys, values)]  # [R, M*Z, G, .]
        if kv_scales is not None:
            pairs = zip(seen, kv_scales, strict=True)
            seen = [from_codes(codes, scale_of, q.dtype) for codes, scale_of in pairs]
        places = torch.arange(seen[0].shape[1], device=q.device)
        is_seen = _seen_keys(places, ends[:, None] - 1, window, chunk)
        # Rows after a text's end may have NaN of another request, which weights of 0 do not
        # remove from the sum.
        k, v = seen[0], seen[1].masked_fill(~is_seen[..., None, None], 0)
        if selection is not None:
            k = k.masked_fill(~is_seen[..., None, None], 0)
            packed = queries[None], k.transpose(0, 1), v.transpose(0, 1)  # [Z, R, 1, .]
            mixed.append(attend_packed(*packed, selection, is_seen[:, None])[0])
            continue
        groups = queries.unflatten(1, (k.shape[2], -1))  # [R, N, H] -> [R, G, N/G, H]
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("rgnh,rzgh->rgnz", groups, k).to(wide).flatten(1, 2) * scale
        if slopes is not None:
            distances = places - ends[:, None, None] + 1  # 0 at the query, negative before it
            scores = scores + slopes.to(wide)[:, None] * distances
        probs = _weights(scores, is_seen[:, None], softcap, sinks).to(q.dtype)
        groups = probs.unflatten(1, (k.shape[2], -1))
        mixed.append(torch.einsum("rgnz,rzgj->rgnj", groups, v).flatten(1, 2))
    return torch.cat(mixed)


def _seen_keys(
    places: Int[Tensor, " Z"], last: Int[Tensor, "R 1"], window: int, chunk: int
) -> Bool[Tensor, "R Z"]:
    """Return a mask of the keys to which the last token of each request attends."""
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
    """Return the softmax over keys; a sink adds to the sum and has no value."""
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None].expand(len(scores), -1, 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : is_seen.shape[-1]]


def write_to_pages(
    memories: Sequence[Shaped[Tensor, "P Z G _"]],
    news: Sequence[Shaped[Tensor, "T G _"]],
    places: Int[Tensor, " T"],
    kv_scales: Scales | None = None,
) -> None:
    """Write new keys and values to rows ``page * page_tokens + offset`` of the cache."""
    scales = kv_scales or (None,) * len(news)
    for memory, new, scale in zip(memories, news, scales, strict=True):
        rows, stored = memory.flatten(0, 1), new if scale is None else to_codes(new, scale)
        if _is_in_words(rows) and _is_in_words(stored):
            # The kernel of index_put moves an element a thread: as words of 16 bytes.
            rows, stored = rows.view(torch.complex128), stored.view(torch.complex128)
        rows[places] = stored


def _is_in_words(x: Shaped[Tensor, "T G _"]) -> bool:
    """Whether a tensor on a GPU consists of aligned words of 16 bytes."""
    counts = x.storage_offset(), *x.stride()[:-1], x.shape[-1]
    is_aligned = not any(count * x.element_size() % 16 for count in counts)
    return x.is_cuda and is_aligned and x.stride(-1) == 1


def wide_pages(
    memories: Sequence[Shaped[Tensor, "..."]], kv_scales: Scales | None, dtype: torch.dtype
) -> list[Float[Tensor, "..."]]:
    """Return keys and values in the dtype of the queries, decoded from fp8 if necessary."""
    if kv_scales is None:
        return list(memories)
    pairs = zip(memories, kv_scales, strict=True)
    return [from_codes(memory, scale, dtype) for memory, scale in pairs]


def decode_on_cpu(
    q: Float[Tensor, "R N H"],
    new: tuple[Float[Tensor, "R G H"], Float[Tensor, "R G J"] | None],
    memory: tuple[Shaped[Tensor, "P Z G H"], Shaped[Tensor, "P Z G J"]],
    step: DecodeTensors,
    *,
    window: int = -1,
    kv_scales: Scales | None = None,
    **scores: Any,
) -> Float[Tensor, "R N J"]:
    """Write a new key and value of each request, and attend with its one query.

    One call of attention computes all rows, unless their lengths differ too much.

    Args:
        q: queries; R requests.
        new: new key and value of each request; no value if the value is a part of the key.
        memory: keys and values in pages; changed in place.
        step: pages and lengths.
        window: earlier keys that a query attends to; -1: all.
        kv_scales: scales of an fp8 cache; None: the cache has the dtype of ``q``.
        scores: options of ``attend``.
    """
    extent, size = step.extent, memory[0].shape[1]
    # Cheapest first: a view of all rows; one gather with or without a mask; request by request.
    # Keys before ``begin`` are outside every window, and their pages may belong to another
    # request.
    begin = 0 if window < 0 else max(0, extent.longest - 1 - window) // size * size
    if extent.is_even and extent.is_in_a_row and kv_scales is None:
        # Views of all tokens of each row; the last is that of the new key and of the query.
        seen = [extent.view(pages) for pages in memory]  # [K, R, G, .]
        for view, last in zip(seen, new, strict=True):
            if last is not None:
                view[-1] = last
        if begin:
            seen = [view[begin:] for view in seen]
        return attend(q[None], *seen, window=window, **scores)[0]
    written = [x for x in new if x is not None]
    write_to_pages(memory[: len(written)], written, step.places, kv_scales)
    where = *memory, step.seen_tables, step.lengths
    options: dict[str, Any] = {"window": window, "kv_scales": kv_scales, **scores}
    token_bytes = sum(pages.stride(1) * pages.element_size() for pages in memory)
    too_long = len(q) * extent.longest * token_bytes > GATHERED_BYTES
    if extent.is_mostly_padding or too_long or "selection" in scores:
        return reference_decode(q, *where, **options)
    is_plain = window < 0 and not scores.keys() - {"scale"}
    if not extent.is_even and not is_plain:
        return padded_decode(q, *where, **options)
    gathered = [extent.gather(pages)[begin:] for pages in memory]
    k, v = wide_pages(gathered, kv_scales, q.dtype)  # [K, R, G, .]
    if extent.is_even:
        return attend(q[None], k, v, window=window, **scores)[0]
    # Rows after a text's end may have NaN of another request, which a mask does not hide.
    k, v = (x.masked_fill(extent.is_padding, 0) for x in (k, v))
    return F.scaled_dot_product_attention(
        q[:, :, None],  # [R, N, 1, H]
        k.permute(1, 2, 0, 3),  # [K, R, G, H] -> [R, G, K, H]
        v.permute(1, 2, 0, 3),
        attn_mask=extent.is_valid,
        enable_gqa=q.shape[1] != k.shape[2],
        **scores,
    )[:, :, 0]


def reference_decode(
    q: Float[Tensor, "R N H"],
    keys: Shaped[Tensor, "P Z G H"],
    values: Shaped[Tensor, "P Z G J"],
    tables: Int[Tensor, "R M"],
    lengths: Int[Tensor, " R"],
    *,
    window: int = -1,
    kv_scales: Scales | None = None,
    **scores: Any,
) -> Float[Tensor, "R N J"]:
    """Attend with one query of each request to its keys, request by request.

    The reference of ``padded_decode`` and, after ``write_to_pages``, of ``paged_decode``.
    Supports any option of ``attend``; waits for the device.
    """
    size, rows = keys.shape[1], []
    for query, pages, length in zip(q, tables, lengths.tolist(), strict=True):
        first_page = 0 if window < 0 else max(0, length - 1 - window) // size
        used = pages[first_page : -(-length // size)]
        end = length - first_page * size
        seen = [memory[used].flatten(0, 1)[:end].unsqueeze(1) for memory in (keys, values)]
        k, v = wide_pages(seen, kv_scales, q.dtype)
        rows.append(attend(query[None, None], k, v, window=window, **scores)[0, 0])
    return torch.stack(rows)
