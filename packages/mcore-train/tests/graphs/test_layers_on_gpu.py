"""Layers as CUDA graphs: the same bits as launched one by one."""

import pytest
import torch
from gpu_runs import SMALL, batches, build

from mcore_parallel.launch.launcher import deterministic_algorithms
from mcore_train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    # Noise of torch's own compiler, on which no test can act.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

SIZES = {"hidden_size": 256, "seq_length": 256, "micro_batch_size": 2, "global_batch_size": 4}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ("layernorm", "mlp_act"),
}


def trained(run, num_steps=6):
    losses = [train_step(run, batches(run, seed), 1e-3, 0.1).loss for seed in range(num_steps)]
    return losses, [parameter.detach().clone() for parameter in run.chunks[0].parameters()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_dropout": 0.1, "hidden_dropout": 0.1},
        SELECTIVE,
        {"use_distributed_optimizer": True, "overlap_param_gather": True},
        {"fp8_format": "hybrid"},
        {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    ],
    ids=["dense", "dropout", "recomputed", "sharded", "fp8", "fp8_delayed"],
)
def test_recorded_layers_give_the_bits_of_layers_launched_singly(changes):
    assert SMALL["num_layers"] == 2
    local = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 2}
    with torch.cuda.stream(torch.cuda.Stream()), deterministic_algorithms():
        want_losses, want = trained(build(**SIZES, **changes))
        run = build(**SIZES, **changes, **local)
        with run.recorder:
            got_losses, got = trained(run)
            assert [stack.num_recorded for stack in run.recorder.stacks] == [1]
    assert [float(loss) for loss in got_losses] == [float(loss) for loss in want_losses]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
