"""Layers as CUDA graphs: the same bits as launched one by one."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from gpu_runs import batches, build

from mcore_parallel.launch.launcher import deterministic_algorithms
from mcore_parallel.pipeline_parallel.actions import Action, Kind
from mcore_train.graphs.layers import LayerRecorder
from mcore_train.graphs.recorders import CudaRecorder
from mcore_train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    # Noise of torch's own compiler, on which no test can act.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

SIZES = {"hidden_size": 256, "seq_length": 256, "micro_batch_size": 2, "global_batch_size": 10}
COUNT = SIZES["global_batch_size"] // SIZES["micro_batch_size"]
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
FULL = {"recompute_granularity": "full"}
DELAYED = {"fp8_format": "hybrid", "fp8_recipe": "delayed"}
EXPERTS = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 64,
    "moe_aux_loss_coeff": 0.01,
    "moe_shared_expert_intermediate_size": 64,
}
CASES = {
    "dropout": DROPOUT,
    "norms and activations recomputed": {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "mlp_act"),
        **DROPOUT,
    },
    "all recomputed": FULL,
    "sharded": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "fp8": {"fp8_format": "hybrid"},
    "delayed, recomputed": DELAYED | FULL,
    "experts": EXPERTS,
    "experts, capacity, recomputed": EXPERTS | FULL | {"moe_expert_capacity_factor": 0.8},
    "experts in fp8": EXPERTS | DELAYED | {"moe_experts_dtype": "fp8"},
    "predictions, latent attention": {
        "mtp_num_layers": 1,
        "multi_latent_attention": True,
        "kv_lora_rank": 64,
        "qk_head_dim": 32,
        "qk_pos_emb_head_dim": 32,
        "v_head_dim": 64,
    },
    "recurrent": {
        "hybrid_override_pattern": "M*",
        "mamba_head_dim": 32,
        "mamba_state_dim": 16,
        "mamba_num_groups": 1,
    },
    "clipped scores": {"qk_clip": True, "qk_clip_threshold": 0.5},
}


def three_in_flight():
    """F0 F1 F2 B0 F3 B1 F4 B2 B3 B4, as the first of three stages."""
    order = [Action(Kind.FORWARD, i) for i in range(3)]
    for i in range(COUNT):
        order.append(Action(Kind.BACKWARD, i))
        if i + 3 < COUNT:
            order.append(Action(Kind.FORWARD, i + 3))
    return order


@pytest.fixture(autouse=True)
def own_stream():
    # Weights are compared in it too: the default stream does not wait for the last update.
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def trained(run, num_steps=5):
    run.pipeline.built_actions["train", COUNT] = three_in_flight()
    with run.recorder or nullcontext():
        results = [
            train_step(run, batches(run, seed, COUNT), 1e-3, 0.1) for seed in range(num_steps)
        ]
        stacks = run.recorder.stacks if run.recorder else []
        counts = [stack.num_recorded for stack in stacks]
    run.data_parallel.wait_params()
    found = [float(x) for r in results for x in (r.loss, r.aux_loss, r.grad_norm)]
    return (
        found,
        [parameter.detach().clone() for parameter in run.chunks[0].parameters()],
        counts,
    )


def check(changes, recorded):
    with deterministic_algorithms():
        want_numbers, want, _ = trained(build(**SIZES, **changes))
        numbers, got, counts = trained(recorded(**SIZES, **changes))
    assert counts
    assert set(counts) == {3}
    assert numbers == want_numbers
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_recorded_layers_give_the_bits_of_layers_launched_singly(changes):
    check(changes, partial(build, cuda_graph_impl="local", cuda_graph_warmup_steps=2))


@pytest.mark.parametrize("changes", [{}, FULL, DELAYED], ids=["kept", "recomputed", "fp8"])
def test_layers_recorded_up_to_their_experts_give_the_same_bits(changes):
    def recorded(**flags):
        run = build(**flags)
        recorder = LayerRecorder(
            run.chunks,
            run.data_parallel,
            CudaRecorder(run.streams, run.ctx.clock),
            2,
            run.precision.weight_casts,
            records_experts=False,
        )
        return replace(run, recorder=recorder)

    check(EXPERTS | changes, recorded)
