"""Steps that are validated afterwards give the bits of steps that wait for their norm."""

import pytest
import torch

from mcore_parallel.mesh import ParallelContext
from mcore_parallel.testing.ranks import run_ranks
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import ConflictError, resolve

FLAGS = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 6,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "log_interval": 5,
    "hidden_dropout": 0.1,
    "pipeline_model_parallel_size": 2,
}
OVERFLOWING = {"fp16": True, "initial_loss_scale": 2.0**18, "hysteresis": 1}
LAYOUTS = {
    "1f1b": ({}, 1, 6),
    "zb-v, bf16": ({"pipeline_schedule": "zb-v", "bf16": True, "clip_grad": 0.1}, 3, 6),
    "zb-v, fp16": ({"pipeline_schedule": "zb-v", "loss_scale_window": 1} | OVERFLOWING, 2, 3),
}
"""Flags, how many of three steps are taken back, and how many of all are not skipped."""


def trained(flags):
    """Numbers that were logged, weights and state of this rank, steps taken back."""
    config = compose(FLAGS | flags)
    plan = resolve(config, 2)
    ctx = ParallelContext.build(
        config.parallelism, embedding_stages=plan.embedding_stages, with_background=True
    )
    run = assemble(plan, ctx)
    reports = []
    # A report in between has a step's numbers at once, validated or not.
    for until in (2, 0):
        train(run, Reporter(None), until=until, on_report=reports.append)
    shards = run.data_parallel.weight_shards() | run.optimizer.named_shards()
    tensors = {n: [p.data.clone() for p in s.pieces] for n, s in shards.items()}
    logged = [(r.iteration, r.loss, r.grad_norm) for r in reports]
    redone = run.post_validation.num_redone if run.post_validation else 0
    ctx.destroy()
    counts = run.optimizer.num_steps, run.schedule_samples
    scale = run.loss_scaler.state() if run.loss_scaler else {}
    return logged, tensors, (*counts, scale), redone


def both():
    """Train as plain steps do, and validated afterwards, under every schedule."""
    late = {"enable_optimizer_post_validation": True}
    return {
        name: (trained(changes), trained(changes | late))
        for name, (changes, *_) in LAYOUTS.items()
    }


def test_validated_afterwards_a_step_has_the_bits_of_one_that_waits():
    for found in run_ranks(both, 2):
        for name, (plain, late) in found.items():
            assert str(late[0]) == str(plain[0]), name  # a norm that overflowed is NaN
            assert late[2] == plain[2], name
            assert (late[3], late[2][0]) == LAYOUTS[name][1:], name
            for tensor, pieces in plain[1].items():
                assert all(map(torch.equal, pieces, late[1][tensor])), (name, tensor)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"pipeline_model_parallel_size": 1}, "no effect with --pipeline-model"),
        ({"log_interval": 1}, "no effect with --log-interval 1"),
        ({"exit_interval": 1}, "no effect with --exit-interval 1"),
        ({"num_experts": 2}, "and --num-experts 2 exclude"),
        ({"fp8_format": "hybrid", "fp8_recipe": "delayed"}, "and --fp8-recipe delayed exclude"),
        ({"use_torch_fsdp2": True}, "--data-parallel-sharding-strategy optim_grads or"),
    ],
)
def test_what_a_step_validated_afterwards_cannot_do_is_refused(flags, expected):
    with pytest.raises(ConflictError, match=expected):
        resolve(compose(FLAGS | {"enable_optimizer_post_validation": True} | flags), 2)
