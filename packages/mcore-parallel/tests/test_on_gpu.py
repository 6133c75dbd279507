"""Kernels and what uses them on a GPU, each against its plain twin, at real shapes too."""

import pytest
import torch

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.kernels.adam import adamw_update
from mcore_parallel.kernels.embedding import add_rows_
from mcore_parallel.kernels.loss import row_stats, softmax_gradient_
from mcore_parallel.kernels.rounding import round_by_salt_
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.tensor_parallel.embedding import VocabParallelEmbedding

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "width", "kind"),
    [
        (1000, 70, "spread"),
        (11, 512, "few"),
        (128256, 4096, "spread"),
        (128256, 4096, "one"),
        (64128, 4096, "half"),
    ],
)
def test_rows_are_added_by_id_as_plain_torch_does_and_always_the_same(
    dtype, vocab, width, kind
):
    torch.manual_seed(0)
    num_rows = 8192 if width == 4096 else 777
    ids = torch.randint(0, vocab, (num_rows,), device="cuda")
    if kind == "one":
        ids.fill_(vocab - 1)
    if kind == "half":  # what another rank holds
        ids = torch.where(ids % 2 == 0, ids, -ids - 1)
        ids[7] = vocab
    rows = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    before = torch.randn(vocab, width, device="cuda", dtype=dtype)
    totals = [before.clone() for _ in range(2)]
    for total in totals:
        add_rows_.launch(total, ids, rows)
    assert torch.equal(*totals)
    want = before.to(torch.float64, copy=True)
    add_rows_.reference(want, ids, rows)
    assert error(totals[0] - before, want - before.double()) < TOLERANCE[dtype]


def test_an_embedding_adds_to_its_main_gradient_what_autograd_would():
    torch.manual_seed(0)
    layer = VocabParallelEmbedding(500, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 500, (2, 300), device="cuda")
    grad = torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16)
    layer(ids).backward(grad)
    want = layer.weight.grad
    layer.weight.grad = None
    grad_slot(layer.weight).main = torch.ones(500, 64, device="cuda")
    layer(ids).backward(grad)
    assert layer.weight.grad is None
    assert error(grad_slot(layer.weight).main - 1, want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4097, 10_000_000])
def test_the_optimizer_kernel_is_torchs_to_the_last_bits(size, parameter, moments):
    torch.manual_seed(0)
    main = torch.randn(size, device="cuda")
    mean, square = (torch.zeros(size, device="cuda", dtype=moments) for _ in range(2))
    fused = [main, torch.empty(0), mean, square]
    plain = [t.clone() for t in fused]
    for tensors in (fused, plain):
        tensors.append(tensors[0] if parameter == torch.float32 else tensors[0].to(parameter))
    for step in range(1, 4):
        grad = torch.randn(size, device="cuda")
        scale = torch.tensor(0.3, dtype=torch.float64, device="cuda") if step == 2 else 0.5
        for tensors, update in ((fused, adamw_update.launch), (plain, adamw_update.reference)):
            tensors[1] = grad.clone()
            update(
                *tensors,
                num_steps=step,
                lr=1e-2,
                weight_decay=0.1,
                betas=(0.9, 0.95),
                epsilon=1e-8,
                grad_scale=scale,
            )
            assert torch.equal(tensors[1], grad)
    for got, want in zip(fused, plain, strict=True):
        # A difference in the last bit of float32 may turn one rounding to 16 bits.
        assert error(got, want) < (1e-6 if got.dtype == moments == torch.float32 else 1e-2)
    if moments == torch.float32:
        assert error(fused[0], plain[0]) < 1e-6
    assert torch.equal(fused[4], fused[0].to(parameter))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [100, 4097, 10_000_000])
def test_a_flag_on_the_device_masks_the_update_of_kernel_and_reference(
    size, parameter, moments
):
    torch.manual_seed(0)
    main, grad, mean = (torch.randn(size, device="cuda") for _ in range(3))
    before = [main, grad, mean.to(moments), mean.square().to(moments), main.to(parameter)]
    options = {"num_steps": 2, "lr": 1e-2, "weight_decay": 0.1, "grad_scale": 0.5}
    options |= {"betas": (0.9, 0.95), "epsilon": 1e-8}
    found = {}
    for name, update in (("kernel", adamw_update.launch), ("plain", adamw_update.reference)):
        for flag in (None, True, False):
            tensors = [tensor.clone() for tensor in before]
            if parameter == torch.float32:
                tensors[4] = tensors[0]
            is_applied = None if flag is None else torch.tensor(flag, device="cuda")
            update(*tensors, is_applied=is_applied, **options)
            found[name, flag] = tensors
        assert not torch.equal(found[name, None][0], main)
        assert all(
            torch.equal(*p) for p in zip(found[name, True], found[name, None], strict=True)
        )
        assert all(torch.equal(*p) for p in zip(found[name, False], before, strict=True))
    for got, want in zip(found["kernel", True], found["plain", True], strict=True):
        # A difference in the last bit of float32 may turn one rounding to 16 bits.
        assert error(got, want) < (1e-6 if got.dtype == torch.float32 else 1e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_masked_steps_make_no_host_sync_and_no_copies():
    layer = torch.nn.Linear(1024, 1024).bfloat16().cuda()
    data_parallel = DataParallel([layer], ParallelContext.single("cuda"), DataParallelConfig())
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    data_parallel.zero_grad()
    data_parallel.finish()
    for unit in data_parallel.units:
        unit.own_grads().fill_(1e-3)
    flags = [torch.tensor(flag, device="cuda") for flag in (True, False)]
    optimizer.step(1e-3, 0.1, is_applied=flags[0])  # compiles
    before, used = layer.weight.clone(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step(1e-3, 0.1, is_applied=flags[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    peak = torch.cuda.max_memory_allocated()  # torch.equal below allocates too
    assert peak < used + (1 << 20)
    assert torch.equal(layer.weight, before)
    optimizer.step(1e-2, 0.1, is_applied=flags[0])
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("size", [1, 4097, 10_000_000])
def test_the_rounding_kernel_has_the_bits_of_plain_torch(size):
    wide = torch.randn(size, device="cuda")
    for salt in (0, 0x7FFFFFFF):
        got, want = (torch.empty_like(wide, dtype=torch.bfloat16) for _ in range(2))
        round_by_salt_.launch(got, wide, salt)
        round_by_salt_.reference(want, wide, salt)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_an_optimizer_step_is_the_same_with_and_without_its_kernel(monkeypatch):
    import mcore_parallel.optimizers.adamw as zero

    def train():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 200), torch.nn.LayerNorm(200), torch.nn.Linear(200, 64)]
        model = torch.nn.Sequential(*layers).bfloat16().cuda()
        config = DataParallelConfig(use_distributed_optimizer=True)
        data_parallel = DataParallel([model], ParallelContext.single("cuda"), config)
        optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
        for step in range(3):
            data_parallel.zero_grad()
            torch.manual_seed(step)
            x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
            model(x).square().sum().backward()
            data_parallel.finish()
            optimizer.step(1e-3, 0.1, optimizer.grad_norm().reciprocal())
        pieces = [p for s in optimizer.named_shards().values() for p in s.pieces]
        return [piece.data for piece in pieces]

    fused = train()
    monkeypatch.setattr(zero, "adamw_update", zero.adamw_update.reference)
    for got, want in zip(fused, train(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "width"), [(128256, 128256), (50304, 50257), (9001, 3), (64, 0)]
)
def test_the_statistics_of_rows_equal_plain_torch(dtype, vocab, width):
    torch.manual_seed(0)
    logits = torch.randn(64, vocab, device="cuda", dtype=dtype) * 5
    labels = torch.randint(0, vocab, (64,), device="cuda")
    got = row_stats.launch(logits, labels, width, 0)
    want = row_stats.reference(logits.double(), labels, width, 0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "width"), [(128256, 128256), (50304, 50257), (64, 0)])
def test_the_gradient_of_logits_equals_plain_torch(dtype, vocab, width):
    torch.manual_seed(0)
    logits = torch.randn(64, vocab, device="cuda", dtype=dtype)
    labels = torch.randint(0, vocab, (64,), device="cuda")
    log_sum = logits.double().logsumexp(1)
    weights = torch.rand(64, device="cuda")
    weights[3] = 0.0
    want, others = logits.double(), (width, 0, 0.1, vocab)
    softmax_gradient_.reference(want, labels, log_sum, weights.double(), *others)
    softmax_gradient_.launch(logits, labels, log_sum.float(), weights, *others)
    if width:
        assert error(logits, want) < TOLERANCE[dtype]
    else:
        assert not logits.any()
