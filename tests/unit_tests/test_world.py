"""Tests in the world of a launcher, of any size: gloo on CPUs, nccl on GPUs.

``run_unit_tests.sh`` starts them; each rank runs all of them.
"""

import pytest
import torch

from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_train.composition import FAMILY_COMMANDS, compose
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.layout_check.verification import verify_on_rank
from mcore_train.resolution import resolve

WORLD = launcher.read_environment().world_size
OPTIONS = {
    "num_layers": 2 * WORLD,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 101,
    "mock_data": True,
    "seq_length": 16 * WORLD,
    "train_iters": 4,
    "lr": 1e-3,
    "global_batch_size": 2 * WORLD,
}
AXES = ("tensor", "pipeline", "context", "data")


@pytest.fixture(scope="session")
def device():
    """The rank's device, in the launcher's world."""
    yield launcher.initialize()
    launcher.shut_down()


def size_option(axis: str) -> dict[str, int]:
    """Return the option that gives an axis all ranks; the data axis takes what is left."""
    names = {
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "context": "context_parallel_size",
    }
    return {names[axis]: WORLD} if axis in names else {}


@pytest.mark.parametrize("axis", AXES)
def test_a_sum_over_an_axis_has_a_part_of_every_rank(device, axis):
    ctx = ParallelContext.build(ParallelConfig(**size_option(axis)), device)
    try:
        mesh_axis = {"tensor": ctx.tp, "pipeline": ctx.pp, "context": ctx.cp, "data": ctx.dp}[
            axis
        ]
        assert mesh_axis.size == WORLD
        value = torch.full((3,), float(mesh_axis.rank + 1), device=device)
        total = all_reduce(value, mesh_axis)
        assert total.tolist() == [WORLD * (WORLD + 1) / 2] * 3
    finally:
        ctx.destroy()


@pytest.mark.parametrize("axis", AXES)
def test_a_layout_computes_what_one_rank_computes(device, axis):
    options = OPTIONS | size_option(axis) | {"device": device.type}
    row = FAMILY_COMMANDS["gpt"]
    plan = resolve(compose(options, row.run), WORLD, family=row.family)
    small = build_small_run(plan, WORLD)
    if small.world_size != WORLD:
        pytest.skip(f"the small run has {small.world_size} ranks, the world {WORLD}")
    certificate = verify_on_rank(small, True)
    assert certificate is None or certificate.passed
