"""The peer's decoding: vLLM on the work of bench_decode, with random weights.

    python benchmarks/peer_vllm.py --name vllm-llama-3-8b --output benchmarks/results

Needs vLLM; nothing here uses mcore but the report. Batches of prompts are written to two
lengths, and the rate is that of the tokens between the two, so that reading the prompts and
starting do not count. Compiled, with vLLM's own CUDA graphs, as its ``serve`` starts.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import vllm
from reporting import add_options, keep, versions
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
REPEATS = 3


def main() -> None:
    """Time every batch size and keep the result."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_3_8B))
        llm = LLM(
            model=folder,
            load_format="dummy",
            dtype="bfloat16",
            quantization=options.method or None,
            kv_cache_dtype=options.kv_cache_dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=1024,
            max_num_seqs=max(options.batches),
            gpu_memory_utilization=0.85,
        )
    row = {
        "name": options.name,
        "vllm": vllm.__version__,
        **versions(options),
        "method": options.method,
        "kv_cache_dtype": options.kv_cache_dtype,
        "cases": {f"batch {n}": _measure(llm, options, n) for n in options.batches},
    }
    keep(options, row)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", default="vllm-llama-3-8b")
    parser.add_argument("--method", choices=("", "fp8"), default="")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    add_options(parser)
    return parser.parse_args()


def _measure(llm: LLM, options: argparse.Namespace, batch: int) -> dict:
    lengths = options.new_tokens // 8, options.new_tokens
    rates = []
    for repeat in range(REPEATS + 1):
        seconds = [_seconds(llm, options, batch, length) for length in lengths]
        if repeat:  # the first warms up
            rates.append(batch * (lengths[1] - lengths[0]) / (seconds[1] - seconds[0]))
    return {
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_of_each": [round(rate, 1) for rate in rates],
    }


def _seconds(llm: LLM, options: argparse.Namespace, batch: int, length: int) -> float:
    sampling = SamplingParams(
        temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False
    )
    ids = range(1, options.prompt_tokens + 1)
    prompts = [TokensPrompt(prompt_token_ids=[1000 * i + t for t in ids]) for i in range(batch)]
    begin = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
