"""Pushes a model's weights from training ranks to an engine on the last rank, and times it.

    torchrun --nproc-per-node 2 benchmarks/bench_weight_sync.py --preset llama-3-8b
    python -m torch.distributed.run --nproc-per-node 2 benchmarks/bench_weight_sync.py

All ranks but the last hold the weights in bfloat16, split by ``--tensor-model-parallel-size``;
the last holds an engine, which is not run. Memory for the 8B on two GPUs: 15 GiB on the first,
30 GiB on the second (a push writes to a second copy, the comparison builds one), and 1.5 GiB of
buffers on each. Without ``--preset`` a tiny model, on CPUs too. The result is one JSON line:
seconds of a push, the time of a plain send of as many bytes as its bound, and whether every
tensor arrived byte for byte.

``--batch-invariant`` also times a forward of the engine's model with and without the
batch-invariant kernels, on the last rank: --batch-rows texts of --seq-length tokens, or of one.
"""

import argparse
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_train_step import device_fills
from reporting import add_options, keep, spread, versions

from mcore_infer import Engine, EngineConfig
from mcore_models import load_preset, use_batch_invariant_kernels
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_parallel import ParallelConfig, ParallelContext
from mcore_parallel.launch import launcher
from mcore_parallel.sharding import named_shards
from mcore_train import EngineSync


def main() -> None:
    """Time pushes; print one JSON line on rank 0."""
    parser = argparse.ArgumentParser(description="Time pushes of weights to an engine.")
    add_options(parser)
    parser.add_argument("--preset", default="", help="such as llama-3-8b; empty: a tiny model")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256)
    options = parser.parse_args()
    device = launcher.initialize("auto")
    whole = ParallelContext.build(ParallelConfig(), device)
    rank, size = whole.world.rank, whole.world.size
    if size < 2:
        raise SystemExit("give two ranks or more: torchrun --nproc-per-node 2")
    trains = rank < size - 1
    grid = (
        ParallelConfig(tensor_model_parallel_size=options.tensor_model_parallel_size)
        if trains
        else ParallelConfig()
    )
    ranks = tuple(range(size - 1)) if trains else (size - 1,)
    ctx = ParallelContext.build(grid, device, ranks=ranks)
    model = build(options.preset, ctx, seed=1 + (not trains))
    engine = None
    if trains:
        shards = {f"model.{n}": s for n, s in named_shards(model, ctx.data_axes()).items()}
        sync = EngineSync(whole.world, weights=partial(dict, shards))
    else:
        engine = Engine(model.eval(), EngineConfig(num_pages=2, max_requests=1))
        sync = EngineSync(whole.world, engine=engine)
    seconds = []
    for _ in range(options.pushes):
        wait(whole, device)
        begin = time.perf_counter()
        sync.push()
        wait(whole, device)
        seconds.append(time.perf_counter() - begin)
    is_exact = True
    if not trains:
        expected = build(options.preset, ctx, seed=1).parameters()
        pairs = zip(model.parameters(), expected, strict=True)
        is_exact = all(torch.equal(mine, theirs) for mine, theirs in pairs)
    sent: list = [None] * size
    dist.all_gather_object(sent, (is_exact, sum(p.nbytes for p in model.parameters())))
    bound = plain_send(sent[-1][1], device, whole)
    row: dict[str, object] = {
        "name": f"weight-sync-{options.preset or 'tiny'}-{size}",
        "ranks": size,
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "num_bytes": sent[-1][1],
        "pushes": options.pushes,
        **spread(seconds[1:], "push_s", 4),
        "first_push_s": round(seconds[0], 4),
        "plain_send_s": round(bound, 4),
        "is_byte_exact": sent[-1][0],
        "peak_gib": peak(device),
    }
    if options.batch_invariant:
        times: list = [None] * size
        dist.all_gather_object(times, None if trains else forwards(model, options, device))
        row |= times[-1]
    if rank == 0:
        keep(options, {**row, **versions(options)})
    launcher.shut_down()


def build(preset: str, ctx: ParallelContext, seed: int) -> GPT:
    """Build a model with random weights; those of training and engine differ."""
    if preset:
        loaded = load_preset(preset)
        config, vocab_size = loaded.config, loaded.vocab_size
    else:
        config, vocab_size = (
            TransformerConfig(
                num_layers=4, hidden_size=256, num_attention_heads=8, ffn_hidden_size=1024
            ),
            1024,
        )
    # The host draws a billion weights in 3 s and more: the device draws them here.
    is_gpu = ctx.device.type == "cuda"
    with patch("mcore_parallel.rng.plan_fills", device_fills) if is_gpu else nullcontext():
        model = GPT(config, ctx, vocab_size=vocab_size, dtype=torch.bfloat16, seed=seed)
    return model.requires_grad_(False)


def plain_send(num_bytes: int, device: torch.device, whole: ParallelContext) -> float:
    """Return the seconds of one message from rank 0 to the last rank, sent in pieces."""
    piece = torch.zeros(min(num_bytes, 1 << 28), dtype=torch.uint8, device=device)
    last, times = whole.world.size - 1, []
    for _ in range(2):
        wait(whole, device)
        begin = time.perf_counter()
        for _ in range(-(-num_bytes // len(piece))):
            if whole.world.rank == 0:
                dist.send(piece, last)
            elif whole.world.rank == last:
                dist.recv(piece, 0)
        wait(whole, device)
        times.append(time.perf_counter() - begin)
    return min(times)


def forwards(model: GPT, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Time forwards with torch's kernels, then with batch-invariant ones."""
    row: dict[str, float] = {}
    lengths = {"prompt": options.seq_length, "token": 1}
    for kind in ("plain", "invariant"):
        if kind == "invariant":
            use_batch_invariant_kernels(model)
        for name, length in lengths.items():
            tokens = torch.zeros(options.batch_rows, length, dtype=torch.int64, device=device)
            times = []
            for _ in range(7):
                begin = time.perf_counter()
                with torch.no_grad():
                    model.logits(model(tokens)[0])
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - begin))
            row |= spread(times[2:], f"{kind}_{name}_ms", 2)
    return row


def wait(whole: ParallelContext, device: torch.device) -> None:
    """Wait for this device, then for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    launcher.wait_for_all(whole.world.group)


def peak(device: torch.device) -> float:
    """Return the most GiB of a GPU that rank 0 has used."""
    if device.type != "cuda":
        return 0.0
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


if __name__ == "__main__":
    main()
