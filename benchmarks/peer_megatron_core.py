"""The peer's step: megatron-core with Transformer Engine, on the work of bench_train_step.

    torchrun --nproc-per-node 4 benchmarks/peer_megatron_core.py --num-layers 32 --accumulate 4

Llama-3-8B geometry, data parallel with its sharded optimizer, both overlaps, native fused
loss and fused attention, no fusion of gradient accumulation (that needs apex), garbage
collected by hand. Needs megatron-core and transformer-engine; nothing here uses mcore.
If a host has a second cuDNN, set CUDNN_HOME to torch's, site-packages/nvidia/cudnn, and put its
lib first on LD_LIBRARY_PATH, as many_gpus.sh does; one of the two alone did not suffice.
Otherwise Transformer Engine loads the host's, and torch refuses it or attention is not fused.
Rank 0 prints one JSON line with the keys of bench_train_step.
"""

import argparse
import contextlib
import gc
import inspect
import itertools
import json
import os
import statistics
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

VOCAB, HIDDEN, FFN, HEADS, GROUPS = 128_256, 4096, 14_336, 32, 8


def main() -> None:
    """Time the step and report."""
    options = _options()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when the context is made
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.backends.cudnn.version()  # another cuDNN than torch's fails before the steps
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    with contextlib.suppress(AssertionError):
        world = dist.get_world_size()
        init_num_microbatches_calculator(0, None, options.accumulate * world, 1, world)
    model_parallel_cuda_manual_seed(1234)
    step = _build(options)
    gc.collect()
    gc.disable()
    times = _time(step, options.warmup, options.steps)
    if dist.get_rank() == 0:
        _report(options, times)
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--num-layers", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--fp8-recipe", choices=("delayed", "tensorwise"), help="fp8 GEMMs")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=None)
    return parser.parse_args()


def _build(options: argparse.Namespace):
    config = TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="native",
        attention_backend=AttnBackend.fused,
        fp8="hybrid" if options.fp8_recipe else None,
        fp8_recipe=options.fp8_recipe or "delayed",
    )
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        VOCAB,
        options.seq_length,
        position_embedding_type="rope",
        rotary_base=500_000,
    ).cuda()
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=max(40_000_000, 1_000_000 * dist.get_world_size()),
            average_in_collective=True,
        ),
        model,
    )
    config.no_sync_func = ddp.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    settings = {
        "optimizer": "adam",
        "lr": 1e-5,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "clip_grad": 1.0,
    }
    known = inspect.signature(OptimizerConfig).parameters
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**{k: v for k, v in settings.items() if k in known}), [ddp]
    )
    for group in optimizer.param_groups:
        group.setdefault("lr", 1e-5)
    config.grad_scale_func = optimizer.scale_loss
    shape = (1, options.seq_length)
    batches = [
        tuple(torch.randint(0, VOCAB, shape, device="cuda") for _ in range(2)) for _ in range(4)
    ]
    positions = torch.arange(options.seq_length, device="cuda")[None]
    forward_backward = get_forward_backward_func()

    def forward(batch_iterator, chunk):
        tokens, labels = next(batch_iterator)
        losses = chunk(tokens, positions, None, labels=labels)
        return losses, lambda out: (out.float().mean(), {})

    def step(_: int) -> None:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward,
            data_iterator=itertools.cycle(batches),
            model=[ddp],
            num_microbatches=options.accumulate,
            seq_length=options.seq_length,
            micro_batch_size=1,
        )
        optimizer.step()

    return step


def _time(step, warmup: int, steps: int) -> list[float]:
    for i in range(warmup):
        step(i)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for i in range(steps):
        step(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def _report(options: argparse.Namespace, times: list[float]) -> None:
    ordered = sorted(times)
    ms = statistics.median(ordered)
    head = HIDDEN // HEADS
    layer = HIDDEN * head * (2 * HEADS + 2 * GROUPS) + 3 * HIDDEN * FFN
    weights = options.num_layers * layer + HIDDEN * VOCAB
    attention = 6 * options.num_layers * options.seq_length * HIDDEN  # causal: half the square
    flops = 6 * weights + attention
    rate = options.accumulate * options.seq_length / ms * 1e3
    row = {
        "name": f"megatron-core-{options.num_layers}-layers-dp{dist.get_world_size()}"
        + (f"-fp8-{options.fp8_recipe}" if options.fp8_recipe else ""),
        "device": torch.cuda.get_device_name(),
        "num_gpus": dist.get_world_size(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "megatron_core": megatron_version,
        "transformer_engine": version("transformer_engine"),
        "fp8_recipe": options.fp8_recipe,
        "warmup": options.warmup,
        "steps": options.steps,
        "micro_batches": options.accumulate,
        "step_ms": round(ms, 2),
        "step_ms_p10": round(ordered[len(ordered) // 10], 2),
        "step_ms_p90": round(ordered[len(ordered) * 9 // 10], 2),
        "tokens_per_s_per_gpu": round(rate, 1),
        "tflops_per_gpu": round(rate * flops / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }
    line = json.dumps(row)
    print(line)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{row['name']}.json").write_text(line + "\n")


if __name__ == "__main__":
    main()
