"""Update rules: against torch's, and against their papers' formulas by hand."""

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adafactor import Adafactor
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import (
    AdafactorConfig,
    AdamConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeConfig,
    SoapConfig,
)
from mcore_parallel.optimizers.lion import Lion
from mcore_parallel.optimizers.muon import COEFFICIENTS, Muon, orthogonalize
from mcore_parallel.optimizers.schedule_free import ScheduleFree
from mcore_parallel.optimizers.soap import Soap

SHAPES = [(6, 10), (12, 5), (8, 8)]


def matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return nn.ParameterList([nn.Parameter(weight) for weight in weights])


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def train(rule, dtype, num_steps, lr, weight_decay):
    """Weights after steps whose gradients are given."""
    model = matrices(dtype)
    engine = DataParallel([model], ParallelContext.single(), DataParallelConfig())
    optimizer = DistributedOptimizer(engine, rule)
    for step in range(1, num_steps + 1):
        update(optimizer, model, step, lr, weight_decay)
    return [parameter.detach() for parameter in model]


def update(optimizer, model, step, lr, weight_decay, **options):
    engine = optimizer.data_parallel
    engine.zero_grad()
    engine.finish()
    for parameter, gradient in zip(model, gradients(step, model[0].dtype), strict=True):
        grad_slot(parameter).main.copy_(gradient)
    optimizer.step(lr, weight_decay, **options)


@pytest.mark.parametrize("use_nesterov", [False, True])
@pytest.mark.parametrize(
    ("mode", "extra", "theirs"),
    [("shape_scaling", 1.0, "original"), ("spectral", 0.2, "match_rms_adamw")],
)
def test_muon_is_that_of_torch(use_nesterov, mode, extra, theirs):
    config = MuonConfig(
        muon_momentum=0.9,
        muon_nesterov=use_nesterov,
        muon_coefficient_type="simple",
        muon_scale_mode=mode,
        muon_extra_scale_factor=extra,
    )
    found = train(Muon(config), torch.float32, 4, 0.05, 0.3)
    reference = matrices()
    options = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.9, "nesterov": use_nesterov}
    muon = torch.optim.Muon(reference, adjust_lr_fn=theirs, **options)
    for step in range(1, 5):
        for parameter, gradient in zip(reference, gradients(step, torch.float32), strict=True):
            parameter.grad = gradient
        muon.step()
    for ours, expected in zip(found, reference, strict=True):
        # The iteration in bfloat16 gives the same bits; the update is rounded once more.
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "steps", "low", "high"),
    [("simple", 5, 0.68, 1.14), ("quintic", 5, 0.7, 1.2), ("polar_express", 8, 0.98, 1.01)],
)
def test_singular_values_come_near_one(kind, steps, low, high):
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(20, 12, generator=generator).double())
    right, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator).double())
    values = torch.logspace(-2, 0, 12, dtype=torch.float64)
    x = left @ torch.diag(values) @ right.mT
    stack = torch.stack([x, 7 * x])
    found = orthogonalize(stack.clone(), steps, kind)
    for one, both in zip(stack, found, strict=True):
        alone = orthogonalize(one[None].clone(), steps, kind)[0]
        torch.testing.assert_close(alone, both, rtol=1e-12, atol=1e-12)
        new_left, singular, new_right = torch.linalg.svd(alone, full_matrices=False)
        assert low < singular.min() <= singular.max() < high
        # Singular vectors stay: the polar factor is that of the matrix.
        polar = left @ right.mT
        torch.testing.assert_close(new_left @ new_right, polar, rtol=1e-7, atol=1e-7)
        wide = orthogonalize(one.mT[None].clone(), steps, kind)[0]
        torch.testing.assert_close(wide.mT, alone, rtol=1e-12, atol=1e-12)


def test_a_long_iteration_repeats_its_last_polynomial():
    x = torch.eye(3, dtype=torch.float64)[None] * 0.5
    a, b, c = COEFFICIENTS["quintic"][-1]
    five, six = (orthogonalize(x.clone(), steps, "quintic")[0, 0, 0] for steps in (5, 6))
    assert six.item() == pytest.approx((a * five + b * five**3 + c * five**5).item())


@pytest.mark.parametrize("method", ["adamuon", "normuon"])
def test_second_moments_are_those_of_the_papers(method):
    config = MuonConfig(muon_moment2_method=method, muon_momentum=0.8, muon_beta2=0.7)
    found = train(Muon(config), torch.float64, 3, 0.1, 0.4)
    expected = [weight.detach().clone() for weight in matrices(torch.float64)]
    state = [(torch.zeros_like(w), torch.zeros_like(w)) for w in expected]
    for step in range(1, 4):
        for weight, (mean, square), gradient in zip(
            expected, state, gradients(step, torch.float64), strict=True
        ):
            mean.mul_(0.8).add_(gradient, alpha=0.2)
            signs = mean.sign() if method == "adamuon" else mean.clone()
            unit = orthogonalize(signs[None], 5, "quintic")[0]
            now = unit**2
            if method == "normuon":
                now = now.mean(1, keepdim=True).expand_as(unit)
            square.mul_(0.7).add_(now, alpha=0.3)
            scaled = unit / (square.sqrt() + 1e-8)
            scaled *= 0.2 * weight.numel() ** 0.5 / scaled.norm()
            weight.mul_(1 - 0.1 * 0.4).sub_(0.1 * scaled)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"), [("spectral", 2.0), ("unit_rms_norm", 0.5), ("shape_scaling", 1.0)]
)
def test_scales_of_a_matrix_of_one_output_and_four_inputs(mode, expected):
    rule = Muon(MuonConfig(muon_scale_mode=mode, muon_extra_scale_factor=3.0))
    assert rule.factor((1, 4)) == 3.0 * expected
    assert Muon(MuonConfig(muon_scale_mode="shape_scaling")).factor((4, 1)) == 2.0


def ramped(x):
    """Add 0 to 5e-2 of the mean eigenvalue to the diagonal, which tells equal ones apart."""
    return x + torch.diag(torch.linspace(0, 5e-2, len(x)).double() * x.trace() / len(x))


def soap_by_hand(weight, state, gradient, step, lr):
    """Algorithm 3 of Vyas et al. for one matrix, with exact eigenvectors at the first step."""
    beta, eps = 0.9, 1e-8
    # By lerp: the last bit of a matrix of low rank decides the eigenvectors of its null space.
    state["L"] = state["L"].lerp(gradient @ gradient.T, 1 - beta)
    state["R"] = state["R"].lerp(gradient.T @ gradient, 1 - beta)
    if step == 1:
        state["QL"] = torch.linalg.eigh(ramped(state["L"]))[1].flip(1)
        state["QR"] = torch.linalg.eigh(ramped(state["R"]))[1].flip(1)
    left, right = state["QL"], state["QR"]
    state["M"] = beta * state["M"] + (1 - beta) * gradient
    rotated = left.T @ gradient @ right
    state["V"] = beta * state["V"] + (1 - beta) * rotated**2
    mean = left.T @ state["M"] @ right / (1 - beta**step)
    direction = mean / ((state["V"] / (1 - beta**step)).sqrt() + eps)
    weight -= lr * left @ direction @ right.T
    if step % 2 == 0:
        for dim, (side, basis) in enumerate((("L", "QL"), ("R", "QR"))):
            Q, product = state[basis], ramped(state[side])
            order = torch.diag(Q.T @ product @ Q).argsort(descending=True)
            state["V"] = state["V"].index_select(dim, order)
            state[basis] = torch.linalg.qr(product @ Q[:, order])[0]


def test_soap_is_adam_in_the_eigenbasis():
    betas = {"soap_beta1": 0.9, "soap_beta2": 0.9, "soap_shampoo_beta": 0.9}
    found = train(
        Soap(SoapConfig(soap_precondition_frequency=2, **betas)), torch.float64, 5, 0.1, 0.0
    )
    for index, weight in enumerate(w.detach().clone() for w in matrices(torch.float64)):
        rows, columns = weight.shape
        state = {"L": torch.zeros(rows, rows), "R": torch.zeros(columns, columns)}
        state = {name: each.double() for name, each in state.items()}
        state |= {"M": torch.zeros_like(weight), "V": torch.zeros_like(weight)}
        for step in range(1, 6):
            soap_by_hand(weight, state, gradients(step, torch.float64)[index], step, 0.1)
        # Rounding of about 1e-16 in the null space of the first gradient, over eps of 1e-8.
        torch.testing.assert_close(found[index], weight, rtol=0.0, atol=1e-7)


def test_soap_leaves_long_sides_unrotated():
    shapes = Soap(SoapConfig(soap_max_dim=8)).state_shapes((8, 10))
    assert shapes == {
        "exp_avg": (8, 10),
        "exp_avg_sq": (8, 10),
        "left": (8, 8),
        "left_basis": (8, 8),
    }
    found = train(Soap(SoapConfig(soap_max_dim=1)), torch.float64, 3, 0.1, 0.0)
    reference = matrices(torch.float64)
    adam = torch.optim.Adam(reference, lr=0.1, betas=(0.95, 0.95), eps=1e-8)
    for step in range(1, 4):
        for parameter, gradient in zip(reference, gradients(step, torch.float64), strict=True):
            parameter.grad = gradient
        adam.step()
    for ours, expected in zip(found, reference, strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-10, atol=1e-12)


def test_lion_is_algorithm_2_of_its_paper():
    found = train(Lion(LionConfig(lion_beta1=0.8, lion_beta2=0.7)), torch.float64, 4, 0.1, 0.4)
    expected = [weight.detach().clone() for weight in matrices(torch.float64)]
    means = [torch.zeros_like(weight) for weight in expected]
    for step in range(1, 5):
        for weight, mean, gradient in zip(
            expected, means, gradients(step, torch.float64), strict=True
        ):
            direction = (0.8 * mean + 0.2 * gradient).sign()
            weight.sub_(0.1 * (direction + 0.4 * weight))
            mean.mul_(0.7).add_(gradient, alpha=0.3)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_adafactor_is_that_of_torch_without_the_scale_of_the_weights():
    found = train(Adafactor(AdafactorConfig()), torch.float64, 4, 0.1, 0.4)
    reference = matrices(torch.float64)
    # torch multiplies the rate by the larger of the root mean square of the weights and eps[1].
    options = {"lr": 1e-4, "eps": (None, 1e3), "weight_decay": 0.4e3}
    adafactor = torch.optim.Adafactor(reference, **options)
    for step in range(1, 5):
        for parameter, gradient in zip(reference, gradients(step, torch.float64), strict=True):
            parameter.grad = gradient
        adafactor.step()
    for ours, expected in zip(found, reference, strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("r", [0.0, 1.0])
def test_schedule_free_is_algorithm_1_of_its_paper(r):
    betas = {"schedule_free_beta1": 0.8, "schedule_free_beta2": 0.7, "schedule_free_r": r}
    rule = ScheduleFree(ScheduleFreeConfig(**betas))
    model = matrices(torch.float64)
    engine = DataParallel([model], ParallelContext.single(), DataParallelConfig())
    optimizer = DistributedOptimizer(engine, rule)
    expected = [w.detach().clone() for w in model]
    iterates = [w.clone() for w in expected]
    averages = [w.clone() for w in expected]
    squares = [torch.zeros_like(w) for w in expected]
    for step in range(1, 5):
        update(optimizer, model, step, 0.1, 0.4)
        weights = [float(s) ** r for s in range(1, step + 1)]
        share = weights[-1] / sum(weights)
        for index, gradient in enumerate(gradients(step, torch.float64)):
            y, z, x = expected[index], iterates[index], averages[index]
            squares[index] = 0.7 * squares[index] + 0.3 * gradient**2
            root = (squares[index] / (1 - 0.7**step)).sqrt() + 1e-8
            z -= 0.1 * (gradient / root + 0.4 * y)
            averages[index] = (1 - share) * x + share * z
            expected[index] = 0.2 * z + 0.8 * averages[index]
    for ours, theirs in zip(model, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-12)
    with optimizer.averaged():
        for ours, theirs in zip(model, averages, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "dtype", "has_main"),
    [
        (AdamW(AdamConfig()), torch.float64, True),
        (AdamW(AdamConfig()), torch.float32, True),
        (AdamW(AdamConfig(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")), torch.float32, True),
        (AdamW(AdamConfig()), torch.bfloat16, True),
        (AdamW(AdamConfig(exp_avg_dtype="bf16")), torch.bfloat16, False),
        (Lion(LionConfig()), torch.bfloat16, True),
    ],
)
def test_a_masked_step_is_the_plain_step_or_changes_no_bit(rule, dtype, has_main, monkeypatch):
    kept = []
    for masks in ([None] * 3, [True, False, True, True]):
        model = matrices(dtype)
        engine = DataParallel([model], ParallelContext.single(), DataParallelConfig())
        optimizer = DistributedOptimizer(engine, rule, has_main=has_main)
        if isinstance(rule, AdamW):  # its masked updates make no copies
            monkeypatch.setattr(Tensor, "clone", None)
        for mask in masks:
            step = optimizer.num_steps + 1
            is_applied = None if mask is None else torch.tensor(mask)
            update(optimizer, model, step, 0.1, 0.4, is_applied=is_applied)
            optimizer.num_steps -= mask is False
        monkeypatch.undo()
        pieces = [p.data for s in optimizer.named_shards().values() for p in s.pieces]
        kept.append([*pieces, *(weight.detach() for weight in model)])
    assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))


@pytest.mark.parametrize("rule", [AdamW(AdamConfig()), Muon(MuonConfig())], ids=type)
def test_an_average_follows_the_weights_and_no_step_that_is_left_out(rule):
    model = matrices()
    engine = DataParallel([model], ParallelContext.single(), DataParallelConfig())
    optimizer = DistributedOptimizer(engine, rule, ema_decay=0.75)
    averages = [weight.detach().clone() for weight in model]
    for step in range(1, 5):
        before = [weight.detach().clone() for weight in model]
        is_applied = torch.tensor(step != 3)
        update(optimizer, model, step, 0.1, 0.4, is_applied=is_applied)
        if step == 3:
            assert all(torch.equal(*pair) for pair in zip(before, model, strict=True))
            optimizer.num_steps -= 1
            continue
        averages = [0.75 * a + 0.25 * w for a, w in zip(averages, model, strict=True)]
    trained = [weight.detach().clone() for weight in model]
    with optimizer.averaged():
        for ours, theirs in zip(model, averages, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(trained, model, strict=True))
