"""A training step on a GPU: it never waits for the device, and always gives the same bits."""

import pytest
import torch
from gpu_runs import batches, build

from mcore_parallel.launch.launcher import deterministic_algorithms
from mcore_train.step import train_step

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 512,
    "num_query_groups": 2,
    "seq_length": 1024,
    "micro_batch_size": 1,
    "global_batch_size": 2,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"untie_embeddings_and_output_weights": False, "normalization": "LayerNorm"},
        {"recompute_granularity": "full"},
    ],
    ids=["dense", "tied", "recomputed"],
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_device(changes):
    run = build(**SIZES, **changes)
    data = [batches(run, seed) for seed in range(3)]
    train_step(run, data[0], 1e-3, 0.1)  # compiles, picks algorithms
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        results = [train_step(run, step, 1e-3, 0.1) for step in data[1:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(result.loss) for result in results)


def test_deterministic_training_repeats_to_the_last_bit():
    def weights():
        run = build(**SIZES)
        for seed in range(3):
            train_step(run, batches(run, seed), 1e-3, 0.1)
        return [parameter.detach().clone() for parameter in run.chunks[0].parameters()]

    with deterministic_algorithms():
        first, second = weights(), weights()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
