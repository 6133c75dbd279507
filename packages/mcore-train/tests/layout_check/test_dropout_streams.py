"""Who shares a dropout mask: ranks that hold the same activations, and no others."""

import pytest
import torch
from warm_ranks import run_ranks

from mcore_parallel.mesh import ParallelContext
from mcore_parallel.rng import RngStreams
from mcore_train.composition import compose
from mcore_train.layout_check.dropout_streams import noise_faults
from mcore_train.layout_check.rows import build_rows
from mcore_train.layout_check.trial import build_run
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 40,
    "mock_data": True,
    "num_workers": 0,
    "train_iters": 2,
    "lr": 1e-3,
    "hidden_dropout": 0.1,
    "global_batch_size": 2,
}
LAYOUTS = [
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
]


def faults_in_layouts():
    found = []
    for flags in LAYOUTS:
        plan = resolve(compose(TINY | flags), 4)
        ctx = ParallelContext.build(plan.config.parallelism)
        for is_alike in (False, True):
            run = build_run(plan, ctx, build_rows(plan), dtype=torch.float64)
            if is_alike:  # a rule that no layout keeps
                run.streams.set_state(RngStreams(1, ParallelContext.single()).state())
            found.append(noise_faults(run))
        ctx.destroy()
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(faults_in_layouts, 4)[0]


def test_masks_of_every_layout_keep_the_rule(found):
    assert found[::2] == [[], [], []]


def test_ranks_that_drop_alike_are_named_with_the_layer(found):
    tensor, sequence, context = found[1::2]
    assert "replicated: ranks 0 and 2 drop alike" in tensor
    assert "replicated: ranks 0 and 1 drop alike" not in tensor
    assert any(f.startswith("dropout 0 blocks.0.dropout: ranks 0 and 1") for f in sequence)
    assert "replicated: ranks 0 and 1 drop alike" in context
