"""Optimizer state in host memory: how much of it, and the same bits in every share."""

import weakref
from collections import deque
from functools import partial
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel import optimizer_segments
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.offloading.host_updates import CudaQueues, HostUpdates
from mcore_parallel.offloading.state_memory import allocate_state, allocate_state_file
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig, SGDConfig
from mcore_parallel.optimizers.sgd import SGD

RULES = {"adam": AdamW(AdamConfig()), "sgd": SGD(SGDConfig())}
KINDS = [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
ORDERS = list(permutations(("fetch", "update", "send")))


class LateQueues:
    """``Queues`` that do nothing until the host waits, and then the first of an order first.

    One whose updates are those of the host waits with it.
    """

    def __init__(self, order, ignored="", on_host=False):
        self.order, self.ignored, self.on_host = order, ignored, on_host
        self.queued = {queue: deque() for queue in order}
        self.done = set()

    def buffer(self, num_bytes):
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.run("update", partial(memory.fill_, 0xFF))  # of whoever had it before
        return memory

    def copy(self, queue, targets, sources):
        for target, source in zip(targets, sources, strict=True):
            self.run(queue, partial(Tensor.copy_, target, source))

    def run(self, queue, work):
        self.queued[queue].append(("run", work))

    def mark(self, queue):
        event = object()
        self.queued[queue].append(("mark", event))
        return event

    def wait(self, queue, event):
        if queue == self.ignored:
            return
        if queue == "update" and self.on_host:
            self.wait_on_host(event)
        else:
            self.queued[queue].append(("wait", event))

    def wait_on_host(self, event):
        while event not in self.done and self.ignored != "host":
            ready = (q for q in self.order if self.queued[q] and not self._is_held(q))
            kind, what = self.queued[next(ready)].popleft()
            if kind == "run":
                what()
            elif kind == "mark":
                self.done.add(what)

    def _is_held(self, queue):
        kind, what = self.queued[queue][0]
        return kind == "wait" and what not in self.done


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


def takes_steps(updates, pieces, run):
    """Say if updates by a function are right, beside a host that reads and writes between.

    No two pieces are alike.
    """
    for _ in range(3):
        wanted = [[2 * tensor + place for tensor in p] for place, p in enumerate(pieces)]
        with updates.updating():
            for place in range(len(pieces)):
                with updates.next_piece() as state:
                    run(place, partial(doubled, state, place))
        for piece, right in zip(pieces, wanted, strict=True):
            if not all(map(torch.equal, piece, right)):
                return False
            for tensor in piece:
                tensor.mul_(0.25)
    return True


def doubled(tensors, place):
    for tensor in tensors:
        tensor.mul_(2).add_(place)


def takes_late_steps(order, ignored=""):
    queues = LateQueues(order, ignored)
    sizes = (5, 64, 3, 64, 1, 40, 7, 2)
    pieces = [[torch.full((n,), 1.0 + n), torch.arange(n).bfloat16()] for n in sizes]
    return takes_steps(
        HostUpdates(pieces, queues), pieces, lambda _, work: queues.run("update", work)
    )


def test_pieces_come_and_go_whichever_queue_is_the_fastest():
    assert all(takes_late_steps(order) for order in ORDERS)


@pytest.mark.parametrize("ignored", ["fetch", "update", "send", "host"])
def test_whichever_wait_is_missing_some_speed_shows_it(ignored):
    assert not all(takes_late_steps(order, ignored) for order in ORDERS)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("dtype", "has_main"), KINDS)
def test_any_share_on_the_host_gives_the_same_bits(
    rule, dtype, has_main, tmp_path, monkeypatch
):
    expected = whole(train(*built(0.0, dtype, rule, has_main=has_main)))
    monkeypatch.setattr(optimizer_segments, "PIECE_BYTES", 768)  # runs are longer
    for share, folder in ((0.3, ""), (1.0, ""), (0.3, tmp_path / "new"), (1.0, tmp_path)):
        trained = built(share, dtype, rule, has_main=has_main, folder=str(folder))
        if not folder:  # as beside a GPU: what is updated is a copy
            queues = LateQueues(ORDERS[0], on_host=True)
            trained[2]._host = HostUpdates(trained[2]._host._pieces, queues)
        assert same(whole(train(*trained)), expected)
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]  # no file has a name


def test_state_that_memory_or_a_drive_cannot_hold_is_refused_before_any_is_made(tmp_path):
    with pytest.raises(
        ValueError, match=r"MiB free and this rank's state takes 1,099,511,627,776 MiB"
    ):
        allocate_state_file(1 << 60, str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot hold the state: Not a directory"):
        allocate_state_file(8, str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match=r"takes 1,073,741,824\.0 GiB of host memory for this"):
        allocate_state(1 << 60, torch.device("cpu"))


class Runtime:
    """Locks pages, or says why not."""

    def __init__(self, error, locked):
        self.error, self.locked = error, locked

    def cudaHostRegister(self, begin, size, _flags):
        self.locked[begin] = size
        return self.error

    def cudaHostUnregister(self, begin):
        self.locked[begin] = self.memory() is not None


def test_memory_is_page_locked_until_its_last_tensor_is_gone(caplog):
    device, locked = torch.device("cpu"), {}
    memory, runtime = allocate_state(104, device), Runtime(0, locked)
    runtime.memory = weakref.ref(memory._map)
    assert memory.lock_pages(device, runtime)
    first, second = memory.zeros((3, 5), torch.float32), memory.zeros((5,), torch.float64)
    part = second[2:4]
    assert locked == {first.data_ptr(): 104}
    assert second.data_ptr() - first.data_ptr() == 64  # 60 bytes would not be aligned
    with pytest.raises(ValueError, match="buffer"):
        memory.zeros((1,), torch.float32)
    del first, second, memory
    assert list(locked.values()) == [104]
    del part
    assert list(locked.values()) == [True]  # and mapped until then
    assert runtime.memory() is None
    assert not caplog.records
    assert not allocate_state(2**30, device).lock_pages(device, Runtime(2, {}))
    assert "1.0 GiB of host memory could not be page-locked" in caplog.text


def test_the_share_is_what_was_asked_for_to_a_few_elements():
    for share in (0.25, 0.5, 1.0):
        _, data_parallel, optimizer = built(share)
        runs = [work.run for each in optimizer._work.values() for work in each]
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
    model, data_parallel, optimizer = built(1.0)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="refresh"):
        train(model, data_parallel, optimizer)


def test_options_without_effect_are_refused():
    for options, message in (
        ({"optimizer_offload_fraction": 0.5}, "no effect without"),
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5},
            "above 0 and at most 1",
        ),
        ({"optimizer_offload_dir": "nvme"}, "dir nvme has no effect without"),
        ({"cpu_offloading": True}, "needs --cpu-offloading-num-layers"),
        ({"cpu_offloading_num_layers": 2}, "no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            OffloadConfig(**options)


@pytest.mark.gpu
def test_pieces_come_to_a_gpu_and_go_whatever_it_has_to_do():
    device, size = torch.device("cuda"), 1 << 22
    memory = allocate_state(9 * 6 * size, device)
    pieces = []
    for place in range(9):
        kept = [memory.zeros((size,), dtype) for dtype in (torch.float32, torch.bfloat16)]
        pieces.append([tensor.fill_(1.0 + place) for tensor in kept])
    assert pieces[-1][-1].is_pinned()
    updates = HostUpdates(pieces, CudaQueues(device))

    for slow in ((), range(9), (0, 1, 2), (3, 8)):

        def run(place, work, slow=slow):
            torch.cuda._sleep(5_000_000 * (place in slow))  # some milliseconds
            work()

        assert takes_steps(updates, pieces, run), slow


@pytest.mark.gpu
def test_a_gpu_goes_on_after_memory_that_cannot_be_page_locked(caplog):
    device = torch.device("cuda")
    memory = allocate_state(1 << 20, device)
    assert memory.zeros((4,), torch.float32).is_pinned()
    assert not caplog.records
    assert not memory.lock_pages(device, torch.cuda.cudart())  # locked before
    assert "could not be page-locked" in caplog.text
    assert torch.ones(9, device=device).sum() == 9


@pytest.mark.gpu
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("dtype", "has_main"), KINDS)
def test_a_gpu_trains_with_state_on_the_host_to_the_last_bit(
    rule, dtype, has_main, tmp_path, monkeypatch
):
    expected = whole(train(*built(0.0, dtype, rule, "cuda", has_main=has_main), steps=range(6)))
    monkeypatch.setattr(optimizer_segments, "PIECE_BYTES", 768)
    for share, folder in ((0.5, ""), (1.0, ""), (1.0, str(tmp_path))):
        trained = built(share, dtype, rule, "cuda", has_main=has_main, folder=folder)
        for step in range(6):
            torch.cuda._sleep(20_000_000 * (step % 2))
            found = whole(train(*trained, steps=[step]))  # reads all state, as a save does
        assert same(found, expected)
