"""``attend`` against attention written out in loops, forward and gradients."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from mcore_models.config import KernelConfig, TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels import attention_backends, availability, flash4_attention
from mcore_models.kernels.alibi import alibi_slopes
from mcore_models.kernels.attention_backends import attend, check_backend, visible_keys
from mcore_models.layers.layer_setup import Execution
from mcore_parallel import ParallelContext
from mcore_parallel.context_parallel.packed_sequences import Documents

SHAPES = [(5, 5, 4, 4), (5, 5, 4, 2), (7, 7, 6, 1), (3, 8, 4, 2), (1, 6, 4, 2), (4, 4, 1, 1)]


def slow_attention(q, k, v, causal=True, scale=None, window=-1):
    """One query of one head at a time."""
    S, B, N, H = q.shape
    Z, G = k.shape[0], k.shape[2]
    scale = H**-0.5 if scale is None else scale
    rows = []
    for s in range(S):
        place = Z - S + s
        first = max(0, place - window) if window >= 0 else 0
        last = place + 1 if causal else Z
        for b in range(B):
            for n in range(N):
                g = n * G // N
                weights = (k[first:last, b, g] @ q[s, b, n] * scale).softmax(0)
                rows.append(weights @ v[first:last, b, g])
    return torch.stack(rows).view(S, B, N, H)


def inputs(S, Z, N, G, H=6):
    torch.manual_seed(S * 100 + Z)
    shapes = ((S, 2, N, H), (Z, 2, G, H), (Z, 2, G, H))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def compare(tensors, **options):
    got = attend(*tensors, **options)
    want = slow_attention(*tensors, **{k: v for k, v in options.items() if k != "backend"})
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(want)
    grads = [torch.autograd.grad(y, tensors, dy) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("S", "Z", "N", "G"), SHAPES)
def test_attend_equals_attention_in_loops(S, Z, N, G):
    compare(inputs(S, Z, N, G))


@pytest.mark.parametrize(("S", "Z", "N", "G"), SHAPES)
@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_a_window_hides_older_keys(S, Z, N, G, window):
    compare(inputs(S, Z, N, G), window=window)


@pytest.mark.parametrize(
    ("S", "Z", "chunk"),
    [(8, 8, 4), (9, 9, 4), (3, 3, 4), (7, 10, 4), (2, 7, 4), (2, 9, 4), (5, 9, 1), (5, 9, 20)],
)
def test_chunks_hide_the_keys_of_other_chunks_and_need_no_mask(S, Z, chunk, monkeypatch):
    tensors = inputs(S, Z, 4, 2)
    q, k, v = (t.permute(1, 2, 0, 3) for t in tensors)
    seen = visible_keys(S, Z, chunk=chunk)
    want = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).permute(2, 0, 1, 3)
    # A chunk whose first keys have no queries here needs a mask, as the end of any sequence.
    is_aligned = (Z - S) % chunk == 0
    if is_aligned:
        monkeypatch.setattr(attention_backends, "visible_keys", None)
    got = attend(*tensors, chunk=chunk)
    dy = torch.randn_like(want)
    pairs = zip(
        (got, *torch.autograd.grad(got, tensors, dy)),
        (want, *torch.autograd.grad(want, tensors, dy)),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_scale_and_full_attention_are_obeyed():
    compare(inputs(5, 5, 4, 2), scale=0.3)
    compare(inputs(5, 5, 4, 2), causal=False)
    compare(inputs(5, 3, 4, 2), causal=False)


def test_strided_views_of_one_product_are_taken_as_they_are():
    packed = torch.randn(6, 2, (4 + 2 + 2) * 3, dtype=torch.float64)
    parts = [p.unflatten(-1, (-1, 3)) for p in packed.split([12, 6, 6], -1)]
    assert not parts[0].is_contiguous()
    torch.testing.assert_close(attend(*parts), slow_attention(*parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_keeps_its_dtype_and_its_tolerance(dtype):
    tensors = [t.detach().to(dtype) for t in inputs(9, 9, 4, 2)]
    got = attend(*tensors)
    assert got.dtype == dtype
    want = slow_attention(*(t.double() for t in tensors))
    rtol = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-12), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_slopes_make_scores_fall_with_distance_also_where_16_bits_hold_no_place(dtype, error):
    q, k, v = (t.detach().to(dtype) for t in inputs(3, 2100, 6, 3))
    slopes = alibi_slopes(6)
    assert slopes.log2().tolist() == [-2, -4, -6, -8, -1, -3]
    found = [attend(q, k, v, slopes=slopes, backend=b) for b in ("auto", "local")]
    k, v = (t.double().repeat_interleave(2, 2) for t in (k, v))
    distance = torch.arange(2097, 2100)[:, None] - torch.arange(2100)
    scores = torch.einsum("sbnh,zbnh->bnsz", q.double(), k) * 6**-0.5
    scores = scores - slopes[:, None, None] * distance
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    want = torch.einsum("bnsz,zbnh->sbnh", weights, v)
    for got in found:
        torch.testing.assert_close(got.double(), want, rtol=error, atol=error)


def test_slopes_of_small_scales_stay_finite_in_float16():
    q, k, v = (t.detach().half() for t in inputs(3, 2100, 6, 3))
    for backend in ("auto", "local"):
        got = attend(q, k, v, slopes=alibi_slopes(6), scale=1 / 128, backend=backend)
        assert got.isfinite().all()


def test_dropout_drops_weights_and_keeps_the_mean():
    torch.manual_seed(0)
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(2000, 1, 1, 4)
    v = torch.ones(2000, 1, 1, 4)
    out = attend(q, k, v, dropout_prob=0.25)
    assert not torch.equal(out, torch.ones_like(out))
    assert abs(out.mean().item() - 1) < 0.05


def test_more_causal_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="5 causal queries need at least as many keys, not 3"):
        attend(*inputs(5, 3, 2, 2))


def test_a_window_needs_causality():
    with pytest.raises(ValueError, match="window needs causal"):
        attend(*inputs(3, 3, 2, 2), causal=False, window=1)


def test_the_last_query_stands_at_the_last_key():
    assert visible_keys(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible_keys(2, 4, window=1).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(9, 9), (4, 9), (4, 7), (1, 8)])
def test_packed_documents_do_not_see_each_other(num_queries, num_keys, window):
    """Row 0 packs three documents, row 1 two; queries are the end of a prefix of the rows."""
    rows = [[0, 1, 5, 9], [0, 6, 9]]
    q, k, v = inputs(num_queries, num_keys, 4, 2)
    got = attend(q, k, v, window=window, documents=Documents(rows))
    for row, borders in enumerate(rows):
        for i in range(num_queries):
            place = num_keys - num_queries + i
            begin = max(b for b in borders if b <= place)
            document = slice(begin, place + 1)
            alone = slow_attention(
                q[i : i + 1, row : row + 1],
                k[document, row : row + 1],
                v[document, row : row + 1],
                window=window,
            )
            torch.testing.assert_close(
                got[i : i + 1, row : row + 1], alone, rtol=1e-12, atol=1e-12
            )


def test_documents_of_another_batch_and_without_causality_are_refused():
    q, k, v = inputs(4, 4, 4, 2)
    with pytest.raises(ValueError, match="documents are of 1 rows of 4 tokens"):
        attend(q, k, v, documents=Documents([[0, 4]]))
    with pytest.raises(ValueError, match="documents are of 2 rows of 3 tokens"):
        attend(q, k, v, documents=Documents([[0, 3], [0, 3]]))
    with pytest.raises(ValueError, match="need causal attention"):
        attend(q, k, v, causal=False, documents=Documents([[0, 4], [0, 4]]))
    with pytest.raises(ValueError, match="flash4 does not support packed documents"):
        attend(q, k, v, backend="flash4", documents=Documents([[0, 4], [0, 4]]))


def test_flash4_says_why_it_cannot_be_used():
    tensors = inputs(4, 4, 2, 2)
    with pytest.raises(ValueError, match="flash4 cannot be used: tensors are on cpu"):
        attend(*tensors, backend="flash4")


def test_flash4_names_its_extra_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(flash4_attention, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r'pip install "mcore-models\[flash4\]", or use auto'):
        check_backend("flash4")
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    with pytest.raises(ValueError, match="flash-attn-4 is not installed"):
        GPT(
            config,
            ParallelContext.single(),
            vocab_size=4,
            execution=Execution(kernels=KernelConfig(attention_backend="flash4")),
        )


def test_a_backend_that_is_named_is_the_one_that_computes_or_refuses_in_one_line():
    with pytest.raises(ValueError, match=r"fused has no kernel .* on cpu, .*use auto"):
        attend(*inputs(5, 5, 4, 4), backend="fused")
    with pytest.raises(ValueError, match=r"flash has no kernel .* dropout 0.1: use auto"):
        attend(*inputs(5, 5, 4, 4), backend="flash", dropout_prob=0.1)


def test_plain_products_may_be_asked_for():
    for backend in ("unfused", "local"):
        compare(inputs(5, 5, 4, 2), backend=backend)
        compare(inputs(5, 5, 4, 2), backend=backend, window=2)
    compare(inputs(3, 8, 4, 2), backend="local", causal=False)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash-attn 2's published signature, batch first, in plain torch."""
    assert (dropout_p, alibi_slopes, return_attn_probs) == (0.0, None, False)
    assert window_size in ((-1, -1), (window_size[0], 0))
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    rules = {"causal": causal, "scale": softmax_scale, "window": window_size[0]}
    return attend(q, k, v, softcap=softcap, **rules, backend="local").transpose(0, 1)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **rules
):
    sizes = cu_seqlens_q.diff().tolist()
    assert (max(sizes), torch.int32) == (max_seqlen_q, cu_seqlens_k.dtype)
    parts = zip(*(t.split(sizes) for t in (q, k, v)), strict=True)
    return torch.cat([flash_attn_func(*(t[None] for t in part), **rules)[0] for part in parts])


def test_flash_attn_is_called_by_its_published_signature(monkeypatch):
    package = ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(availability, "is_installed", lambda name: name == "flash-attn")
    q, k, v = (torch.randn(12, 2, n, 16).bfloat16() for n in (4, 2, 2))
    documents = Documents([[0, 5, 12], [0, 9, 12]])
    for rules in (
        {},
        {"window": 3, "scale": 0.2},
        {"softcap": 5.0},
        {"documents": documents, "window": 4},
        {"chunk": 5},
    ):
        for values in (v, v[..., :8]):
            got = attend(q, k, values, backend="flash", **rules)
            want = attend(q, k, values, backend="local", **rules)
            torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)
    tail = attend(q[-3:], k, v, backend="flash")
    torch.testing.assert_close(tail, attend(q, k, v)[-3:], rtol=1.6e-2, atol=1e-2)
    with pytest.raises(ValueError, match=r"flash-attn.*does not support sinks"):
        attend(q, k, v, backend="flash", sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="16-bit"):
        attend(q.float(), k.float(), v.float(), backend="flash")
