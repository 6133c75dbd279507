"""Megatron's zero-shot tasks as its documents spell them.

    python tasks/main.py --task WIKITEXT103 --valid-data wiki.test.tokens --load runs/gpt

The same as ``mcore-infer eval``. A checkpoint says which model it holds and brings its
tokenizer, so flags about these are named and left out, as is a --vocab-file without the
--merge-file that it needs; a whole vocabulary that is given is used.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence

from mcore_data.tokenizers.building import TOKENIZER_TYPES, load_tokenizer
from mcore_infer.cli import main as infer

NOT_NEEDED = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings"),
    *("--log-interval", "--fp16", "--bf16", "--no-load-optim", "--no-load-rng"),
    "--checkpoint-activations",
)


def main(argv: Sequence[str]) -> int:
    """Run one task; exits as ``mcore-infer eval`` does."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--vocab-file")
    parser.add_argument("--merge-file", default="")
    parser.add_argument("--tokenizer-type", default="GPT2BPETokenizer", choices=TOKENIZER_TYPES)
    for flag in NOT_NEEDED:
        parser.add_argument(flag, nargs="?", const="")
    known, rest = parser.parse_known_args(argv)
    given = [f for f in NOT_NEEDED if getattr(known, f[2:].replace("-", "_")) is not None]
    is_whole = known.vocab_file and (known.merge_file or "BPE" not in known.tokenizer_type)
    if known.vocab_file and not is_whole:
        given.append("--vocab-file")
    if given:
        print(f"not needed, the checkpoint says it: {' '.join(given)}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        if is_whole:
            files = {"vocab_file": known.vocab_file, "merge_file": known.merge_file}
            try:
                load_tokenizer(known.tokenizer_type, **files).save(folder)
            except (ValueError, FileNotFoundError) as error:
                print(f"tasks/main.py: error: {error}", file=sys.stderr)
                return 2
            rest += ["--tokenizer", folder]
        return infer(["eval", *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
