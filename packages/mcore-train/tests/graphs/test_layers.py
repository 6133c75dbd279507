"""Layers by recordings give the bits of layers launched singly, with a recorder for CPUs."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from warm_ranks import run_ranks

from mcore_models.protocol import MicroBatch
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.graphs.layers import LayerRecorder
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter, read_metrics
from mcore_train.resolution import ConflictError, resolve
from mcore_train.step import train_step

FLAGS = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "log_interval": 1,
}
PIPELINE = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "hidden_dropout": 0.1,
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "recompute_granularity": "selective",
    "recompute_modules": ("layernorm", "mlp_act"),
}
EXPERTS = {
    "num_layers": 2,
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_aux_loss_coeff": 0.1,
}
SPREAD = EXPERTS | {
    "expert_model_parallel_size": 2,
    "moe_shared_expert_intermediate_size": 16,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "recompute_granularity": "selective",
    "recompute_modules": ("layernorm", "moe", "core_attn"),
}
TENSOR = EXPERTS | {
    "tensor_model_parallel_size": 2,
    "moe_layer_freq": "[0,1]",
    "normalization": "LayerNorm",
    "norm_placement": "post",
    "residual_stream_factors": (1.5, 1.0, 2.0),
    "residual_output_factors": (0.5, 1.0, 0.7),
    "recompute_granularity": "full",
    "recompute_method": "block",
}
CONTEXT = EXPERTS | {
    "context_parallel_size": 2,
    "moe_expert_capacity_factor": 0.8,
    "recompute_granularity": "full",
}
CASES = [(PIPELINE, False), (SPREAD, False)]
FURTHER = [(TENSOR, False), (CONTEXT, True)]
"""Flags of two ranks, and whether experts are recorded too."""


class Closures:
    """A recorder that calls a function again and copies what it returns to one place."""

    def __init__(self, run):
        self.streams = run.streams
        self.counts = [buffer for chunk in run.chunks for buffer in chunk.buffers()]

    def record(self, function, memory):
        state, counts = self.streams.state(), [buffer.clone() for buffer in self.counts]
        outputs = function()
        self.streams.set_state(state)  # a graph that is recorded does not run
        for buffer, count in zip(self.counts, counts, strict=True):
            buffer.copy_(count)

        def replay():
            for own, x in zip(outputs, function(), strict=True):
                if own is not None and own.data_ptr() != x.data_ptr():
                    own.copy_(x)

        return outputs, replay

    def forget(self):
        pass


class Recording(LayerRecorder):
    """Says at its end how many micro-batches each stack has recorded."""

    def __exit__(self, *exception):
        self.counts = [stack.num_recorded for stack in self.stacks]
        super().__exit__(*exception)


def recording(run, *, records_experts=False):
    """Let layers of a run be launched by recordings after one step."""
    return Recording(
        run.chunks,
        run.data_parallel,
        Closures(run),
        1,
        run.precision.weight_casts,
        records_experts=records_experts,
    )


def trained(flags, metrics_file=None, **how):
    """Losses and norms, weights and state of this rank, micro-batches that were recorded."""
    config = compose(FLAGS | flags)
    ctx = ParallelContext.build(config.parallelism)
    run = assemble(resolve(config, 2), ctx)
    if how:
        run = replace(run, recorder=recording(run, **how))
    reports = []
    console = Console(quiet=True) if metrics_file and ctx.global_rank == 0 else None
    with Reporter(console, metrics_file=metrics_file, with_lines=False) as reporter:
        train(run, reporter, on_report=reports.append)
    shards = run.data_parallel.weight_shards() | run.optimizer.named_shards()
    tensors = {n: [p.data.clone() for p in s.pieces] for n, s in shards.items()}
    ctx.destroy()
    return reports, tensors, run.recorder.counts if how else []


def both(folder, cases):
    """Train by layers launched singly, and by recordings, over ranks of every kind."""
    return [
        (
            trained(flags),
            trained(flags, folder / f"{case}.jsonl", records_experts=records_experts),
        )
        for case, (flags, records_experts) in enumerate(cases)
    ]


def numbers(reports):
    return [(r.loss, r.aux_loss, r.grad_norm, r.experts) for r in reports]


@pytest.mark.parametrize(
    ("cases", "recorded"),
    [
        # As many micro-batches as each of a rank's chunks holds at once.
        (CASES, [[[4, 2], [1]], [[3, 1], [1]]]),
        pytest.param(FURTHER, [[[1], [1]]] * 2, marks=pytest.mark.parity_long),
    ],
)
def test_layers_by_recordings_train_to_the_bits_of_layers_launched_singly(
    cases, recorded, tmp_path
):
    for rank, found in enumerate(run_ranks(both, 2, tmp_path, cases)):
        for plain, local in found:
            assert numbers(local[0]) == numbers(plain[0])
            for tensor, pieces in plain[1].items():
                assert all(map(torch.equal, pieces, local[1][tensor])), tensor
        assert [local[2] for _, local in found] == recorded[rank]
    if cases != CASES:
        return
    # The third step was recorded by the clock: waits between the graphs are no compute.
    pipeline, spread = (
        next(
            row
            for row in read_metrics(tmp_path / f"{case}.jsonl")
            if row["kind"] == "waterfall"
        )
        for case in (0, 1)
    )
    assert pipeline["bubble_ms"] + pipeline["exposed_pp_ms"] > 0
    assert spread["exposed_ep_ms"] > 0
    assert spread["exposed_dp_ms"] > 0


def batch(length, documents=None):
    tokens = torch.arange(2 * length).view(2, length) % 40
    entries = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(2, length)}
    return MicroBatch(entries, documents=documents)


def test_batches_of_other_shapes_wait_for_no_graph_and_stop_none_half_way():
    ctx = ParallelContext.single("cpu")
    plan = resolve(compose(FLAGS | {"num_layers": 2}), 1)
    plain, local = assemble(plan, ctx), assemble(plan, ctx)
    local = replace(local, recorder=recording(local))
    (stack,) = local.recorder.stacks
    found = []
    for length in (16, 16, 8, 8, 16):
        losses = [
            float(train_step(run, [batch(length)] * 2, 1e-3, 0.1).loss)
            for run in (plain, local)
        ]
        assert losses[0] == losses[1]
        found.append(stack.num_recorded)
    assert found == [0, 1, 0, 1, 0]
    train_step(local, [batch(16)] * 2, 1e-3, 0.1)
    with pytest.raises(RuntimeError, match="differ in shape"):
        train_step(local, [batch(16), batch(8)], 1e-3, 0.1)
    packed = batch(16, Documents([[0, 8, 16]] * 2))
    with pytest.raises(RuntimeError, match="packed documents"):
        train_step(local, [batch(16), packed], 1e-3, 0.1)
    assert stack.num_recorded == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"pipeline_schedule": "zb-h1"}, "cannot cut a layer's backward"),
        (
            {"recompute_granularity": "full", "hidden_dropout": 0.1},
            "draws --hidden-dropout 0.1",
        ),
        (
            {"recompute_granularity": "full", "num_layers": 8, "recompute_num_layers": 2},
            "recomputes layers one by one",
        ),
        ({"tensor_model_parallel_size": 2}, "not tested on GPUs with --tensor-model-parallel"),
        ({"context_parallel_size": 2}, "not tested on GPUs with --context-parallel-size 2"),
        ({"num_experts": 2, "parallel_residual": "one_norm"}, "always part of the graph"),
        (
            {"num_experts": 2, "moe_router_load_balancing_type": "sinkhorn"},
            "rounds that the host waits for",
        ),
        ({"reset_attention_mask": True}, "cannot record packed documents"),
    ],
)
def test_what_graphs_of_layers_cannot_hold_is_refused(flags, expected):
    local = {"cuda_graph_impl": "local", "pipeline_model_parallel_size": 2}
    with pytest.raises(ConflictError, match=expected):
        resolve(compose(FLAGS | local | flags), 4)
