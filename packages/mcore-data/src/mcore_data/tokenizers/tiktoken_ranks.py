"""Tokenizers of tiktoken's kind: a file of mergeable byte strings by rank.

The file is Megatron's JSON (a list of rank and ``token_bytes``) or lines of a byte string
in base64 and its rank, as OpenAI and Llama 3 publish theirs. It becomes an ``HFTokenizer``,
which saves as ``tokenizer.json``.
"""

import json
from binascii import a2b_base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from mcore_data.tokenizers.hf import HFTokenizer, Known, byte_letters

_FIRST_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_ROLES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_TOKEN_OPTIONS = {
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    "special": True,
}
_HASH_BASE_AND_INVERSE = (0x9E3779B97F4A7C15, pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_SPREAD = np.uint64(0xC2B2AE3D27D4EB4F)
_MASK = (1 << 21) - 1
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
"""Regular expressions whose matches are encoded one by one."""


def build_tiktoken(
    path: str | Path,
    *,
    pattern: str = "v2",
    num_special_tokens: int = 1000,
    vocab_size: int = 0,
    special_tokens: Sequence[str] = (),
) -> HFTokenizer:
    """Build a tokenizer from mergeable ranks.

    Ids are ``num_special_tokens`` special ones first, then the ranks, then
    ``special_tokens``. As everywhere here, special tokens that a text spells out become
    their ids.

    Args:
        path: the ranks.
        pattern: how text is split, a key of ``PATTERNS``.
        num_special_tokens: special tokens before the ranks; 0 or at least 7.
        vocab_size: ids in all without ``special_tokens``; ranks beyond are left out. 0 takes
            all.
        special_tokens: further ones behind.

    Raises:
        ValueError: if the file holds no ranks from 0 on without a gap, or a count is off.
    """
    if 0 < num_special_tokens < len(_FIRST_SPECIAL):
        raise ValueError(
            f"--tiktoken-num-special-tokens {num_special_tokens}: the first "
            f"{len(_FIRST_SPECIAL)} are {' '.join(_FIRST_SPECIAL)}. Give 0 or at least as many."
        )
    ranks = _read_ranks(Path(path))
    if vocab_size:
        kept = vocab_size - num_special_tokens
        if not 256 <= kept <= len(ranks):
            raise ValueError(
                f"--vocab-size {vocab_size} leaves {kept} ranks beside {num_special_tokens} "
                f"special tokens; {path} has {len(ranks)}, and 256 are needed."
            )
        ranks = {name: rank for name, rank in ranks.items() if rank < kept}
    first = [
        _FIRST_SPECIAL[i] if i < len(_FIRST_SPECIAL) else f"<SPECIAL_{i}>"
        for i in range(num_special_tokens)
    ]
    both = [name for name in (*first, *special_tokens) if name in ranks]
    if both:
        raise ValueError(f"{both[0]} is a token of {path} already and cannot be a special one.")
    vocab = {name: i for i, name in enumerate(first)}
    vocab |= {name: num_special_tokens + rank for name, rank in ranks.items()}
    ids = dict(vocab)
    for name in special_tokens:
        ids.setdefault(name, len(ids))
    names = sorted({*first, *special_tokens}, key=ids.__getitem__)
    parts = _Parts(ranks, vocab, {name: ids[name] for name in names}, pattern)
    known = Known(ids, names, parts.write, parts.empty, "BPE")
    return HFTokenizer(parts.build, _ROLES if first else {}, known)


@dataclass(frozen=True)
class _Parts:
    """What the library's tokenizer is built of, and its text written from."""

    ranks: Mapping[str, int]
    vocab: Mapping[str, int]
    special_ids: Mapping[str, int]
    pattern: str

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """All of them; a list of some hundred thousand takes a while."""
        return _merges(self.ranks)

    def build(self) -> tokenizers.Tokenizer:
        """Build the tokenizer, with a look at all that was only reckoned before."""
        unions = [self.ranks.get("".join(merge), -1) for merge in self.merges]
        assert -1 not in unions, "hashes collide"
        assert unions == sorted(unions), "hashes collide"
        core = _tokenizer(self.vocab, self.merges, list(self.special_ids), self.pattern)
        added = {token.content: i for i, token in core.get_added_tokens_decoder().items()}
        assert added == self.special_ids, "special tokens have other ids"
        return core

    def empty(self) -> tokenizers.Tokenizer:
        """Build the tokenizer without vocabulary and special tokens."""
        return _tokenizer({}, [], [], self.pattern)

    def write(self) -> str:
        """What ``to_str()`` of the tokenizer gives, in a fraction of its time."""
        parts = json.loads(self.empty().to_str())
        parts["added_tokens"] = [
            {"id": i, "content": name, **_TOKEN_OPTIONS} for name, i in self.special_ids.items()
        ]
        parts["model"] |= {"vocab": self.vocab, "merges": self.merges}
        return _dumps(parts)


def _tokenizer(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    special_tokens: Sequence[str],
    pattern: str,
) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE(dict(vocab), merges, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special_tokens))
    return core


def _dumps(parts: Mapping[str, object]) -> str:
    """JSON without blanks; by orjson if it is there, in a tenth of the time."""
    try:
        from orjson import dumps
    except ImportError:
        return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    return dumps(parts).decode()


def _read_ranks(path: Path) -> dict[str, int]:
    """Tokens by rank, from either form of file; a letter stands for each byte."""
    data = path.read_bytes()
    try:
        if data.lstrip()[:1] == b"[":
            rows = json.loads(data)
            written = [row["token_bytes"] for row in rows]
            numbers = [int(row["rank"]) for row in rows]
        else:
            words = data.split()
            written, numbers = words[::2], list(map(int, words[1::2]))
            if len(written) != len(numbers):
                raise ValueError("a token without a rank")
        raw = list(map(_from_base64, written))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--tokenizer-model {path} holds no mergeable ranks: {error}. It must be a JSON "
            "list of rank and token_bytes, or lines of a base64 string and its rank."
        ) from error
    letters = np.array(list(map(ord, byte_letters())), "<u2")
    text = letters[np.frombuffer(b"".join(raw), np.uint8)].tobytes().decode("utf-16-le")
    names = [text[start:end] for start, end in pairwise(accumulate(map(len, raw), initial=0))]
    in_order = list(range(len(names)))
    if numbers != in_order:
        names = [name for _, name in sorted(zip(numbers, names, strict=True))]
    ranks = dict(zip(names, in_order, strict=True))
    if sorted(numbers) != in_order or len(ranks) < len(names):
        raise ValueError(f"--tokenizer-model {path}: the ranks do not count from 0 on.")
    if "" in ranks:
        raise ValueError(f"--tokenizer-model {path} holds an empty token.")
    if not ranks.keys() >= set(byte_letters()):
        raise ValueError(f"--tokenizer-model {path} lacks some of the 256 single bytes.")
    return ranks


def _merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two, by the rank of what it makes.

    Tiktoken joins the neighbours whose union ranks lowest, whichever two they are; a list of
    merges says the same when it holds all pairs, in the order of the unions. All beginnings
    and ends of tokens are looked up at once, by polynomial hashes modulo 2**64, of which one
    running sum over the letters of all tokens holds every one.
    """
    tokens = list(ranks)  # in the order of rank
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    letters = np.frombuffer("".join(tokens).encode("utf-16-le"), np.uint16)
    place = np.arange(len(letters)) - np.repeat(starts, lengths)
    powers, inverses = (_powers(base, int(lengths.max())) for base in _HASH_BASE_AND_INVERSE)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(letters * powers[place])))
    find = _finder(sums[ends] - sums[starts])
    cuts = np.flatnonzero(place)
    owners = np.repeat(np.arange(len(tokens)), lengths - 1)
    lefts = find(sums[cuts] - sums[starts[owners]])
    cuts, owners, lefts = (part[lefts >= 0] for part in (cuts, owners, lefts))
    rights = find((sums[ends[owners]] - sums[cuts]) * inverses[place[cuts]])
    keys = (owners << 42 | lefts << 21 | rights)[rights >= 0]
    keys.sort()
    names = np.array(tokens, object)
    pair = names[keys >> 21 & _MASK], names[keys & _MASK]
    return list(zip(*(each.tolist() for each in pair), strict=True))


def _finder(hashes: NDArray[np.uint64]) -> Callable[[NDArray[np.uint64]], NDArray[np.int64]]:
    """Return what says where in ``hashes`` others are, -1 for those that are not there.

    The top bits of a hash, spread by a product, say where among the sorted ones to begin.
    """
    spread = hashes * _SPREAD
    order = np.argsort(spread)
    ordered = np.append(spread[order], np.uint64(2**64 - 1))
    shift = np.uint64(64 - len(hashes).bit_length())
    bottoms = np.arange(1 << len(hashes).bit_length(), dtype=np.uint64) << shift
    firsts = np.searchsorted(ordered, bottoms)

    def find(wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
        wanted = wanted * _SPREAD
        at = firsts[(wanted >> shift).view(np.int64)]
        below = np.flatnonzero(ordered[at] < wanted)
        while len(below):
            at[below] += 1
            below = below[ordered[at[below]] < wanted[below]]
        return np.where(ordered[at] == wanted, np.append(order, -1)[at], -1)

    return find


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Powers 0 to ``count`` of a base, modulo 2**64."""
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
