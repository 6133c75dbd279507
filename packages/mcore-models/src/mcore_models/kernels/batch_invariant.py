"""Matrix products and attention whose rows have the same bits in any batch.

GEMM libraries choose the order of summation by the number of rows, and attention kernels by the
number of keys and their pages. Here every row is computed in one order: GEMMs in blocks of a
fixed number of rows, attention in blocks of queries and keys that begin at multiples of the
block's size. So training and an engine that decodes token by token have equal log
probabilities.

On a GPU both are Triton kernels with one tile size; on a CPU they are calls of torch on tensors
of one shape. Only forward has a fixed order; gradients are those of plain torch.

Reference:
    He and Thinking Machines Lab 2025, Defeating nondeterminism in LLM inference.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave
from mcore_parallel.precision.gemm import Operands, PlainGemm

BLOCK_ROWS = 16
"""Rows of a product, and queries of attention, that are computed together."""
BLOCK_KEYS = 64
"""Keys that attention processes at a time; a multiple of ``BLOCK_ROWS``."""
_LOG_PROBS_WIDTH = 8  # row lengths are padded to a multiple, so that rows are 16-byte aligned

_TILE_ROWS, _TILE_COLUMNS, _TILE_DEPTH = 64, 64, 64


# do_not_specialize: sizes that differ between batches must not select another compiled kernel.
@triton.jit(do_not_specialize=["rows"])
@no_type_check
def _product(
    x,
    weight,
    out,
    rows,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # One program: a tile of the output. The sum over ``depth`` always begins at 0, independent
    # of the number of rows, so a row's sum has one order.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, depth, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        a = tl.load(
            x + row[:, None] * depth + k[None, :],
            mask=(row < rows)[:, None] & (k < depth)[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + column[None, :] * depth + k[:, None],
            mask=(column < columns)[None, :] & (k < depth)[:, None],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(
        out + row[:, None] * columns + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < columns)[None, :],
    )


@triton.jit(do_not_specialize=["first", "num_queries", "num_keys"])
@no_type_check
def _attention(
    q,
    k,
    v,
    out,
    first,
    num_queries,
    num_keys,
    heads,
    groups,
    width,
    scale,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # One program: the queries of one block of positions, in one head. Blocks begin at multiples
    # of QUERIES and of KEYS, so that a query has the same blocks in every batch.
    block = first // QUERIES + tl.program_id(0)
    head = tl.program_id(1)
    group = head // (heads // groups)
    position = block * QUERIES + tl.arange(0, QUERIES)
    row = (position - first).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    is_row = (row >= 0) & (row < num_queries)
    at_query = (row[:, None] * heads + head) * width + lane[None, :]
    query = tl.load(q + at_query, mask=is_row[:, None] & (lane < width)[None, :], other=0.0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    end = tl.minimum((block + 1) * QUERIES, num_keys)
    for begin in range(0, end, KEYS):
        place = (begin + tl.arange(0, KEYS)).to(tl.int64)
        at_key = (place[:, None] * groups + group) * width + lane[None, :]
        inside = (place < num_keys)[:, None] & (lane < width)[None, :]
        key = tl.load(k + at_key, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        is_seen = (place[None, :] <= position[:, None]) & (place < num_keys)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        # A block without visible keys changes nothing: weights of 0, a factor of 1.
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        factor = tl.exp(largest - new)
        total = total * factor + tl.sum(weights, 1)
        value = tl.load(v + at_key, mask=inside, other=0.0)
        part = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        mixed = mixed * factor[:, None] + part
        largest = new
    mixed = mixed / total[:, None]
    tl.store(
        out + at_query,
        mixed.to(out.dtype.element_ty),
        mask=is_row[:, None] & (lane < width)[None, :],
    )


def _product_plain(
    x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"]
) -> Float[Tensor, "T N"]:
    """Return ``x W^T``; each block of rows is a call of torch on tensors of one shape."""
    num_rows = len(x)
    padded = F.pad(x, (0, 0, 0, -num_rows % BLOCK_ROWS))
    # Each block is copied, as torch may also choose its kernel by the alignment of memory.
    blocks = [F.linear(block.clone(), weight) for block in padded.split(BLOCK_ROWS)]
    return torch.cat(blocks)[:num_rows] if blocks else x.new_empty(0, len(weight))


def _product_samples(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[Sample]:
    shapes = (5, 40), (70, 40)
    yield Sample(*(wave(*shape, device=device, dtype=dtype) for shape in shapes))


@optional_kernel(
    "products in a fixed order",
    reference=_product_plain,
    kind=lambda x: None if x.dtype == torch.float64 else (x.dtype,),
    samples=_product_samples,
)
def fixed_order_product(
    x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"]
) -> Float[Tensor, "T N"]:
    """Return ``x W^T``; a row's bits depend only on this row and on W."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, columns = len(x), len(weight)
    out = x.new_empty(rows, columns)
    if rows:
        grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(columns, _TILE_COLUMNS))
        tiles = _TILE_ROWS, _TILE_COLUMNS, _TILE_DEPTH
        _product[grid](x, weight, out, rows, columns, x.shape[1], *tiles, num_warps=4)
    return out


def _attention_plain(
    q: Float[Tensor, "S N H"],
    k: Float[Tensor, "Z G H"],
    v: Float[Tensor, "Z G H"],
    scale: float,
) -> Float[Tensor, "S N H"]:
    """Return attention, block by block with a running softmax, in tensors of one shape.

    Reference:
        Milakov and Gimelshein 2018, Online normalizer calculation, arXiv:1805.02867.
    """
    (num_queries, heads, width), (num_keys, groups, _) = q.shape, k.shape
    first = num_keys - num_queries  # position of the first query
    before = first % BLOCK_ROWS
    wide = torch.promote_types(q.dtype, torch.float32)
    # Rows of zeros around the queries, so that blocks begin at multiples of their size.
    queries = F.pad(q, (0, 0, 0, 0, before, -(before + num_queries) % BLOCK_ROWS))
    end = -num_keys % BLOCK_KEYS
    keys, values = (F.pad(x, (0, 0, 0, 0, 0, end)).transpose(0, 1) for x in (k, v))
    outputs = []
    for number, block in enumerate(queries.split(BLOCK_ROWS)):
        begin = first - before + number * BLOCK_ROWS
        # [16, N, H] -> [G, N/G * 16, H]: the heads of a group share its keys.
        rows = block.view(BLOCK_ROWS, groups, -1, width).permute(1, 2, 0, 3)
        rows = rows.reshape(groups, -1, width)
        position = torch.arange(begin, begin + BLOCK_ROWS, device=q.device)
        position = position.repeat(heads // groups)[:, None]
        largest = rows.new_full((groups, rows.shape[1], 1), -torch.inf, dtype=wide)
        total, mixed = torch.zeros_like(largest), torch.zeros_like(rows, dtype=wide)
        for at in range(0, min(begin + BLOCK_ROWS, num_keys), BLOCK_KEYS):
            key, value = (x[:, at : at + BLOCK_KEYS].contiguous() for x in (keys, values))
            scores = (rows @ key.transpose(1, 2)).to(wide) * scale
            place = torch.arange(at, at + BLOCK_KEYS, device=q.device)
            is_seen = (place <= position) & (place < num_keys)
            scores = scores.masked_fill(~is_seen, -torch.inf)
            # A block without visible keys changes nothing: weights of 0, a factor of 1.
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, factor = (scores - new).exp(), (largest - new).exp()
            total = total * factor + weights.sum(-1, keepdim=True)
            mixed = mixed * factor + (weights.to(v.dtype) @ value).to(wide)
            largest = new
        done = (mixed / total).to(q.dtype).view(groups, -1, BLOCK_ROWS, width)
        outputs.append(done.permute(2, 0, 1, 3).reshape(BLOCK_ROWS, heads, width))
    return torch.cat(outputs)[before : before + num_queries]


def _attention_samples(
    device: torch.device, dtype: torch.dtype = torch.float32, width: int = 16
) -> Iterator[Sample]:
    shapes = (5, 4, width), (70, 2, width), (70, 2, width)
    q, k, v = (wave(*shape, device=device, dtype=dtype) for shape in shapes)
    yield Sample(q, k, v, width**-0.5)


@optional_kernel(
    "attention in a fixed order",
    reference=_attention_plain,
    kind=lambda q: (
        None if q.dtype == torch.float64 or q.shape[-1] > 256 else (q.dtype, q.shape[-1])
    ),
    samples=_attention_samples,
)
def fixed_order_attention(
    q: Float[Tensor, "S N H"],
    k: Float[Tensor, "Z G H"],
    v: Float[Tensor, "Z G H"],
    scale: float,
) -> Float[Tensor, "S N H"]:
    """Return causal attention in one text; the last query is at the position of the last key.

    The bits of a query's output depend only on this query, and on keys and values up to its
    position.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (num_queries, heads, width), (num_keys, groups, _) = q.shape, k.shape
    out, first = torch.empty_like(q), num_keys - num_queries
    blocks = (num_keys - 1) // BLOCK_ROWS - first // BLOCK_ROWS + 1
    _attention[(blocks, heads)](
        q,
        k,
        v,
        out,
        first,
        num_queries,
        num_keys,
        heads,
        groups,
        width,
        scale,
        BLOCK_ROWS,
        BLOCK_KEYS,
        max(16, triton.next_power_of_2(width)),
        num_warps=4,
    )
    return out


class BatchInvariantGemm(PlainGemm):
    """GEMMs whose forward computes every row in one order."""

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y, and x as the operand that backward needs."""
        y = fixed_order_product(x.detach().flatten(0, -2), weight.detach())
        y = y.unflatten(0, x.shape[:-1])
        return (y if bias is None else y + bias), (x,)


class _Linear(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return fixed_order_product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def invariant_linear(
    x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None
) -> Float[Tensor, "T N"]:
    """Return ``x W^T + b`` in a fixed order, with the gradients of a linear."""
    y = _Linear.apply(x, weight)
    return y if bias is None else y + bias


class _Attention(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        texts = zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)
        return torch.stack([fixed_order_attention(*qkv, scale) for qkv in texts], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            # [S, B, N, H] -> [B, N, S, H]
            q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
            gqa = q.shape[1] != k.shape[1]
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=ctx.scale, enable_gqa=gqa
            )
            grads = torch.autograd.grad(y.permute(2, 0, 1, 3), leaves, grad)
        return *grads, None


def invariant_attention(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "S B G H"],
    v: Float[Tensor, "S B G H"],
    scale: float | None = None,
) -> Float[Tensor, "S B N H"]:
    """Return causal attention over complete texts, in a fixed order.

    Backward computes the gradient of plain attention by torch's kernels.
    """
    return _Attention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


def token_log_probs(
    logits: Float[Tensor, "... V"], ids: Int[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return the log probabilities of tokens, float32 or wider."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scores.is_cuda:
        # torch's kernel sums rows with another alignment to 16 bytes in another order.
        scores = F.pad(scores, (0, -scores.shape[-1] % _LOG_PROBS_WIDTH), value=-torch.inf)
    return scores.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
