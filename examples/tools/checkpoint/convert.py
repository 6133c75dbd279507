"""Megatron's conversion of checkpoints as its documents spell it: run it in ``examples``.

    python tools/checkpoint/convert.py --model-type GPT --loader llama_mistral --saver mcore \\
        --load-dir Llama-3.2-1B --save-dir runs/llama

The same as ``mcore-ckpt convert``. A loader of Hugging Face folders reads one, every other a
checkpoint of Megatron's; saver ``hf`` writes a Hugging Face folder, every other a checkpoint of
ours, which loads under any layout, so degrees are named and left out.
"""

import argparse
import sys
from collections.abc import Sequence

from mcore_ckpt.cli import main as ckpt

HUGGING_FACE = ("llama_mistral", "mixtral_hf", "hf", "llama2_hf", "llama2")
MEGATRON = ("core", "legacy", "megatron", "mcore")
NOT_NEEDED = (
    *(
        "--model-type",
        "--max-queue-size",
        "--model-size",
        "--checkpoint-type",
        "--megatron-path",
    ),
    *("--target-tensor-parallel-size", "--target-pipeline-parallel-size"),
    *("--target-expert-parallel-size", "--tokenizer-model", "--position-embedding-type"),
    *("--loader-transformer-impl", "--saver-transformer-impl", "--no-checking", "--bf16"),
)


def main(argv: Sequence[str]) -> int:
    """Convert one checkpoint; exits as ``mcore-ckpt convert`` does."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--loader", default="megatron", choices=(*HUGGING_FACE, *MEGATRON))
    parser.add_argument("--saver", default="mcore", choices=("hf", *MEGATRON))
    parser.add_argument("--load-dir", required=True)
    parser.add_argument("--save-dir", required=True)
    for flag in NOT_NEEDED:
        parser.add_argument(flag, nargs="?", const="")
    known, rest = parser.parse_known_args(argv)
    given = [f for f in NOT_NEEDED if getattr(known, f[2:].replace("-", "_")) is not None]
    if given:
        print(f"not needed, files and layouts decide it: {' '.join(given)}", file=sys.stderr)
    source = "hf" if known.loader in HUGGING_FACE else "megatron"
    target = "hf" if known.saver == "hf" else "mcore"
    folders = ["--input", known.load_dir, "--output", known.save_dir]
    return ckpt(["convert", f"{source}-to-{target}", *folders, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
