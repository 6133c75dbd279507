"""Times decoding with random weights: one stream, batches, offline throughput.

    python benchmarks/bench_decode.py --name decode-llama-3-8b-h200 --geometry llama-3-8b

One line a case: tokens per second over all requests while all of them write (prompts are
read before; no log probabilities), the roofline of one stream: bytes of weights over the
memory's bandwidth, and the time from a prompt to its first token.

- ``--geometry``: sizes of a model of ``mcore-models list``, such as ``qwen3-30b-a3b``.
- ``--offline N``: also times N requests from their prompts to their last token; requests for
  which the cache has no room wait.
- ``--method``: rounds the weights to a quantized format first.
- ``--kv-cache-dtype fp8``: stores keys and values in fp8.
- ``--by-layers``: also times small batches without the whole-step kernel.
- ``--transformers N``: also times N tokens of transformers' ``generate``.

Under ``torchrun`` the ranks split every matrix; rank 0 prints, and bytes are those of one rank.
"""

import argparse
import random
import statistics
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from reporting import add_options, keep, quantiles, versions

from mcore_ckpt.formats.quantized_layouts import LAYOUTS, METHODS
from mcore_infer import Engine, EngineConfig, SamplingConfig, ScoreRequest
from mcore_infer.engine.limits import Fp8Cache
from mcore_infer.engine.whole_step import whole_step
from mcore_infer.quantization.gemms import QuantizedGemm
from mcore_infer.quantization.loading import linears, round_to_nearest_
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.presets import load_preset
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch.launcher import initialize, read_environment, shut_down
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optional_kernels import package_versions
from mcore_train.reporting.kernel_split import device_kernels, heaviest

GEOMETRIES = {
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256),
    "0.6b": (28, 1024, 16, 8, 3072, 151936),
    "tiny": (2, 64, 4, 2, 128, 1000),
}
"""Layers, hidden size, heads, key/value heads, feed-forward size, vocabulary."""
BANDWIDTH = 4.8e12
"""Bytes a second of an H200's memory by its data sheet."""


def main() -> None:
    """Run the benchmark by the command line."""
    options, ranks = _options(), read_environment().world_size
    device = initialize("auto")
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=ranks), device)
    try:
        run(options, ctx)
    finally:
        shut_down()


def run(options: argparse.Namespace, ctx: ParallelContext) -> None:
    """Time every case on this rank."""
    say = print if ctx.global_rank == 0 else lambda *_, **__: None
    model = build(options.geometry, ctx)
    dtype, vocab = next(model.parameters()).dtype, model.vocab_size
    if options.method:
        round_to_nearest_(model, LAYOUTS[METHODS[options.method]])
    parameters = {n: p for n, p in model.named_parameters() if not n.startswith("embedding")}
    read = sum(p.untyped_storage().nbytes() for p in parameters.values())
    held = [m.gemm for m in linears(model).values() if isinstance(m.gemm, QuantizedGemm)]
    read += sum(gemm.packed.nbytes + gemm.scales.nbytes for gemm in held)
    row = {
        "name": options.name,
        **versions(options),
        "geometry": options.geometry,
        "tensor_model_parallel_size": ctx.tp.size,
        "dtype": str(dtype),
        "method": options.method,
        "kv_cache_dtype": options.kv_cache_dtype,
        "weight_bytes": read,
        "roofline_tokens_per_s": round(BANDWIDTH / read, 1),
        "cases": {},
    }
    for batch in options.batches:
        row["cases"][f"batch {batch}"] = measure(model, options, batch, vocab)
        say(batch, row["cases"][f"batch {batch}"], flush=True)
    small = [b for b in options.batches if options.by_layers and b <= whole_step.MOST_ROWS]
    for batch in small:
        with patch.object(whole_step, "MOST_ROWS", 0):
            row["cases"][f"batch {batch} by layers"] = measure(model, options, batch, vocab)
        say("by layers", batch, row["cases"][f"batch {batch} by layers"], flush=True)
    if options.offline:
        row["cases"]["offline"] = measure_offline(model, options, vocab)
        say("offline", row["cases"]["offline"], flush=True)
    if options.transformers:
        theirs = build_transformers(options.geometry, ctx)
        for batch in options.batches:
            row["cases"][f"transformers batch {batch}"] = measure_transformers(
                theirs, options, batch
            )
            say("transformers", batch, row["cases"][f"transformers batch {batch}"], flush=True)
    if options.first_token:
        row["cases"]["first token"] = measure_first_token(model, options, vocab)
        say("first token", row["cases"]["first token"], flush=True)
    if ctx.device.type == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if ctx.global_rank == 0:
        keep(options, row)


def build(geometry: str, ctx: ParallelContext) -> GPT:
    """Build a model of random weights: bfloat16 on a GPU, float32 on a CPU."""
    moe = MoEConfig()
    if geometry in GEOMETRIES:
        layers, hidden, heads, groups, ffn, vocab = GEOMETRIES[geometry]
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=groups,
            ffn_hidden_size=ffn,
            max_position_embeddings=8192,
            rotary_base=500000,
            untie_embeddings_and_output_weights=True,
        )
    else:
        described = load_preset(geometry)
        config, moe, vocab = described.config, described.moe, described.vocab_size
    dtype = torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
    model = GPT(config, ctx, vocab_size=vocab, moe=moe, device="meta", dtype=dtype)
    model.to_empty(device=ctx.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return model.eval()


def measure(model: GPT, options: argparse.Namespace, batch: int, vocab: int) -> dict:
    """Let ``batch`` requests write together; the median of the rates of tenths of it."""
    engine = _engine(model, options, batch, options.new_tokens)
    pages = batch * -(-(options.prompt_tokens + options.new_tokens) // 64)
    if engine.config.num_pages < pages:
        raise ValueError(
            f"--batches {batch} with --new-tokens {options.new_tokens} needs {pages} pages at "
            f"once, and memory holds {engine.config.num_pages}: give fewer."
        )
    sampling = SamplingConfig(num_tokens=options.new_tokens, top_k=1)
    begin = time.perf_counter()
    _add(engine, sampling, options, batch, vocab)
    while engine.scheduler.num_waiting:
        engine.step()
    engine.step()  # the last prompts are read
    _wait()
    first = time.perf_counter() - begin
    for _ in range(3):  # records the graph
        engine.step()
    split = {"kernels": kernels_of_a_step(engine)} if options.split else {}
    rates = []
    while engine.scheduler.num_running == batch:
        _wait()
        at, done = time.perf_counter(), 0
        for _ in range(max(1, options.new_tokens // 12)):
            if engine.scheduler.num_running == batch:
                engine.step()
                done += batch
        _wait()
        rates.append(done / (time.perf_counter() - at))
    for _ in engine.run():
        pass
    rates = sorted(rates[:-1] or rates)
    return {
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "read_s": round(first, 3),
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_p10": round(rates[len(rates) // 10], 1),
        "tokens_per_s_p90": round(rates[-1 - len(rates) // 10], 1),
        **split,
    }


def kernels_of_a_step(engine: Engine, steps: int = 3) -> list[str]:
    """Describe the kernels of a step that take longest; those that start early overlap."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        _wait()
    return heaviest(device_kernels(profile), steps, 14)


def measure_offline(model: GPT, options: argparse.Namespace, vocab: int) -> dict:
    """Time ``offline`` requests that come together, after as many short ones."""
    for new_tokens in (4, options.offline_tokens):
        engine = _engine(model, options, options.offline, options.offline_tokens)
        _wait()
        begin = time.perf_counter()
        sampling = SamplingConfig(num_tokens=new_tokens, top_k=1)
        _add(engine, sampling, options, options.offline, vocab)
        for _ in engine.run():
            pass
        _wait()
        seconds, cache_tokens = time.perf_counter() - begin, engine.config.num_pages * 64
        del engine  # its cache, before the next one is measured
    return {
        "requests": options.offline,
        "cache_tokens": cache_tokens,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.offline_tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(options.offline * options.offline_tokens / seconds, 1),
    }


def build_transformers(geometry: str, ctx: ParallelContext) -> Any:
    """Build transformers' Llama of the same sizes, with random weights in the same dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, heads, groups, ffn, vocab = GEOMETRIES[geometry]
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=8192,
        dtype=torch.bfloat16 if ctx.device.type == "cuda" else torch.float32,
    )
    with ctx.device:
        model = LlamaForCausalLM._from_config(config)
    return model.eval()


def measure_transformers(model: Any, options: argparse.Namespace, batch: int) -> dict:
    """Let ``generate`` write greedily: tokens over the seconds that more of them take."""
    times, counts = [], (8, 8 + options.transformers)
    shape = (batch, options.prompt_tokens)
    tokens = torch.randint(model.config.vocab_size, shape, device=model.device)
    for count in (*counts[:1], *counts):
        _wait()
        begin = time.perf_counter()
        length = {"min_new_tokens": count, "max_new_tokens": count}
        model.generate(tokens, do_sample=False, pad_token_id=0, **length)
        _wait()
        times.append(time.perf_counter() - begin)
    seconds = times[2] - times[1]  # without the prompts
    return {
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": counts[1],
        "tokens_per_s": round(batch * options.transformers / seconds, 1),
        "version": package_versions(("transformers",))["transformers"],
    }


def _engine(model: GPT, options: argparse.Namespace, batch: int, new_tokens: int) -> Engine:
    """Build an engine whose cache takes what memory is left, at most what all may need."""
    page, length = 64, options.prompt_tokens + new_tokens
    return Engine(
        model,
        EngineConfig(
            max_requests=batch,
            max_tokens=max(8192, batch),
            max_sequence_tokens=length,
            page_tokens=page,
            prefix_cache=False,
            fp8_cache=Fp8Cache() if options.kv_cache_dtype == "fp8" else None,
        ),
    )


def _add(
    engine: Engine,
    sampling: SamplingConfig,
    options: argparse.Namespace,
    count: int,
    vocab: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        prompt = torch.randint(vocab, (options.prompt_tokens,), generator=generator).tolist()
        engine.add(prompt, sampling, scores=ScoreRequest(log_probs=False))


def measure_first_token(model: GPT, options: argparse.Namespace, vocab: int) -> dict:
    """Time one prompt from its arrival at the engine to its first token, after two others."""
    num_tokens = options.first_token
    config = EngineConfig(
        max_requests=1,
        max_tokens=max(8192, num_tokens),
        max_sequence_tokens=num_tokens + 64,
        prefix_cache=False,
        fp8_cache=Fp8Cache() if options.kv_cache_dtype == "fp8" else None,
    )
    engine, draw, times = Engine(model, config), random.Random(0), []
    for repeat in range(12):
        prompt = [draw.randrange(vocab) for _ in range(num_tokens)]
        _wait()
        is_split = options.split and repeat == 11
        activities = [torch.profiler.ProfilerActivity.CUDA] if is_split else []
        profile = torch.profiler.profile(activities=activities) if is_split else nullcontext()
        with profile:
            begin = time.perf_counter()
            sampling = SamplingConfig(num_tokens=1, top_k=1)
            engine.add(prompt, sampling, scores=ScoreRequest(log_probs=False))
            for _ in engine.run():
                pass
            times.append(time.perf_counter() - begin)
    times = sorted(1e3 * seconds for seconds in times[2 : 11 if options.split else 12])
    kernels = {"kernels": heaviest(device_kernels(profile), 1, 14)} if options.split else {}
    return {"prompt_tokens": num_tokens, **quantiles(times), **kernels}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--name", default="decode")
    parser.add_argument("--geometry", default="llama-3-8b", help="of GEOMETRIES, or a preset")
    parser.add_argument("--method", choices=METHODS, default="")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--by-layers", action="store_true", help="also without whole_step")
    parser.add_argument("--split", action="store_true", help="also by kernel")
    parser.add_argument("--first-token", type=int, default=4096, help="of this prompt; 0: none")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--transformers", type=int, default=0, help="tokens that it writes")
    parser.add_argument("--offline", type=int, default=0, help="requests; 0: not measured")
    parser.add_argument("--offline-tokens", type=int, default=2048)
    return parser.parse_args()


if __name__ == "__main__":
    main()
