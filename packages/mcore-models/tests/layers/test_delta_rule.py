"""The chunked gated delta rule against the recurrence written out token by token."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mcore_models.kernels.delta import (
    delta_rule_plain,
    gated_delta_rule,
    in_widths,
    kernel_widths,
)


def recurrence(q, k, v, g, beta, state, starts=None):
    """One token after the other, as the formulas stand."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs = []
    for t in range(v.shape[0]):
        if starts is not None:
            state = state * ~starts[t][:, None, None, None]
        decay = g[t].exp()[..., None]
        state = (decay if g.dim() == 4 else decay[..., None]) * state
        held = torch.einsum("bnkh,bnk->bnh", state, k[t])
        change = beta[t][..., None] * (v[t] - held)
        state = state + torch.einsum("bnk,bnh->bnkh", k[t], change)
        outputs.append(torch.einsum("bnkh,bnk->bnh", state, q[t]))
    return torch.stack(outputs), state


def inputs(length, dtype=torch.float64, by_channel=False):
    torch.manual_seed(0)
    batch, groups, heads, width, channels = 2, 2, 4, 5, 3
    decays = (width,) if by_channel else ()
    return [
        tensor.to(dtype).requires_grad_()
        for tensor in (
            torch.randn(length, batch, groups, width),
            F.normalize(torch.randn(length, batch, groups, width), dim=-1),
            torch.randn(length, batch, heads, channels),
            -F.softplus(torch.randn(length, batch, heads, *decays)),
            torch.rand(length, batch, heads),
            torch.randn(batch, heads, width, channels),
        )
    ]


def borders(length):
    starts = torch.zeros(length, 2, dtype=torch.bool)
    for row, places in enumerate(((0, 1, 5, 8, 9, 12), (3, 4, 15))):
        starts[[place for place in places if place < length], row] = True
    return starts


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (16, 4), (17, 4), (17, 64), (9, 1)])
@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
def test_chunks_of_any_size_give_what_the_recurrence_gives_and_its_gradients(
    length, chunk, packed, by_channel
):
    tensors = inputs(length, by_channel=by_channel)
    starts = borders(length) if packed else None
    *rest, state = tensors
    found = gated_delta_rule(*rest, state=state, chunk_size=chunk, starts=starts)
    wanted = recurrence(*tensors, starts=starts)
    weights = [torch.randn_like(result) for result in wanted]
    grads = [
        torch.autograd.grad(results, tensors, weights, materialize_grads=True)
        for results in (found, wanted)
    ]
    for got, want in (*zip(found, wanted, strict=True), *zip(*grads, strict=True)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_wider_keys_and_values_in_blocks_give_the_same_with_gradients():
    sizes = ((5, 3), (96, 80), (128, 256), (129, 64))
    wanted = [(128, 128)] * 3 + [None]
    assert [kernel_widths(*size) for size in sizes] == wanted
    tensors, starts = inputs(9), borders(9)
    results, grads = [], []
    for form in (delta_rule_plain, partial(in_widths, delta_rule_plain, (8, 2))):
        results.append(form(*tensors[:5], starts=starts, state=tensors[5]))
        total = sum((y.sin() * y).sum() for y in results[-1])
        grads.append(torch.autograd.grad(total, tensors))
    for first, second in (results, grads):
        for got, want in zip(second, first, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_sequence_cut_anywhere_goes_on_from_its_state():
    *tensors, _ = (tensor.detach() for tensor in inputs(11))
    whole, end = gated_delta_rule(*tensors, chunk_size=4)
    for cut in (1, 4, 7):
        first, state = gated_delta_rule(*(x[:cut] for x in tensors), chunk_size=4)
        second, last = gated_delta_rule(*(x[cut:] for x in tensors), chunk_size=4, state=state)
        torch.testing.assert_close(torch.cat([first, second]), whole)
        torch.testing.assert_close(last, end)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
def test_fast_decay_stays_finite_and_bfloat16_is_computed_in_float32(by_channel):
    q, k, v, g, beta, _ = inputs(300, torch.float32, by_channel)
    y, state = gated_delta_rule(q, k, v, g * 100, beta)
    gradients = torch.autograd.grad(y.sum() + state.sum(), (q, k, v, g, beta))
    assert all(tensor.isfinite().all() for tensor in (y, state, *gradients))
    rounded = [tensor.detach().bfloat16() for tensor in (q, k, v, g, beta)]
    y, state = gated_delta_rule(*rounded)
    wanted, _ = gated_delta_rule(*(tensor.float() for tensor in rounded))
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, wanted.bfloat16())
