"""Rows read from the memory of other ranks: by the kernels, and as gathers bring them."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from warm_ranks import run_ranks

from mcore_moe import MoEConfig, Routing
from mcore_moe.dispatch.protocol import DispatchOptions
from mcore_moe.dispatch.symmetric import Gathered, Peers, SymmetricDispatcher
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch.launcher import initialize, launch_local, shut_down
from mcore_parallel.mesh import ParallelContext

E, K = 8, 3
KINDS = ("uneven", "uneven skewed", "equal", "equal skewed")


class SymmetricMemory:
    """What torch publishes of its symmetric memory, in files that ranks map.

    Its barrier lets every other rank go late, so that what is written too early is read.
    """

    def __init__(self, folder):
        self.folder, self.barriers, self.paths = folder, [], []

    def empty(self, size, dtype, device):
        assert device.type == "cpu"
        path = f"{self.folder}/{torch.distributed.get_rank()}-{len(self.paths)}"
        self.paths.append(path)
        return torch.from_file(path, shared=True, size=size, dtype=dtype)

    def rendezvous(self, buffer, group):
        paths = [None] * group.size()
        torch.distributed.all_gather_object(paths, self.paths[-1], group=group)
        return SymmetricHandle(group, paths, buffer.numel(), self.barriers)


class SymmetricHandle:
    def __init__(self, group, paths, size, barriers):
        self.group, self.size, self.barriers = group, size, barriers
        self.seen = [
            torch.from_file(p, shared=True, size=size, dtype=torch.uint8) for p in paths
        ]

    def barrier(self):
        self.barriers.append(self)
        torch.distributed.barrier(self.group)
        time.sleep(0.02 * (self.group.rank() % 2))

    def get_remote_tensor(self, peer, shape, dtype):
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.seen[peer][:num_bytes].view(dtype).view(shape)


def draw(rank, kind, seed, width, dtype, fewer=1):
    """Tokens, weights and choices of a rank, on the CPU: up to 60 tokens, or 17 on each."""
    number = 17 if "equal" in kind else (40, 0, 60, 1)[rank % 4]
    number = -(-number // fewer)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(number, width, generator=generator, dtype=torch.float64).to(dtype)
    scores = torch.rand(number, E, generator=generator, dtype=torch.float64)
    if "skewed" in kind:
        scores = scores * 0.01 + torch.arange(E)
    probs, ids = scores.topk(K)
    keep = torch.rand(ids.shape, generator=generator) < 0.8
    return x, probs.to(torch.promote_types(dtype, torch.float32)), ids, keep


def there_and_back(dispatcher, x, probs, ids, keep, *, equal_tokens):
    """Experts weigh what they read; gradients are those of the sum of squares.

    Rows behind those of the last expert are never read.
    """
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    sent = dispatcher.dispatch(x, Routing(ids, probs, keep), DispatchOptions(equal_tokens))
    rows = (sent.x * (sent.probs + 0.5)).to(x.dtype)
    behind = torch.arange(len(rows), device=x.device) >= sent.plan.offsets[-1]
    y = dispatcher.combine(rows.masked_fill(behind[:, None], torch.nan), sent.handle)
    grads = torch.autograd.grad(y.float().square().sum(), (x, probs))
    return y.detach(), *grads, sent.plan.offsets


def check_read(kind, ep, device, dtype, folder=None):
    if folder:
        with pytest.MonkeyPatch.context() as patch:  # the interpreter runs the kernels
            patch.setenv("TRITON_INTERPRET", "1")
            import mcore_moe.kernels.peer_rows  # noqa: F401
        from triton_interpreter import prepare

        prepare()
    ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=ep))
    memory = SymmetricMemory(folder) if folder else None
    compare_ways(ctx, kind, device, dtype, memory)
    ctx.destroy()
    return len(memory.barriers) if memory else None


def compare_ways(ctx, kind, device, dtype, memory=None, plain_device="cpu"):
    is_interpreted = memory is not None
    peers = Peers(ctx.ep, torch.device(device), memory)
    config = MoEConfig(num_experts=E, moe_router_topk=K)
    plain, read = (
        SymmetricDispatcher(config, ctx.ep, lambda *_, way=way: way)
        for way in (Gathered(ctx.ep), peers)
    )
    run = partial(there_and_back, equal_tokens="equal" in kind)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 1.6e-2}[dtype]
    for seed, width in enumerate((24, 2048, 8)):
        # The interpreter takes milliseconds for each row.
        inputs = draw(
            ctx.global_rank, kind, seed, width, dtype, fewer=10 if is_interpreted else 1
        )
        got = run(read, *(part.to(device) for part in inputs))
        expected = run(plain, *(part.to(plain_device) for part in inputs))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=tolerance, atol=tolerance)
    if not is_interpreted and "equal" in kind:
        plain = partial(run, plain)
        check_recorded(partial(run, read), plain, inputs, kind, ctx.global_rank, plain_device)


def check_recorded(read, plain, inputs, kind, rank, plain_device):
    """Replays follow what is in their inputs; runs between them share their buffers."""
    held = [part.cuda() for part in inputs]
    read(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = read(*held)
    for seed in range(3, 7):
        drawn = draw(rank, kind, seed, inputs[0].shape[1], inputs[0].dtype)
        for part, new in zip(held, drawn, strict=True):
            part.copy_(new)
        graph.replay()
        found = [result.cpu() for result in results]
        again = read(*held)
        expected = plain(*(part.to(plain_device) for part in drawn))
        for a, b, c in zip(found, again, expected, strict=True):
            assert torch.equal(a, b.cpu())
            torch.testing.assert_close(a, c.cpu(), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize(
    ("kind", "ep"),
    [
        ("uneven", 4),
        ("equal skewed", 2),
        pytest.param("uneven skewed", 2, marks=pytest.mark.parity_long),
        pytest.param("equal", 4, marks=pytest.mark.parity_long),
    ],
)
def test_rows_that_kernels_read_are_those_that_gathers_bring(kind, ep, tmp_path):
    for barriers in run_ranks(check_read, 4, kind, ep, "cpu", torch.float64, str(tmp_path)):
        # Of choices, tokens and sums, and back twice; the second round reads other buffers.
        assert barriers == 3 * 5


def check_on_one_gpu(kind, dtype):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # ranks share the GPU
    torch.cuda.set_device(0)
    check_read(kind, 2, "cuda:0", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["equal", "equal skewed"])  # gloo gathers nothing on GPUs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_processes_of_one_gpu_read_each_others_memory(kind, dtype):
    run_ranks(check_on_one_gpu, 4, kind, dtype, check_shapes=False, timeout_s=280.0)


def check_over_gpus(ep):
    device = initialize("cuda")
    ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=ep), device)
    for kind in KINDS:
        dtype = torch.bfloat16 if "skewed" in kind else torch.float64
        compare_ways(ctx, kind, str(device), dtype, plain_device=str(device))
        print(f"ep {ep}, {kind}: equal", flush=True)
    ctx.destroy()
    shut_down()


@pytest.mark.gpu
@pytest.mark.parametrize("ep", [2, 4])
def test_gpus_read_each_others_memory(ep, monkeypatch):
    if torch.cuda.device_count() < ep:
        pytest.skip(f"needs {ep} GPUs")
    # Processes of their own: see Peers for why these ranks can share nothing else afterwards.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # with warm_ranks
    world = 4 if torch.cuda.device_count() >= 4 else 2
    assert launch_local([sys.executable, str(Path(__file__)), str(ep)], world) == 0


if __name__ == "__main__" and "RANK" in os.environ:
    check_over_gpus(int(sys.argv[1]))
