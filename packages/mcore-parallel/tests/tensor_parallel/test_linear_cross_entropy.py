"""The fused head and loss against torch's own cross-entropy on whole logits."""

from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from warm_ranks import run_ranks

from mcore_parallel import ParallelConfig, ParallelContext
from mcore_parallel.autograd.grad_slot import accumulate_matmul, grad_slot
from mcore_parallel.collectives import all_gather, own_slice
from mcore_parallel.tensor_parallel.linear_cross_entropy import linear_cross_entropy

S, B, D, V = 6, 3, 8, 11


def inputs(scale=1.0):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(S, B, D, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (B, S), generator=generator)
    weights = torch.rand(B, S, generator=generator, dtype=torch.float64)
    weights[1, 2:] = 0
    return x, weight, labels, weights


def twin(x, weight, labels, weights, label_smoothing, softcap=0.0, z_loss=0.0):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = (x @ weight.t()).permute(1, 2, 0)  # [S, B, V] -> [B, V, S]
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * logits.logsumexp(1).square()
    total = (losses * weights).sum()
    total.backward()
    return total.detach(), losses.detach(), x.grad, weight.grad


@pytest.mark.parametrize(
    ("label_smoothing", "softcap", "z_loss"),
    [(0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.0, 2.0, 0.01), (0.1, 3.0, 0.5)],
)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_linear_cross_entropy_equals_whole_logits(
    label_smoothing, softcap, z_loss, chunk_tokens
):
    x, weight, labels, weights = inputs()
    want = twin(x, weight, labels, weights, label_smoothing, softcap, z_loss)
    total, losses = linear_cross_entropy(
        x.requires_grad_(),
        weight.requires_grad_(),
        labels,
        weights,
        vocab_size=V,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        chunk_tokens=chunk_tokens,
    )
    total.backward()
    for got, expected in zip((total, losses, x.grad, weight.grad), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_linear_cross_entropy_overwrites_a_stale_main_gradient(chunk_tokens):
    x, weight, labels, weights = inputs()
    want = twin(x, weight, labels, weights, 0.0)[3]
    weight.requires_grad_()
    grad_slot(weight).main = torch.full_like(weight, torch.nan)
    grad_slot(weight).is_stale = True
    for times in (1, 2):
        linear_cross_entropy(
            x.requires_grad_(),
            weight,
            labels,
            weights,
            vocab_size=V,
            chunk_tokens=chunk_tokens,
        )[0].backward()
        torch.testing.assert_close(grad_slot(weight).main, times * want)


def test_without_gradients_nothing_is_added_to_the_main_gradient():
    x, weight, labels, weights = inputs()
    want = twin(x, weight, labels, weights, 0.0)
    weight.requires_grad_()
    grad_slot(weight).main = torch.zeros_like(weight)
    with torch.no_grad():
        total, losses = linear_cross_entropy(
            x.requires_grad_(), weight, labels, weights, vocab_size=V
        )
    torch.testing.assert_close(total, want[0])
    torch.testing.assert_close(losses, want[1])
    assert not grad_slot(weight).main.any()


def test_a_head_without_tokens_has_no_gradient():
    _, weight, labels, weights = inputs()
    x = torch.zeros(0, B, D, dtype=torch.float64, requires_grad=True)
    empty = {"labels": labels[:, :0], "weights": weights[:, :0]}
    linear_cross_entropy(x, weight.requires_grad_(), vocab_size=V, **empty)[0].backward()
    assert not weight.grad.any()


def test_linear_cross_entropy_adds_into_the_main_gradient_and_calls_on_ready():
    x, weight, labels, weights = inputs()
    want = twin(x, weight, labels, weights, 0.0)[3]
    weight.requires_grad_()
    grad_slot(weight).main = torch.ones_like(weight)
    calls = []
    grad_slot(weight).on_ready = lambda: calls.append(True)
    loss, _ = linear_cross_entropy(x.requires_grad_(), weight, labels, weights, vocab_size=V)
    loss.backward()
    assert weight.grad is None
    assert calls == [True]
    torch.testing.assert_close(grad_slot(weight).main, want + 1)


def test_a_gradient_other_than_one_is_refused():
    x, weight, labels, weights = inputs()
    total, _ = linear_cross_entropy(x.requires_grad_(), weight, labels, weights, vocab_size=V)
    with pytest.raises(RuntimeError, match="root of backward"):
        (2 * total).backward()


class LiveLogits(TorchDispatchMode):
    """Counts the chunks of logits that are alive whenever one is made."""

    def __init__(self):
        super().__init__()
        self.made, self.most = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.name() == "aten::mm" and result.shape == (5, V):
            self.made.append(ref(result))
            self.most = max(self.most, sum(chunk() is not None for chunk in self.made))
        return result


def test_one_chunk_of_logits_is_in_memory_at_a_time():
    x, weight, labels, weights = inputs()
    with LiveLogits() as seen:
        linear_cross_entropy(
            x.requires_grad_(), weight, labels, weights, vocab_size=V, chunk_tokens=5
        )
    assert len(seen.made) == 3
    assert seen.most == 1


def test_a_token_without_weight_cannot_spoil_the_loss():
    x, weight, labels, weights = inputs()
    x[2:, 1] = torch.inf  # the positions of row 1 that carry no weight
    total, _ = linear_cross_entropy(x.requires_grad_(), weight, labels, weights, vocab_size=V)
    assert torch.isfinite(total)


def test_a_head_too_small_for_the_vocabulary_is_refused():
    x, weight, labels, weights = inputs()
    with pytest.raises(ValueError, match="cannot hold a vocabulary of 12"):
        linear_cross_entropy(x, weight, labels, weights, vocab_size=12)


def ranks_agree(sequence_parallel, label_smoothing, padded, scale):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=3))
    x, weight, labels, weights = inputs(scale=scale)
    z_loss = label_smoothing / 10
    want = twin(x, weight, labels, weights, label_smoothing, z_loss=z_loss)
    local = own_slice(F.pad(weight, (0, 0, 0, padded - V)), ctx.tp).clone()
    local[max(0, min(V - ctx.tp.rank * len(local), len(local))) :] = 100.0  # must not matter
    mine = (own_slice(x, ctx.tp) if sequence_parallel else x).clone().requires_grad_()
    total, losses = linear_cross_entropy(
        mine,
        local.requires_grad_(),
        labels,
        weights,
        vocab_size=V,
        axis=ctx.tp,
        sequence_parallel=sequence_parallel,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        chunk_tokens=4,
    )
    total.backward()
    dx = all_gather(mine.grad, ctx.tp) if sequence_parallel else mine.grad
    dw = all_gather(local.grad, ctx.tp)
    for got, expected in zip((total, losses, dx, dw[:V]), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    assert not dw[V:].any()
    ctx.destroy()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize(("padded", "scale"), [(12, 1.0), (18, 1.0), (12, 1000.0)])
def test_linear_cross_entropy_split_over_ranks_equals_one_rank(
    sequence_parallel, label_smoothing, padded, scale
):
    run_ranks(ranks_agree, 3, sequence_parallel, label_smoothing, padded, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_kernels_equal_plain_torch_on_a_gpu(label_smoothing):
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(50, 2, 64, device="cuda", generator=generator)
    weight = torch.randn(9000, 64, device="cuda", generator=generator)
    labels = torch.randint(0, 8990, (2, 50), device="cuda", generator=generator)
    weights = torch.rand(2, 50, device="cuda", generator=generator)
    weights[0, :7] = 0
    want = twin(x.double(), weight[:8990].double(), labels, weights.double(), label_smoothing)
    x.requires_grad_()
    weight.requires_grad_()
    total, losses = linear_cross_entropy(
        x, weight, labels, weights, vocab_size=8990, label_smoothing=label_smoothing
    )
    total.backward()
    got = (total, losses, x.grad, weight.grad[:8990])
    for value, expected in zip(got, want, strict=True):
        error = (value.double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-5
    assert not weight.grad[8990:].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gemm_accumulates_in_float32_whatever_its_factors(dtype, device):
    a = torch.randn(512, 96, device=device, dtype=dtype).t()
    b = torch.randn(512, 64, device=device, dtype=dtype)
    total = torch.randn(96, 64, device=device)
    product = a.double() @ b.double()
    want = total.double() + product
    accumulate_matmul(total, a, b)
    assert (total.double() - want).abs().max() / want.abs().max() < 1e-5
    total.fill_(torch.nan)
    accumulate_matmul(total, a, b, overwrite=True)
    assert (total.double() - product).abs().max() / product.abs().max() < 1e-5
