"""The peer's decoding: vLLM on the work of bench_decode and bench_load, with random weights.

    python benchmarks/peer_vllm.py --name vllm-llama-3-8b --output benchmarks/results

Needs vLLM; nothing here uses mcore but the report. Batches of prompts are written to two
lengths, and the rate is that of the tokens between the two, so that reading the prompts and
starting do not count. ``--offline 512x128x2048`` times 512 requests from their prompts of 128
tokens to their last of 2048, ``--first-token`` one prompt to its first token, ``--rates``
requests that arrive by a Poisson process, by the client of ``bench_load``. Compiled, with
vLLM's own CUDA graphs, as its ``serve`` starts.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import poisson
import vllm
from reporting import add_options, keep, quantiles, versions
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

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
QWEN3_30B_A3B = {
    **LLAMA_3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}
GEOMETRIES = {"llama-3-8b": LLAMA_3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}
REPEATS = 3


def main() -> None:
    """Time every case and keep the result."""
    options = _options()
    # The longest text, and the most that are written together, of all cases.
    longest = max(options.prompt_tokens + options.new_tokens, options.first_token + 1)
    together = max([1, *options.batches])
    for requests, prompt_tokens, new_tokens in options.offline:
        longest = max(longest, prompt_tokens + new_tokens)
        together = max(together, requests)
    if options.rates:
        longest = max(longest, 2 * (options.load_prompt_tokens + options.load_new_tokens))
        together = max(together, 128)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GEOMETRIES[options.geometry]))
        llm = LLM(
            model=folder,
            load_format="dummy",
            dtype="bfloat16",
            quantization=options.method or None,
            kv_cache_dtype=options.kv_cache_dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=-(-longest // 1024) * 1024,
            max_num_seqs=together,
            gpu_memory_utilization=options.memory,
        )
    row = {
        "name": options.name,
        "vllm": vllm.__version__,
        **versions(options),
        "geometry": options.geometry,
        "method": options.method,
        "kv_cache_dtype": options.kv_cache_dtype,
        "start_s": round(time.perf_counter() - begin, 1),
        "cases": {},
    }

    def note(name: str, case: dict) -> None:
        row["cases"][name] = case
        print(name, case, flush=True)

    for batch in options.batches:
        note(f"batch {batch}", _measure(llm, options, batch))
    if options.first_token:
        note("first token", _first_token(llm, options.first_token))
    for rate in options.rates:
        note(f"{rate:g} requests/s", _load(llm, options, rate))
    for shape in options.offline:
        note("offline {}x{}x{}".format(*shape), _offline(llm, *shape))
        keep(options, row)
    keep(options, row)


def _shape(text: str) -> tuple[int, int, int]:
    requests, prompt_tokens, new_tokens = map(int, text.split("x"))
    return requests, prompt_tokens, new_tokens


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", default="vllm-llama-3-8b")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3-8b")
    parser.add_argument("--method", choices=("", "fp8"), default="")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--first-token", type=int, default=4096, help="of this prompt; 0: none")
    parser.add_argument(
        "--offline", type=_shape, nargs="*", default=[], metavar="NxPROMPTxTEXT"
    )
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each rate")
    parser.add_argument("--load-prompt-tokens", type=int, default=512, help="mean at --rates")
    parser.add_argument("--load-new-tokens", type=int, default=128, help="mean at --rates")
    add_options(parser)
    return parser.parse_args()


def _measure(llm: LLM, options: argparse.Namespace, batch: int) -> dict:
    lengths = options.new_tokens // 8, options.new_tokens
    rates = []
    for repeat in range(REPEATS + 1):
        seconds = [_seconds(llm, batch, options.prompt_tokens, length) for length in lengths]
        if repeat:  # the first warms up
            rates.append(batch * (lengths[1] - lengths[0]) / (seconds[1] - seconds[0]))
    return {
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_of_each": [round(rate, 1) for rate in rates],
    }


def _first_token(llm: LLM, num_tokens: int) -> dict:
    times = [1e3 * _seconds(llm, 1, num_tokens, 1) for _ in range(12)][2:]
    return {"prompt_tokens": num_tokens, **quantiles(times)}


def _offline(llm: LLM, requests: int, prompt_tokens: int, new_tokens: int) -> dict:
    _seconds(llm, requests, prompt_tokens, 4)
    seconds = _seconds(llm, requests, prompt_tokens, new_tokens)
    return {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(requests * new_tokens / seconds, 1),
    }


def _seconds(llm: LLM, batch: int, prompt_tokens: int, length: int) -> float:
    sampling = SamplingParams(
        temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False
    )
    ids = range(1, prompt_tokens + 1)
    prompts = [
        TokensPrompt(prompt_token_ids=[(1000 * i + 7 * t) % 100_000 for t in ids])
        for i in range(batch)
    ]
    begin = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin


class _Client:
    """vLLM's engine as ``poisson.run`` calls it."""

    def __init__(self, llm: LLM, vocab_size: int) -> None:
        self.engine, self.vocab_size, self.num_requests = llm.llm_engine, vocab_size, 0

    def add(self, prompt: Sequence[int], num_tokens: int, seed: int) -> int:
        del seed  # requests with seeds of their own leave vLLM's fast path
        sampling = SamplingParams(
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        number, self.num_requests = self.num_requests, self.num_requests + 1
        self.engine.add_request(
            f"load-{number}", TokensPrompt(prompt_token_ids=list(prompt)), sampling
        )
        return number

    def has_work(self) -> bool:
        return self.engine.has_unfinished_requests()

    def step(self) -> list[int]:
        return [
            int(output.request_id.removeprefix("load-"))
            for output in self.engine.step()
            for _ in output.outputs[0].token_ids
        ]


def _load(llm: LLM, options: argparse.Namespace, rate: float) -> dict:
    means = options.load_prompt_tokens, options.load_new_tokens
    vocab_size = GEOMETRIES[options.geometry]["vocab_size"]
    poisson.run(_Client(llm, vocab_size), [0.0] * 16, *means, seed=1)  # warms up
    case = poisson.measure(_Client(llm, vocab_size), rate, options.seconds, *means)
    return {"requests_per_s": rate, **case}


if __name__ == "__main__":
    main()
