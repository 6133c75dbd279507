"""Optimizer state in host memory: how much of it, and the same bits in every share."""

import pytest
import torch
from torch import nn

from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel import distributed_optimizer
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.offloading.host_updates import HostPiece, HostUpdates
from mcore_parallel.offloading.state_file import StateFile
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig, SGDConfig
from mcore_parallel.optimizers.sgd import SGD

RULES = {"adam": AdamW(AdamConfig()), "sgd": SGD(SGDConfig())}


def built(share, dtype=torch.bfloat16, rule="adam", device="cpu", has_main=True, folder=""):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.Linear(50, 20)).to(dtype)
    ctx = ParallelContext.single(device)
    config = DataParallelConfig(ddp_bucket_size=1200)
    data_parallel = DataParallel([model.to(device)], ctx, config)
    assert len(data_parallel.units) > 1
    optimizer = DistributedOptimizer(
        data_parallel, RULES[rule], host_share=share, has_main=has_main, host_folder=folder
    )
    return model, data_parallel, optimizer


def train(model, data_parallel, optimizer, steps=range(3)):
    device = next(model.parameters()).device
    for step in steps:
        data_parallel.zero_grad()
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(step))
        model(x.to(device, next(model.parameters()).dtype)).square().sum().backward()
        data_parallel.finish()
        scale = 0.5 / optimizer.grad_norm()
        optimizer.step(0.01, 0.1, scale)
    return state_of(data_parallel, optimizer)


def state_of(data_parallel, optimizer):
    shards = {**optimizer.named_shards(), **data_parallel.weight_shards()}
    return {
        (name, piece.offsets): piece.data.cpu().clone()
        for name, shard in shards.items()
        for piece in shard.pieces
    }


def whole(state):
    """Join pieces of one tensor that lie in two memories, by its flat elements."""
    found = {}
    for (name, offsets), data in sorted(state.items()):
        found.setdefault(name, []).append((offsets, data))
    return {n: torch.cat([d.flatten() for _, d in each]) for n, each in found.items()}


def same(a, b):
    assert a.keys() == b.keys()
    return all((a[name] == tensor).all() for name, tensor in b.items())


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(
    ("dtype", "has_main"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)],
)
def test_any_share_on_the_host_gives_the_same_bits(
    rule, dtype, has_main, tmp_path, monkeypatch
):
    expected = whole(train(*built(0.0, dtype, rule, has_main=has_main)))
    monkeypatch.setattr(distributed_optimizer, "_HOST_RUN", 192)  # runs are longer
    for share, folder in ((0.3, ""), (1.0, ""), (0.3, tmp_path / "new"), (1.0, tmp_path)):
        trained = built(share, dtype, rule, has_main=has_main, folder=str(folder))
        assert same(whole(train(*trained)), expected)
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]  # no file has a name


def test_state_that_a_drive_cannot_hold_is_refused_before_any_is_made(tmp_path):
    with pytest.raises(
        ValueError, match=r"MiB free and this rank's state takes 1,099,511,627,776 MiB"
    ):
        StateFile(str(tmp_path), 1 << 60)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot hold the state: Not a directory"):
        StateFile(str(tmp_path / "file" / "below"), 8)


def test_the_share_is_what_was_asked_for_to_a_few_elements():
    for share in (0.25, 0.5, 1.0):
        _, data_parallel, optimizer = built(share)
        runs = [run for each in optimizer._runs.values() for run in each]
        total = sum(unit.own_grads().numel() for unit in data_parallel.units)
        held = sum(s.main.numel() for each in optimizer._segments.values() for s in each)
        on_host = sum(
            s.main.numel() for each in optimizer._segments.values() for s in each if s.on_host
        )
        assert held == total
        assert 0 <= on_host - share * total <= 64
        assert any(run.on_host for run in runs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_that_is_loaded_reaches_the_weights_and_goes_on_to_the_last_bit(dtype):
    expected = train(*built(0.5, dtype), steps=range(4))
    first = built(0.5, dtype)
    saved = train(*first, steps=range(2))
    model, data_parallel, optimizer = built(0.5, dtype)
    train(model, data_parallel, optimizer, steps=range(7, 9))
    shards = {**optimizer.named_shards(), **data_parallel.weight_shards()}
    for name, shard in shards.items():
        for piece in shard.pieces:
            piece.data.copy_(saved[name, piece.offsets])
    optimizer.num_steps = 2
    optimizer.refresh(from_parameters=dtype == torch.float32)
    assert same(train(model, data_parallel, optimizer, steps=range(2, 4)), expected)


def test_weights_set_behind_the_host_are_told():
    model, data_parallel, optimizer = built(1.0, torch.float32)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="refresh"):
        train(model, data_parallel, optimizer)


def test_options_without_effect_are_refused():
    for options, message in (
        ({"optimizer_offload_fraction": 0.5}, "no effect without"),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5}, "not above 1"),
        ({"optimizer_offload_dir": "nvme"}, "dir has no effect without"),
        ({"cpu_offloading": True}, "needs --cpu-offloading-num-layers"),
        ({"cpu_offloading_num_layers": 2}, "no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            OffloadConfig(**options)


@pytest.mark.gpu
def test_updates_on_the_host_follow_gradients_of_a_gpu():
    """Many pieces through two buffers, and weights that are used at once."""
    size, device = 1 << 22, torch.device("cuda")
    host = HostUpdates(device, 4)
    pieces, expected = [], []
    for place in range(9):
        main = torch.arange(size, dtype=torch.float32) / size + place
        grad = torch.full((size,), float(place), device=device)
        weights = torch.zeros(size, dtype=torch.bfloat16, device=device)
        pieces.append(HostPiece(main, grad, weights))
        expected.append(main - place)
    for _ in range(2):
        for piece in pieces:
            piece.grad.mul_(2).div_(2)  # still queued when the update begins

        def update(index, grad, weights):
            pieces[index].main.sub_(grad)
            weights.copy_(pieces[index].main)

        with host.updating(pieces) as updates:
            for _ in range(3):
                updates.apply(3, update)
        found = [piece.weights.float() for piece in pieces]
        for place, (piece, got) in enumerate(zip(pieces, found, strict=True)):
            assert (piece.main == expected[place]).all()
            assert (got.cpu() == expected[place].bfloat16().float()).all()
        expected = [each - place for place, each in enumerate(expected)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_trains_with_state_on_the_host_as_without(dtype):
    expected = whole(train(*built(0.0, dtype, device="cuda"), steps=range(6)))
    for share in (0.5, 1.0):
        found = whole(train(*built(share, dtype, device="cuda"), steps=range(6)))
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4)
