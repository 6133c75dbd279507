"""Builds tokenizers from tiktoken's files of mergeable byte strings by rank.

The file is Megatron's JSON (a list of rank and ``token_bytes``), or has lines of a byte string
in base64 and its rank, as the files of OpenAI and Llama 3. The result is an ``HFTokenizer``,
which is saved as ``tokenizer.json``.
"""

import json
from binascii import a2b_base64
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mcore_data.tokenizers.hf import HFTokenizer, byte_letters

_FIRST_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_ROLES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_from_base64 = partial(a2b_base64, strict_mode=True)
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "v1": rf"{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}",
    "v2": rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}",
    "gpt4": rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}",
}
"""Regular expressions that split a text; each match is encoded separately."""


def build_tiktoken(
    path: str | Path,
    *,
    pattern: str = "v2",
    num_special_tokens: int = 1000,
    vocab_size: int = 0,
    special_tokens: Sequence[str] = (),
) -> HFTokenizer:
    """Build a tokenizer from mergeable ranks.

    The first ``num_special_tokens`` ids are special tokens, then follow the ranks, then
    ``special_tokens``. Special tokens in a text become their ids.

    Args:
        path: file of the ranks.
        pattern: how text is split, a key of ``PATTERNS``.
        num_special_tokens: special tokens before the ranks; 0 or at least 7.
        vocab_size: number of ids without ``special_tokens``; higher ranks are left out. 0 uses
            all ranks.
        special_tokens: special tokens after the ranks.

    Raises:
        ValueError: if the ranks are not 0, 1, 2, ... without a gap, or a count does not fit.
    """
    if 0 < num_special_tokens < len(_FIRST_SPECIAL):
        raise ValueError(
            f"--tiktoken-num-special-tokens {num_special_tokens}: the first "
            f"{len(_FIRST_SPECIAL)} are {' '.join(_FIRST_SPECIAL)}. Give 0, or "
            f"{len(_FIRST_SPECIAL)} or more."
        )
    ranks = _read_ranks(Path(path))
    if vocab_size:
        num_ranks = vocab_size - num_special_tokens
        if not 256 <= num_ranks <= len(ranks):
            raise ValueError(
                f"--vocab-size {vocab_size} leaves {num_ranks} ranks after "
                f"{num_special_tokens} special tokens: at least 256 are required, and {path} "
                f"has {len(ranks)}."
            )
        ranks = {name: rank for name, rank in ranks.items() if rank < num_ranks}
    first = [
        _FIRST_SPECIAL[i] if i < len(_FIRST_SPECIAL) else f"<SPECIAL_{i}>"
        for i in range(num_special_tokens)
    ]
    clashes = [name for name in (*first, *special_tokens) if name in ranks]
    if clashes:
        raise ValueError(
            f"{clashes[0]} is an ordinary token of {path} and cannot be a special token: "
            "choose another name."
        )
    vocab = {name: i for i, name in enumerate(first)}
    vocab |= {name: num_special_tokens + rank for name, rank in ranks.items()}
    core = tokenizers.Tokenizer(models.BPE(vocab, _merges(ranks), ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*first, *special_tokens])
    return HFTokenizer(core, _ROLES if first else {})


def _read_ranks(path: Path) -> dict[str, int]:
    """Read ranks of either file format; return each token, a letter per byte, with its rank."""
    data = path.read_bytes()
    try:
        if data.lstrip()[:1] == b"[":
            rows = json.loads(data)
            encoded = [row["token_bytes"] for row in rows]
            numbers = [int(row["rank"]) for row in rows]
        else:
            words = data.split()
            encoded, numbers = words[::2], list(map(int, words[1::2]))
            if len(encoded) != len(numbers):
                raise ValueError("a token without a rank")
        raw = list(map(_from_base64, encoded))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--tokenizer-model {path} holds no mergeable ranks: {error}. It must be a JSON "
            "list of rank and token_bytes, or lines of a base64 string and its rank."
        ) from error
    letters = np.array(list(map(ord, byte_letters())), "<u2")
    text = letters[np.frombuffer(b"".join(raw), np.uint8)].tobytes().decode("utf-16-le")
    names = [text[start:end] for start, end in pairwise(accumulate(map(len, raw), initial=0))]
    expected_numbers = list(range(len(names)))
    if numbers != expected_numbers:
        names = [name for _, name in sorted(zip(numbers, names, strict=True))]
    ranks = dict(zip(names, expected_numbers, strict=True))
    if sorted(numbers) != expected_numbers or len(ranks) < len(names):
        raise ValueError(
            f"--tokenizer-model {path}: the ranks are not 0, 1, 2, ... without gaps."
        )
    if "" in ranks:
        raise ValueError(f"--tokenizer-model {path} has an empty token.")
    if not ranks.keys() >= set(byte_letters()):
        raise ValueError(f"--tokenizer-model {path} lacks some of the 256 single bytes.")
    return ranks


def _merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, by the rank of the latter.

    Tiktoken always merges the two neighbours whose concatenation has the lowest rank. A list of
    merges is equivalent if it has all such pairs, in the order of the ranks.
    """
    merges: list[tuple[str, str]] = []
    for token in ranks:  # in the order of rank
        cuts = [i for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        cuts.sort(key=lambda i: ranks[token[:i]])
        merges += [(token[:i], token[i:]) for i in cuts]
    return merges
