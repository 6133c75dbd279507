"""Sizes and costs against published numbers and against built models."""

from dataclasses import replace
from functools import partial
from math import prod

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mcore_models.config import RecomputeConfig, TransformerConfig
from mcore_models.flops import (
    _passes_held,
    flops_per_token,
    model_flops,
    num_active_parameters,
    num_parameters,
    rank_bytes,
)
from mcore_models.gpt import GPT
from mcore_models.logical_tensors import delta_sizes, mamba_sizes, tensor_shapes
from mcore_models.memory_changes import OptimizerChoice
from mcore_models.presets import find_preset, load_preset
from mcore_models.protocol import MicroBatch
from mcore_moe.config import MoEConfig
from mcore_parallel import ParallelConfig, ParallelContext, named_shards
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.optimizers.config import AdamConfig, MainWeightsConfig
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import build_schedule
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.tensor_parallel.embedding import padded_vocab

_NOTHING = OffloadConfig()

# Obtained by running Megatron's own counter (Aug 2026), one sequence.
REFERENCE_FLOPS = {
    "llama-3-8b": (8192, 128256, 421645529382912),
    "gpt2-345m": (1024, 50304, 2326530097152),
    "mixtral-8x7b": (4096, 32000, 326477644038144),
}


@pytest.mark.parametrize("name", REFERENCE_FLOPS)
def test_flops_are_those_of_the_reference(name):
    length, padded_vocab_size, want = REFERENCE_FLOPS[name]
    model = load_preset(name)
    assert model_flops(model.config, padded_vocab_size, [length], model.moe) == want
    per_token = flops_per_token(model.config, padded_vocab_size, length, model.moe)
    assert per_token == want / length


def test_of_the_experts_only_the_chosen_are_active():
    model = load_preset("qwen3-30b-a3b")
    assert num_active_parameters(model.config, model.vocab_size, model.moe) == 3_353_032_704
    dense = load_preset("llama-2-7b")
    assert num_active_parameters(dense.config, dense.vocab_size) == 6_738_415_616


SMALL = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 6}
MODELS = {
    "plain": ({}, {}),
    "grouped, own width, untied": (
        {
            "num_query_groups": 2,
            "kv_channels": 10,
            "untie_embeddings_and_output_weights": True,
            "qk_layernorm": True,
            "add_qkv_bias": True,
        },
        {},
    ),
    "gpt2": (
        {
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": 17,
            "normalization": "LayerNorm",
            "swiglu": False,
            "add_bias_linear": True,
            "qk_layernorm": True,
        },
        {},
    ),
    "experts with biases": (
        {"add_bias_linear": True},
        {
            "num_experts": 4,
            "moe_layer_freq": "2",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    ),
    "latent attention, further tokens": (
        {
            "multi_latent_attention": True,
            "q_lora_rank": 9,
            "kv_lora_rank": 7,
            "qk_head_dim": 6,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 5,
            "qk_layernorm": True,
            "mtp_num_layers": 2,
        },
        {"num_experts": 4, "moe_layer_freq": "[0,1,1]"},
    ),
    "another gate, derived width": ({"swiglu": False, "quick_geglu": True}, {}),
    "hybrid": (
        {
            "num_layers": 5,
            "hybrid_override_pattern": "M*|-EM",
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "mamba_num_groups": 2,
            "mamba_state_dim": 5,
            "mamba_proj_bias": True,
        },
        {"num_experts": 2},
    ),
    "delta nets": (
        {
            "hybrid_override_pattern": "[GE][*-]G",
            "attention_output_gate": True,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 5,
        },
        {"num_experts": 2},
    ),
    "shared experts": (
        {"swiglu": False},
        {
            "num_experts": 3,
            "moe_layer_freq": "[0,1,1]",
            "moe_ffn_hidden_size": 8,
            "moe_shared_expert_intermediate_size": 10,
            "moe_shared_expert_gate": True,
            "moe_latent_size": 6,
        },
    ),
}


def built(changes, moe, dtype=torch.float32, device="meta"):
    config, moe = TransformerConfig(**(SMALL | changes)), MoEConfig(**moe)
    ctx = ParallelContext.single()
    return config, moe, GPT(config, ctx, vocab_size=37, moe=moe, device=device, dtype=dtype)


@pytest.mark.parametrize("case", MODELS)
def test_listed_tensors_and_counted_parameters_are_those_of_a_built_model(case):
    config, moe, model = built(*MODELS[case])
    shapes = {name: tuple(shard.shape) for name, shard in named_shards(model).items()}
    assert tensor_shapes(config, 37, moe) == shapes
    assert num_parameters(config, 37, moe) == sum(map(prod, shapes.values()))


@pytest.mark.parametrize("case", MODELS)
def test_counted_flops_are_three_times_the_products_of_a_forward(case):
    """Torch's own counter sees the same products, but for the router and the shared gate."""
    config, moe, model = built(*MODELS[case], device="cpu")
    length, padded = 16, padded_vocab(37, 128, 1)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        tokens = torch.randint(0, 37, (1, length))
        rows = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(1, length)}
        output, _ = model.eval().run_stage(MicroBatch(model.prepare(rows)), None)
        for hidden in output.values() if isinstance(output, dict) else [output]:
            model.logits(hidden)
    counts = {
        path: {str(op): flops for op, flops in found.items()}
        for path, found in counter.get_flop_counts().items()
    }
    # GEMMs of two activations are attention's, and those inside chunks of recurrent layers.
    activations = counts["Global"]["aten.bmm"]
    chunks, nets = (
        [found["aten.bmm"] for path, found in counts.items() if path.endswith(name)]
        for name in (".mamba", ".delta_net")
    )
    attention = activations - sum(chunks) - sum(nets)
    others = sum(counts["Global"].values()) - activations
    blocks = [*model.blocks.values(), *(layer.block for layer in model.mtp)]
    uncounted = sum("moe" in block.mixers for block in blocks)
    uncounted *= 2 * length * 24 * (moe.num_experts + moe.moe_shared_expert_gate)
    # Torch counts whole attention, we the causal half of it; and chunks, we the recurrence:
    # every number of a state is written and read once, of a delta net's read twice.
    sizes = mamba_sizes(config)
    states = len(chunks) * 4 * length * sizes.inner * config.mamba_state_dim
    states += len(nets) * 6 * length * delta_sizes(config).values * config.linear_key_head_dim
    want = 3 * (others - uncounted + attention // 2 + states)
    assert attention > 0
    assert model_flops(config, padded, [length], moe) == want


def test_packed_sequences_attend_on_their_own():
    config = TransformerConfig(**SMALL)
    whole, packed = (model_flops(config, 128, lengths) for lengths in ([64], [32, 32]))
    attention = 6 * 24 * 3  # per pair of tokens, times layers
    assert whole - packed == attention * (64**2 - 2 * 32**2)


def test_a_window_saves_attention_in_its_layers_only():
    windowed = TransformerConfig(**SMALL, window_size=(7, 0), window_attn_skip_freq="3")
    saved = model_flops(TransformerConfig(**SMALL), 128, [64]) - model_flops(
        windowed, 128, [64]
    )
    seen = 2 * sum(min(i + 1, 8) for i in range(64)) - 8  # the diagonal counts by half
    assert saved == 6 * 24 * 2 * (64**2 - seen)


def test_bytes_of_one_rank_hold_the_whole_model():
    model = load_preset("llama-3-8b")
    size = num_parameters(model.config, model.vocab_size)
    found = rank_bytes(
        model.config, model.vocab_size, ParallelConfig(), world_size=1, seq_length=8192
    )
    assert (found.weights, found.gradients, found.optimizer) == (2 * size, 4 * size, 12 * size)
    assert found.total == 18 * size + found.activations


def test_every_axis_makes_a_rank_lighter():
    model = load_preset("mixtral-8x7b")

    def on(world_size, **degrees):
        recomputing = degrees.pop("recomputing", RecomputeConfig())
        sharded = degrees.pop("sharded", True)
        return rank_bytes(
            model.config,
            model.vocab_size,
            ParallelConfig(**degrees),
            world_size=world_size,
            seq_length=4096,
            moe=model.moe,
            recomputing=recomputing,
            data_parallel=DataParallelConfig(use_distributed_optimizer=sharded),
        )

    whole = on(8)
    assert on(8, tensor_model_parallel_size=8).weights * 7.9 < whole.weights
    assert on(8, expert_model_parallel_size=8).weights * 4 < whole.weights
    assert on(8, pipeline_model_parallel_size=8).weights * 7 < whole.weights
    assert whole.optimizer * 8 == pytest.approx(on(1).optimizer, rel=1e-6)
    assert on(8, num_distributed_optimizer_instances=2).optimizer == pytest.approx(
        2 * whole.optimizer, rel=1e-6
    )
    assert on(8, sharded=False) == on(1)
    assert on(8, context_parallel_size=8).activations * 7 < whole.activations
    full = RecomputeConfig(recompute_granularity="full")
    assert on(8, recomputing=full).activations * 5 < whole.activations


def test_options_of_training_make_gradients_and_moments_narrower_and_pipelines_fuller():
    model = load_preset("llama-3-8b")

    def on(**options):
        return rank_bytes(
            model.config,
            model.vocab_size,
            ParallelConfig(pipeline_model_parallel_size=4),
            world_size=4,
            seq_length=4096,
            **options,
        )

    plain = on()
    moments = AdamConfig(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    assert on(optimizer=OptimizerChoice(adam=moments)).optimizer * 12 == plain.optimizer * 8
    narrow = on(data_parallel=DataParallelConfig(grad_reduce_in_bf16=True))
    assert narrow.gradients * 2 == plain.gradients
    wide = on(weight_bytes=4)
    assert (wide.weights, wide.optimizer) == (plain.weights * 2, plain.optimizer * 8 // 12)
    # A full pipeline of 4 holds 4 micro-batches on its first rank; with two stages a rank,
    # 2 x 3 + 4 + 1 halves; with fewer micro-batches in a step, these. What passes within a
    # layer is there once.
    chunks = PipelineConfig(num_virtual_stages_per_pipeline_rank=2)
    two = on(num_microbatches=2).activations
    each = (plain.activations - two) / 2
    fuller = on(pipeline=chunks).activations
    assert fuller == pytest.approx(two + 3.5 * each, rel=1e-6)
    # With one micro-batch all ranks store equally many layers, and the last rank has the logits
    # too, which are larger than the gradient within a layer.
    one = on(num_microbatches=1).activations
    logits, passing = 2 * 4096 * model.vocab_size, 2 * 4096 * 2 * 14336
    assert one == pytest.approx(two - each + logits - passing, rel=1e-6)
    # In a V the first rank has the loss too, whose logits come on top.
    both = on(pipeline=PipelineConfig(pipeline_schedule="zb-v"))
    half = on(pipeline=PipelineConfig(pipeline_schedule="dualpipev"))
    assert both.weights > plain.weights
    assert half.activations - both.activations == pytest.approx(each / 2, rel=1e-6)


def test_every_rank_keeps_the_micro_batches_of_its_schedule():
    kinds = ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 1)
    for name, vpp in kinds:
        pipeline = PipelineConfig(
            pipeline_schedule=name, num_virtual_stages_per_pipeline_rank=vpp
        )
        found = simulate(
            build_schedule(pipeline, 4, 16),
            num_microbatches=16,
            num_chunks=pipeline.num_chunks,
            v_shaped=pipeline.v_shaped,
        )
        held = [num / pipeline.num_chunks for num in found.peak_activations]
        assert [_passes_held(rank, 4, pipeline, 16, 8) for rank in range(4)] == held


def test_a_13b_trains_on_one_gpu_of_80_gb_by_recompute_and_offload_alone():
    shape = {"hidden_size": 5120, "num_attention_heads": 40, "ffn_hidden_size": 13824}
    model = TransformerConfig(num_layers=40, untie_embeddings_and_output_weights=True, **shape)

    def gib(**options):
        data = DataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_bf16=True)
        found = rank_bytes(
            model,
            32000,
            ParallelConfig(),
            world_size=1,
            seq_length=4096,
            data_parallel=data,
            **options,
        )
        return found.total / 2**30

    usable = 0.9 * 79
    recomputing = RecomputeConfig(recompute_granularity="full")
    offload = OffloadConfig(optimizer_cpu_offload=True)
    assert gib(recomputing=recomputing) > usable
    assert gib(offload=offload) > usable
    assert gib(recomputing=recomputing, offload=offload) < usable


def test_what_experts_keep_of_several_micro_batches_is_planned_as_it_was_measured():
    model = load_preset("qwen3-30b-a3b")

    def planned(together, vocab_size=model.vocab_size):
        return rank_bytes(
            replace(model.config, num_layers=8),
            vocab_size,
            ParallelConfig(),
            world_size=1,
            seq_length=4096,
            moe=replace(model.moe, moe_wgrad_micro_batches=together),
            num_microbatches=8,
        ).total

    # Peaks on an H200 (qwen3-30b-8-layers-wgrads-h200): copies fit where the logits were.
    for together, measured in ((1, 97.88), (2, 99.26), (4, 102.01), (8, 107.52)):
        assert planned(together) / 2**30 == pytest.approx(measured, rel=0.01)
    # A model of no vocabulary worth mentioning: what waits, and the widest copies.
    waits, copied = 8 * (3 * 8 * 768 + 2 * 2048), 2 * 8 * 768 + 2048
    more = planned(4, 128) - planned(1, 128) + 2 * 4096 * 128
    assert more == 2 * 4096 * (3 * waits + 4 * copied)


@pytest.mark.parametrize(
    ("kind", "limit", "rows", "tokens"),
    [
        ("alltoall", 0.0, 8, 8),  # rows that were sent are read in order
        ("allgather", 4.0, 32, 4),  # rows for the worst routing, from the tokens of all ranks
        ("symmetric", 4.0, 32, 32),
    ],
)
def test_rows_of_a_fixed_number_wait_for_the_sum_of_micro_batches(kind, limit, rows, tokens):
    model = load_preset("qwen3-30b-a3b")
    options = {"moe_token_dispatcher_type": kind, "moe_expert_rows_limit": limit}
    one, two = (
        rank_bytes(
            replace(model.config, num_layers=20),
            256,
            ParallelConfig(expert_model_parallel_size=4),
            world_size=4,
            seq_length=4096,
            moe=replace(model.moe, moe_wgrad_micro_batches=number, **options),
            num_microbatches=8,
        ).activations
        for number in (1, 2)
    )
    waiting = 20 * (3 * rows * 768 + 2 * tokens * 2048)
    copied = 2 * (2 * rows * 768 + tokens * 2048)
    # Without copies the widest gradient in a layer is that of fc1, if rows are fixed.
    gradient = 2 * rows * 768 * (rows == 32)
    assert two - one == 2 * 4096 * (waiting + copied - max(gradient, 256))


def test_what_data_ranks_share_and_what_the_host_keeps_is_counted():
    model = load_preset("llama-3-8b")
    size = num_parameters(model.config, model.vocab_size)
    layer = 218_112_000

    def bytes_of(strategy="optim", offload=_NOTHING, main="fp32", **flags):
        return rank_bytes(
            model.config,
            model.vocab_size,
            ParallelConfig(),
            world_size=2,
            seq_length=8192,
            data_parallel=DataParallelConfig(data_parallel_sharding_strategy=strategy, **flags),
            offload=offload,
            main_weights=MainWeightsConfig(main_params_dtype=main),
        )

    zero1, zero2, zero3 = map(bytes_of, ("optim", "optim_grads", "optim_grads_params"))
    assert zero1.optimizer == zero2.optimizer == zero3.optimizer == pytest.approx(6 * size)
    assert zero1.weights == pytest.approx(zero2.weights) == 2 * size
    ends = 2 * 128256 * 4096
    assert zero3.weights == pytest.approx(2 * (ends + 2 * layer), rel=1e-3)
    assert zero3.total < zero2.total < zero1.total
    halved = OffloadConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    half = bytes_of(offload=halved)
    passing = 3 * 48 * 2**20  # bytes of three pieces, which are on the device in turn
    assert half.host == pytest.approx(3 * size)
    assert half.host == zero1.optimizer - half.optimizer + passing
    filed = bytes_of(offload=replace(halved, optimizer_offload_dir="nvme"))
    assert (filed.host, filed.disk, filed.total) == (0, half.host, half.total)
    away = bytes_of(offload=OffloadConfig(cpu_offloading=True, cpu_offloading_num_layers=17))
    assert away.host == zero1.activations - away.activations > 0.45 * zero1.activations
    assert bytes_of(main="bf16").optimizer == pytest.approx(4 * size)
    assert bytes_of(main_grads_dtype="bf16").gradients == zero1.gradients // 2
    narrow = partial(bytes_of, "optim_grads_params", main_grads_dtype="bf16")
    assert narrow().weights - zero3.weights == pytest.approx(size)  # rows of 2 bytes
    assert narrow().gradients == pytest.approx(zero3.gradients / 2)
    assert narrow().optimizer == zero3.optimizer
    assert narrow(main="bf16").optimizer == pytest.approx(4 * size)
    away = OffloadConfig(optimizer_cpu_offload=True)
    assert (narrow(away).optimizer, narrow(away).host) == (passing, zero3.optimizer)
    assert narrow(away, "bf16").optimizer == passing
    assert narrow(away, "bf16").host == pytest.approx(4 * size)  # moments
    kept = bytes_of("optim_grads_params", away)
    assert kept.optimizer - passing == pytest.approx(2 * size)  # rows of float32
    assert kept.host == pytest.approx(4 * size)


def test_long_sequences_hold_the_widest_gradient_of_a_layer_instead_of_logits():
    model = find_preset("llama-3-8b").model

    def activations(seq_length, **options):
        return rank_bytes(
            model.config,
            model.vocab_size,
            ParallelConfig(),
            world_size=1,
            seq_length=seq_length,
            recomputing=RecomputeConfig(recompute_granularity="full"),
            **options,
        ).activations

    fp8 = Fp8Config(fp8_format="hybrid")
    # 131 072 tokens of 2 x 14336 in bfloat16, and as codes of one byte.
    for options, width in (({}, 2), ({"fp8": fp8}, 3)):
        logits = 2 * 4096 * model.vocab_size
        passing = 131072 * 2 * 14336 * width
        kept = activations(8192, **options) - logits
        assert activations(131072, **options) == pytest.approx(16 * kept + passing, rel=1e-3)
