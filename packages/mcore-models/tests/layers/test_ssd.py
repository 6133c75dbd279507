"""The chunked state-space form against the recurrence written out token by token."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from mcore_models.kernels.conv import causal_conv
from mcore_models.kernels.ssd import ssd


def recurrence(x, dt, A, B, C, D, state=None, starts=None):
    """One token after the other, as the formulas stand."""
    length, batch, heads, channels = x.shape
    B, C = (part.repeat_interleave(heads // B.shape[2], 2) for part in (B, C))
    if state is None:
        state = x.new_zeros(batch, heads, channels, B.shape[-1])
    outputs = []
    for t in range(length):
        if starts is not None:
            state = state * ~starts[t][:, None, None, None]
        decay = (dt[t] * A).exp()[..., None, None]
        new = torch.einsum("bnh,bnk->bnhk", dt[t][..., None] * x[t], B[t])
        state = decay * state + new
        outputs.append(torch.einsum("bnhk,bnk->bnh", state, C[t]) + D[:, None] * x[t])
    return torch.stack(outputs), state


def inputs(length, dtype=torch.float64):
    torch.manual_seed(0)
    batch, heads, channels, groups, numbers = 2, 6, 3, 2, 5
    return [
        tensor.to(dtype).requires_grad_()
        for tensor in (
            torch.randn(length, batch, heads, channels),
            F.softplus(torch.randn(length, batch, heads)),
            -torch.rand(heads) * 4,
            torch.randn(length, batch, groups, numbers),
            torch.randn(length, batch, groups, numbers),
            torch.randn(heads),
            torch.randn(batch, heads, channels, numbers),
        )
    ]


def borders(length):
    starts = torch.zeros(length, 2, dtype=torch.bool)
    for row, places in enumerate(((0, 1, 5, 8, 9, 12), (3, 4, 15))):
        starts[[place for place in places if place < length], row] = True
    return starts


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 4), (3, 4), (16, 4), (17, 4), (17, 64), (9, 1)]
)
def test_chunks_of_any_size_give_what_the_recurrence_gives_and_its_gradients(
    length, chunk, packed
):
    tensors = inputs(length)
    starts = borders(length) if packed else None
    found = ssd(*tensors[:6], state=tensors[6], chunk_size=chunk, starts=starts)
    wanted = recurrence(*tensors, starts=starts)
    weights = [torch.randn_like(result) for result in wanted]
    grads = [
        torch.autograd.grad(results, tensors, weights, materialize_grads=True)
        for results in (found, wanted)
    ]
    for got, want in (*zip(found, wanted, strict=True), *zip(*grads, strict=True)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_sequence_cut_anywhere_goes_on_from_its_state():
    *tensors, _ = (tensor.detach() for tensor in inputs(11))
    whole, end = ssd(*tensors, chunk_size=4)
    for cut in (1, 4, 7):
        x, dt, A, B, C, D = tensors
        first, state = ssd(x[:cut], dt[:cut], A, B[:cut], C[:cut], D, chunk_size=4)
        second, last = ssd(x[cut:], dt[cut:], A, B[cut:], C[cut:], D, chunk_size=4, state=state)
        torch.testing.assert_close(torch.cat([first, second]), whole)
        torch.testing.assert_close(last, end)


def test_fast_decay_over_long_sequences_stays_finite():
    x, dt, A, B, C, D, _ = inputs(300, torch.float32)
    y, state = ssd(x, dt * 50, A * 100, B, C, D, chunk_size=128)
    gradients = torch.autograd.grad(y.sum() + state.sum(), (x, dt, A, B, C))
    assert all(tensor.isfinite().all() for tensor in (y, state, *gradients))


def test_bfloat16_is_computed_in_float32():
    exact = inputs(40)[:6]
    rounded = [tensor.detach().bfloat16() for tensor in exact]
    y, state = ssd(*rounded, chunk_size=8)
    wanted, _ = ssd(*(tensor.float() for tensor in rounded), chunk_size=8)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, wanted.bfloat16())


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_sees_the_last_tokens_of_its_document_only(width):
    torch.manual_seed(0)
    x = torch.randn(13, 2, 3, dtype=torch.float64)
    weight, bias = torch.randn(3, 1, width).double(), torch.randn(3).double()
    whole = causal_conv(x, weight, bias)
    padded = F.pad(x.permute(1, 2, 0), (width - 1, 0))
    wanted = F.conv1d(padded, weight, bias, groups=3).permute(2, 0, 1)
    torch.testing.assert_close(whole, wanted)
    starts = borders(13)
    packed = causal_conv(x, weight, bias, starts=starts)
    for row in range(2):
        cuts = sorted({0, *starts[:, row].nonzero().flatten().tolist(), 13})
        for begin, end in pairwise(cuts):
            alone = causal_conv(x[begin:end, row : row + 1], weight, bias)
            torch.testing.assert_close(packed[begin:end, row : row + 1], alone)
    for cut in (1, 2, 7):
        before = F.pad(x[:cut], (0, 0, 0, 0, width - 1, 0))[cut : cut + width - 1]
        rest = causal_conv(x[cut:], weight, bias, before=before)
        torch.testing.assert_close(rest, whole[cut:])
