"""``attend``: causal attention over grouped heads, one function with several backends.

Tensors have the sequence dimension first and are passed to kernels as strided views. On a GPU
``auto`` uses flash-attn-4 if it is installed, passes its trial and supports the shapes.
Otherwise it uses torch's scaled_dot_product_attention, with cuDNN before torch's flash kernel:
on an H200 with heads of 128 channels cuDNN is 1.7 times as fast. Packed documents use torch's
variable-length kernel on a GPU, and a mask elsewhere.

Other modules choose the kernel in four cases:
- ring or all-gathered keys of context ranks: ``fused_blocks.blocks_for``;
- decoding steps of mcore-infer's engine: ``decode_kernels``;
- models whose ``Attention.attend`` was set by ``transformer_engine``;
- models whose ``Attention.attend`` was set by ``batch_invariant_model``.
``choice`` lists the optional kernels of a model, for ranks to agree on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from mcore_models.config import AttentionBackend
from mcore_models.kernels import flash4_attention as flash4
from mcore_models.kernels import flash_attention as flash2
from mcore_models.kernels.alibi import with_distances
from mcore_models.kernels.selected_attention import Selection, attend_packed
from mcore_parallel.context_parallel.packed_sequences import Documents

GPU_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Torch's kernels in the order of their speed on H200; torch uses the first that supports the
shapes."""

DETERMINISTIC_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Torch's kernels with deterministic backward."""

_TORCH_BACKENDS: dict[str, list[SDPBackend]] = {
    "auto": GPU_BACKENDS,
    "fused": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "unfused": [SDPBackend.MATH],
}
_NO_KERNEL = ("No viable backend", "No available kernel")
"""Beginnings of torch's message for unsupported shapes, on a CPU and on a GPU."""


def attend(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G J"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int = -1,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Float[Tensor, " N"] | None = None,
    slopes: Float[Tensor, " N"] | None = None,
    dropout_prob: float = 0.0,
    documents: Documents | None = None,
    backend: AttentionBackend = "auto",
    sizes_repeat: bool = True,
    selection: Selection | None = None,
) -> Float[Tensor, "S B N J"]:
    """Return values weighted by softmax(scale * q·k) over the keys that each query sees.

    Z is the number of keys. The last query is at the position of the last key: with Z > S the
    queries are the end of a longer sequence (a cache, or a slice of a context-parallel
    sequence). Query head n uses key/value head n * G / N, rounded down.

    Args:
        q: queries.
        k: keys, G dividing N.
        v: values; their width J may differ from H.
        causal: whether a query attends only to keys up to its own position.
        scale: of the scores; None: 1/sqrt(H).
        window: keys before a query's own that the query attends to; -1: all. Only if causal.
        chunk: chunk length; a query attends to keys of its chunk of its document; 0: off.
        softcap: scores become softcap x tanh(score / softcap); 0: unchanged.
        sinks: a score of each head that takes part in the softmax without a value. Caps and
            sinks are computed in plain torch, as no fused kernel supports them.
        slopes: decrease of each head's scores for each token of distance, see ``alibi``.
        dropout_prob: of dropping an attention weight, drawn from the default generator.
        documents: packed in the rows, whose first Z tokens are the keys; documents do not
            attend to each other. Only if causal.
        backend: kernels to use; ``auto``: the fastest that supports the shapes, and is
            deterministic under ``torch.use_deterministic_algorithms``.
        sizes_repeat: whether these sizes occur again. If not, ``auto`` excludes cuDNN, which
            takes tenths of a second to plan a new size.
        selection: q and k are packed with queries and keys of an indexer, which selects the
            keys of each query, see ``selected_attention``. Excludes other options of scores.

    Raises:
        ValueError: if there are more queries than keys, a window or documents without
            causality, documents that do not fit the batch, or a backend that does not support
            these tensors, options or device.
    """
    if slopes is not None:
        scale, width = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1]
        others: dict[str, Any] = {"window": window, "chunk": chunk, "softcap": softcap}
        others |= {"dropout_prob": dropout_prob, "documents": documents, "backend": backend}
        others |= {"causal": causal, "sinks": sinks, "sizes_repeat": sizes_repeat}
        dtype = q.dtype
        if sinks is not None or backend == "local":
            # Plain torch rounds scores to the dtype of q, and scores of distant keys are large.
            q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        y = attend(*with_distances(q, k, v, slopes, scale), scale=scale, **others)
        return y[..., :width].to(dtype)
    if selection is not None:
        dense = partial(attend, backend=backend, sizes_repeat=sizes_repeat)
        seen = visible_keys(q.shape[0], k.shape[0], device=q.device)
        return attend_packed(q, k, v, selection, seen, dense)
    if documents is not None and chunk:
        documents, chunk = documents.cut(chunk), 0
    num_queries, num_keys = q.shape[0], k.shape[0]
    rules = {"scale": scale, "window": window, "softcap": softcap, "dropout_prob": dropout_prob}
    if causal and num_queries > num_keys:
        raise ValueError(
            f"{num_queries} causal queries need at least as many keys, not {num_keys}: add "
            "the missing keys."
        )
    if window >= 0 and not causal:
        raise ValueError("an attention window needs causal attention: set causal or no window.")
    if chunk and causal:
        more = {**rules, "sinks": sinks, "backend": backend, "sizes_repeat": sizes_repeat}
        return _in_chunks(q, k, v, chunk, partial(attend, **more))
    if backend == "flash" and flash2.is_installed():
        return _by_flash2(q, k, v, documents, causal, sinks, rules)
    is_plain = softcap > 0 or sinks is not None or backend == "local"
    if is_plain and backend not in ("auto", "unfused", "local"):
        raise ValueError(
            f"--attention-backend {backend} does not support soft caps and sinks: use auto or "
            "unfused, which compute them in plain torch."
        )
    if documents is not None:
        _check_documents(documents, k, causal, backend)
        is_whole = num_queries == documents.length and not is_plain
        if is_whole and takes_borders(q, dropout_prob, backend):
            return _varlen(q, k, v, documents, scale, window)
    elif not is_plain and _uses_flash4(q, k, v, dropout_prob, backend):
        return flash4.flash4_attention.launch(
            q, k, v, causal=causal, scale=scale, window=window
        )
    mask = _mask(q, k, causal, window, documents, is_plain)
    if is_plain:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return _plain(q, k, v, mask, scale, softcap, sinks, dropout_prob)
    if backend == "flash" and mask is not None and q.is_cuda:
        raise ValueError(
            "--attention-backend flash uses torch's own kernel, as flash-attn is not "
            "installed. That kernel does not support masks (windows, the end of a longer "
            "sequence): install flash-attn for windows, or use auto."
        )
    is_causal = causal and mask is None and num_queries > 1
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
    return _by_torch(q, k, v, options | {"dropout_p": dropout_prob}, backend, sizes_repeat)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, chunk: int, attend_causally: Callable[..., Tensor]
) -> Float[Tensor, "S B N J"]:
    """Return attention within chunks, computed as separate causal sequences without a mask.

    Queries are in up to three parts: the rest of a chunk whose earlier keys have no queries,
    complete chunks, which become rows of the batch, and the beginning of a last chunk.
    """
    S, B = q.shape[:2]
    begin = k.shape[0] - S  # position of the first query
    rest = min(S, -begin % chunk)
    tail = (S - rest) % chunk
    outs = []
    if rest:
        keys = slice(begin // chunk * chunk, begin + rest)
        outs.append(attend_causally(q[:rest], k[keys], v[keys]))
    if rest + tail < S:
        rows = [
            # [n c, B, N, H] -> [c, n B, N, H], a view for B = 1
            t[t.shape[0] - S + rest : t.shape[0] - tail]
            .unflatten(0, (-1, chunk))
            .transpose(0, 1)
            .flatten(1, 2)
            for t in (q, k, v)
        ]
        out = attend_causally(*rows)
        outs.append(out.unflatten(1, (-1, B)).transpose(0, 1).flatten(0, 1))
    if tail:
        outs.append(attend_causally(q[-tail:], k[-tail:], v[-tail:]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _mask(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int,
    documents: Documents | None,
    is_plain: bool,
) -> Tensor | None:
    """Return a mask of the keys of each query; None if the kernel's causal rule suffices."""
    sizes = q.shape[0], k.shape[0]
    if documents is not None:
        seen = visible_keys(*sizes, window, q.device)
        return same_document(documents, *sizes, q.device) & seen
    is_whole_row = sizes[0] in (sizes[1], 1)
    if causal and (window >= 0 or is_plain or not is_whole_row):
        return visible_keys(*sizes, window, q.device)
    return None


def _by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    backend: AttentionBackend,
    sizes_repeat: bool,
) -> Float[Tensor, "S B N J"]:
    """Return attention by torch's scaled_dot_product_attention."""
    options["enable_gqa"] = q.shape[2] != k.shape[2]
    if q.is_cuda and not sizes_repeat and options["attn_mask"] is not None:
        # Without cuDNN no kernel supports both a mask and shared heads.
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        options["enable_gqa"] = False
    batch_first = [t.permute(1, 2, 0, 3) for t in (q, k, v)]  # [S, B, N, H] -> [B, N, S, H]
    if q.is_cuda or backend != "auto":
        with sdpa_kernel(_torch_backends(backend, sizes_repeat), set_priority=True):
            try:
                out = F.scaled_dot_product_attention(*batch_first, **options)
            except RuntimeError as error:
                if not str(error).startswith(_NO_KERNEL):
                    raise
                raise ValueError(
                    f"--attention-backend {backend} has no kernel for {q.dtype} of "
                    f"{q.shape[-1]} channels on {q.device.type}, dropout "
                    f"{options['dropout_p']:g}: use auto."
                ) from error
    else:
        out = F.scaled_dot_product_attention(*batch_first, **options)
    return out.permute(2, 0, 1, 3)


def _by_flash2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    causal: bool,
    sinks: Tensor | None,
    rules: dict[str, Any],
) -> Tensor:
    """Return attention by flash-attn; packed documents must be complete rows."""
    why_not = flash2.misfit(q, v)
    if sinks is not None:
        why_not = "it does not support sinks"
    if documents is not None:
        _check_documents(documents, k, causal, "flash")
        if q.shape[0] != documents.length:
            why_not = "packed documents need all their queries at once"
    if why_not:
        raise ValueError(f"--attention-backend flash (flash-attn): {why_not}. Use auto.")
    return flash2.flash_attention(q, k, v, causal=causal, documents=documents, **rules)


def _torch_backends(backend: AttentionBackend, sizes_repeat: bool = True) -> list[SDPBackend]:
    """Return torch's kernels for a backend, respecting torch's setting for determinism."""
    if backend == "auto" and torch.are_deterministic_algorithms_enabled():
        return DETERMINISTIC_BACKENDS
    if backend == "auto" and not sizes_repeat:
        return GPU_BACKENDS[1:]
    return _TORCH_BACKENDS[backend]


def _uses_flash4(
    q: Tensor, k: Tensor, v: Tensor, dropout_prob: float, backend: AttentionBackend
) -> bool:
    if backend == "flash4":
        why_not = flash4.refusal(q, v, dropout_prob)
        if why_not:
            raise ValueError(
                f"--attention-backend flash4 cannot be used: {why_not}. Use auto, which uses "
                "the fastest supported backend."
            )
        return True
    return (
        backend == "auto" and flash4.is_faster(q, k) and not flash4.refusal(q, v, dropout_prob)
    )


def check_backend(backend: AttentionBackend) -> None:
    """Raise ValueError if a backend's package is not installed."""
    if backend == "flash4" and not flash4.is_installed():
        raise ValueError(f"--attention-backend flash4: {flash4.EXTRA}, or use auto.")


def visible_keys(
    num_queries: int,
    num_keys: int,
    window: int = -1,
    device: torch.device | None = None,
    chunk: int = 0,
) -> Bool[Tensor, "S Z"]:
    """Return a mask of each query's keys; the last query is at the last key's position.

    Args:
        num_queries: S.
        num_keys: Z.
        window: keys before a query's own that the query attends to; -1: all.
        device: of the result.
        chunk: length of chunks that attention is limited to; 0: no chunks.
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key = torch.arange(num_keys, device=device)
    visible = key <= query
    if chunk:
        visible = visible & (key // chunk == query // chunk)
    return visible if window < 0 else visible & (key >= query - window)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    dropout_prob: float,
) -> Float[Tensor, "S B N H"]:
    """Return attention with caps and sinks; all scores are in memory, float32 or wider.

    A sink's score is an additional column of the softmax without a value: Xiao et al. 2023,
    arXiv:2309.17453, in the learned form. Caps: Gemma team 2024, arXiv:2408.00118.
    """
    per_group = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [S, B, N, H] -> [B, N, S, H]
    k, v = (x.repeat_interleave(per_group, 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    probs = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    out = F.dropout(probs, dropout_prob) @ v
    return out.permute(2, 0, 1, 3)


def same_document(
    documents: Documents, num_queries: int, num_keys: int, device: torch.device | None = None
) -> Bool[Tensor, "B 1 S Z"]:
    """Return a mask of the keys from the begin of each query's document on.

    Args:
        documents: of complete rows.
        num_queries: S; the last query is at the last key's position.
        num_keys: Z, the first tokens of the rows.
        device: of the result.
    """
    first = torch.stack([pieces.first_seen(device) for pieces in documents.rows])
    first = first[:, num_keys - num_queries : num_keys]
    return (torch.arange(num_keys, device=device) >= first.unsqueeze(2)).unsqueeze(1)


def _check_documents(
    documents: Documents, k: Tensor, causal: bool, backend: AttentionBackend
) -> None:
    if not causal:
        raise ValueError("packed documents need causal attention: set causal, or unpack rows.")
    if backend == "flash4":
        raise ValueError(
            "--attention-backend flash4 does not support packed documents: use auto."
        )
    if len(documents.rows) != k.shape[1] or k.shape[0] > documents.length:
        documents.check(k.shape[1], k.shape[0])


def takes_borders(q: Tensor, dropout_prob: float, backend: AttentionBackend) -> bool:
    """Return whether torch's variable-length kernel supports these queries."""
    is_short = q.dtype in (torch.bfloat16, torch.float16)
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    is_fused = backend not in ("unfused", "local")
    return q.is_cuda and is_short and fits and not dropout_prob and is_fused


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: int
) -> Tensor:
    """Return attention within documents by the variable-length kernel, without a mask."""
    pieces = documents.flat()
    borders, longest = pieces.cu_seqlens(q.device), pieces.longest
    J = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - J))  # the kernel requires equal widths
    # Ends of rows are borders too: [S, B, N, H] -> [B * S, N, H], without a copy for B = 1.
    flat_q, flat_k, flat_v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
    out = varlen_attn(
        flat_q,
        flat_k,
        flat_v,
        borders,
        borders,
        longest,
        longest,
        scale=scale,
        window_size=(window, 0),
    )
    assert isinstance(out, Tensor)  # a pair if log-sum-exps are returned too
    return out.unflatten(0, (q.shape[1], -1)).transpose(0, 1)[..., :J]
