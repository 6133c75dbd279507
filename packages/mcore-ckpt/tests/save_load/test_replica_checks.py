"""One name, one tensor: what several ranks hold is compared before one of them is saved."""

import logging
from functools import partial

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.save_load import replica_checks
from mcore_ckpt.save_load.async_saving import AsyncSaver
from mcore_ckpt.save_load.loading import read_tensor
from mcore_ckpt.save_load.plan_cache import PlanCache
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.paths import complete_steps, latest_step, resolve_folder
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import Piece, Shard


def piece(data, *offsets):
    return Piece(offsets or (0,) * data.dim(), tuple(data.shape), data)


def whole(data, **fields):
    return Shard(tuple(data.shape), data.dtype, (piece(data),), **fields)


def test_one_rank_that_holds_a_box_twice_must_hold_it_alike(tmp_path):
    # As two chunks of one pipeline stage that name their layers alike.
    data = torch.arange(6.0)
    same = Shard((6,), data.dtype, (piece(data), piece(data.clone())))
    save(tmp_path, 1, {"w": same}, world=SINGLE)
    other = Shard((6,), data.dtype, (piece(data), piece(data + 1)))
    with pytest.raises(
        ValueError, match=r"under one name: \n  w: unlike on ranks \[0\] and \[0\]\n"
    ):
        save(tmp_path, 2, {"w": other}, world=SINGLE)
    # What is no number is no rounding of one; of whole numbers, none is of another.
    broken = torch.tensor([0.0, 1.0, torch.nan, 3.0, 4.0, 5.0])
    for value in (broken, torch.where(broken.isnan(), torch.inf, broken)):
        odd = Shard((6,), data.dtype, (piece(data), piece(value)))
        with pytest.raises(ValueError, match="w: unlike on ranks"):
            save(tmp_path, 2, {"w": odd}, world=SINGLE)
    assert complete_steps(tmp_path) == [1]


def test_ranks_that_hold_unlike_boxes_of_one_name_are_told_and_nothing_is_written(tmp_path):
    told = run_ranks(save_what_differs, 4, str(tmp_path))
    assert told[0] == told[1] == told[2] == told[3]
    apart, twins, counts, cut, rounding = told[0]
    assert "w [2:4, 0:3]: unlike on ranks [0, 2] and [1, 3]\nOnly one copy" in apart
    assert "Copies must be equal: seed torch equally" in apart
    assert "blocks.0: unlike on ranks [1] and [3]\n" in twins
    assert "norm" not in twins
    assert "steps: unlike on ranks [0, 1, 2] and [3]\n" in counts
    assert "tied [5:8]: unlike on ranks [0] and [1]\n" in cut
    assert "tied [0:2]" not in cut
    assert "w [2:4, 0:3]: unlike on ranks [0, 1] and [2, 3]" in rounding
    assert "a run that resumes from this step will not equal this run bit by bit" in rounding
    assert complete_steps(tmp_path) == [1, 6, 8, 9]
    first = resolve_folder(tmp_path, 1)
    assert torch.equal(read_tensor(first, "rng.3"), torch.full((5,), 3, dtype=torch.uint8))
    assert torch.all(read_tensor(first, "w") == 1)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        f"iter_000000{step}" for step in (1, 6, 8, 9)
    ]


class Torn(torch.Tensor):
    """Memory of a device that failed: what it is can be asked, what it holds cannot."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.split:
            raise RuntimeError("the device has gone")
        return super().__torch_function__(function, types, args, kwargs or {})


def save_what_differs(folder):
    ctx = ParallelContext.build(ParallelConfig())
    world, rank = ctx.world, ctx.world.rank

    def shards(add=0.0, **more):
        # Rows 0 to 2 are one rank's own, 2 to 4 are held by all.
        rows = [piece(torch.full((2, 3), 1.0 + add), 2, 0)]
        rows += [piece(torch.ones(2, 3), 0, 0)] if rank == 0 else []
        own = torch.full((5,), rank, dtype=torch.uint8)  # each rank's random stream
        state = {"w": Shard((4, 3), torch.float32, tuple(rows)), f"rng.{rank}": whole(own)}
        return state | {"norm": whole(torch.ones(7))} | more

    now = partial(save, world=world)

    def refused(step, state, how=now):
        with pytest.raises(ValueError, match="Only one copy would be saved") as told:
            how(folder, step, state)
        return str(told.value)

    now(folder, 1, shards())
    apart = refused(2, shards(rank % 2))
    # Two stages that name a layer alike; the two others hold none of the name.
    layer = torch.randn(8, generator=torch.Generator().manual_seed(rank))
    twins = refused(3, shards(**({"blocks.0": whole(layer)} if rank % 2 else {})))
    counts = refused(4, shards(steps=whole(torch.tensor(100 + rank // 3))))
    # A copy that is cut otherwise, as each stage's buckets cut a tied embedding's moments.
    data = torch.arange(8.0) + torch.arange(8.0) // 6 * rank
    cuts = (((0, 5), (5, 8)), ((0, 2), (2, 8)), (), ())[rank]
    pieces = tuple(piece(data[a:b], a) for a, b in cuts)
    tied = Shard((8,), data.dtype, pieces, (world,))
    cut = refused(4, shards(tied=tied))
    # What one rank cannot read is a fault of all.
    numbers = torch.ones(7)
    unread = whole(numbers.as_subclass(Torn) if rank == 2 else numbers)
    with pytest.raises(RuntimeError, match="the device has gone"):
        now(folder, 4, shards(norm=unread))
    # Refused once does not count as compared.
    plans = PlanCache()
    for _ in range(2):
        refused(5, shards(rank), partial(now, plans=plans))
    assert latest_step(folder) == 1
    now(folder, 6, shards(), plans=plans)

    saver = AsyncSaver(world)
    assert "on ranks [0, 1, 2] and [3]" in refused(7, shards(rank // 3), saver.save)
    saver.save(folder, 8, shards())
    assert saver.wait() is not None
    assert saver._plans._is_compared

    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("mcore_ckpt.save_load.replica_checks").addHandler(handler)
    replica_checks._PART_BYTES, kept = (
        8,
        replica_checks._PART_BYTES,
    )  # boxes travel in several parts
    now(folder, 9, shards(1e-6 * (rank // 2)))
    replica_checks._PART_BYTES = kept
    logging.getLogger("mcore_ckpt.save_load.replica_checks").removeHandler(handler)
    ctx.destroy()
    return [apart, twins, counts, cut, *logged]
