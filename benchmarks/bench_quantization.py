"""Perplexity of every method of quantization on held-out text, beside the model's own.

    python benchmarks/bench_quantization.py --load runs/quickstart/checkpoint \\
        --train runs/quickstart/data/train.jsonl --held-out runs/quickstart/data/held_out.jsonl

Calibrates on the end of the training text and scores the held-out one. One JSON file.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from reporting import add_options, keep, versions

from mcore_ckpt.formats.quantized_layouts import METHODS
from mcore_infer.loading import load_model
from mcore_infer.quantization.options import QuantizeConfig
from mcore_infer.quantization.quantizing import quantize
from mcore_parallel.mesh import ParallelContext


def main() -> None:
    """Quantize by every method and keep what the receipts say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--name", default="quantization")
    parser.add_argument("--load", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    tokenizer = load_model(options.load, ParallelContext.single()).tokenizer
    held_out = _text(options.held_out)
    num_scored = len(tokenizer.encode(held_out, add_special_tokens=False))
    train = _text(options.train)[-len(held_out) :]
    num_used = len(tokenizer.encode(train, add_special_tokens=False))
    num_used = min(num_used, (num_used + num_scored) // 2)
    row = {
        "name": options.name,
        **versions(options),
        "calibration_tokens": num_used,
        "scored_tokens": num_scored,
        "methods": {},
    }
    for method in METHODS:
        sizes = options.group_sizes if method in ("awq", "gptq") else [0]
        for size in sizes:
            config = QuantizeConfig(
                method=method,
                group_size=size,
                kv_cache_dtype="fp8",
                calibration_tokens=num_used,
                scored_tokens=2 * num_scored,
            )
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                receipt = quantize(
                    options.load,
                    Path(folder) / "out",
                    f"{train}\n{held_out}",
                    config,
                    device=options.device,
                )
            name = f"{method} group {size}" if size else method
            row["methods"][name] = {
                "perplexity_before": round(receipt.perplexity_before, 4),
                "perplexity_after": round(receipt.perplexity_after, 4),
                "change_percent": round(receipt.perplexity_change, 3),
                "change_error_percent": round(receipt.perplexity_change_error, 3),
                "token_loss_change": round(receipt.token_loss_change, 5),
                "change_with_fp8_cache_percent": round(receipt.change_with_cache, 3),
                "worst_weight_error": round(max(m.weight_error for m in receipt.matrices), 4),
                "bytes_before": receipt.bytes_before,
                "bytes_after": receipt.bytes_after,
                "seconds": round(time.perf_counter() - begin, 1),
            }
            print(name, row["methods"][name], flush=True)
    keep(options, row)


def _text(path: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return "\n".join(json.loads(line)["text"] for line in lines)


if __name__ == "__main__":
    main()
