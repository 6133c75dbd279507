"""Decides whether an engine supports a tokenizer: every part of its pipeline must be listed.

An engine supports a tokenizer only if it is known to implement each normalizer, pre-tokenizer,
model option, added-token flag and field of a SentencePiece model, as the generated tokenizers
of ``tests/engines/test_generated_tokenizers.py`` show. ``gigatoken_gap`` and ``words_gap`` name
the first unsupported part; then the tokenizer encodes.
"""

import json
import string
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mcore_data.tokenizers.hf import HFTokenizer, byte_letters
from mcore_data.tokenizers.multimodal import MultimodalTokenizer
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer
from mcore_data.tokenizers.tiktoken_ranks import PATTERNS

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
SPLITS: dict[str, tuple[str, ...]] = {
    "llama-3": (PATTERNS["gpt4"],),
    "nemotron": (PATTERNS["v2"],),
    "qwen-2": (
        rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}",
    ),
    "qwen-3.5": (
        (
            rf"{_CONTRACTIONS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}|"
            rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
        ),
    ),
    "o200k": (
        (
            rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*"
            rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
        ),
    ),
    "deepseek": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        (
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
            "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
            "\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
    ),
}
"""Regular expressions by which gigatoken splits a text, in turn, before ByteLevel."""

_MARK = "\u2581"
_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
_PREPEND = {"type": "Prepend", "prepend": _MARK}
_METASPACE = {"type": "Metaspace", "replacement": _MARK, "split": False}
_ON_BLANKS = {"type": "Split", "pattern": {"String": " "}, "invert": False}
# Normalizers and pre-tokenizers by which blanks become marks and nothing is split.
_MARKING: list[Any] = [
    [{"type": "Sequence", "normalizers": [_PREPEND, _TO_MARK]}, None],
    [_TO_MARK, None],
    [_TO_MARK, {**_ON_BLANKS, "behavior": "MergedWithPrevious"}],
    *([None, {**_METASPACE, "prepend_scheme": how}] for how in ("always", "first", "never")),
]
_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
# SentencePiece: types of pieces, and the fields of its messages that are known not to change
# the ids of a text (training settings, names of ids, decoding).
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_TYPES = {4: "user-defined", 5: "unused"}
_INERT_TRAINER = {
    1,
    2,
    *range(4, 8),
    *range(10, 24),
    25,
    26,
    *range(30, 35),
    36,
    *range(40, 56),
}


def gigatoken_gap(tokenizer: Tokenizer) -> str | None:
    """Return the first part of a tokenizer that gigatoken does not support, or None."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _model_gap(tokenizer.path)
    if not isinstance(tokenizer, HFTokenizer):
        return f"a {type(tokenizer).__name__}"
    if isinstance(tokenizer, MultimodalTokenizer) and tokenizer.image_tag_type:
        return f"tags around images (--image-tag-type {tokenizer.image_tag_type})"
    parts = json.loads(tokenizer.text)
    model = parts["model"]
    if model["type"] != "BPE":
        return f"a {model['type']} model"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[name]:
            return f"{name} {model[name]!r} of its model"
    gap = _marked_gap(parts) if model["byte_fallback"] else _byte_level_gap(parts)
    return gap or _post_processor_gap(parts["post_processor"]) or _added_gap(parts)


def words_gap(tokenizer: Tokenizer) -> str | None:
    """Return the first part of a tokenizer that ``WordEngine`` does not support, or None."""
    if not isinstance(tokenizer, HFTokenizer):
        return f"a {type(tokenizer).__name__}"
    if isinstance(tokenizer, MultimodalTokenizer) and tokenizer.image_tag_type:
        return f"tags around images (--image-tag-type {tokenizer.image_tag_type})"
    parts = json.loads(tokenizer.text)
    if parts["model"]["type"] != "WordPiece":
        return f"a {parts['model']['type']} model"
    if _type(parts["normalizer"]) != "BertNormalizer":
        return f"normalizer {_type(parts['normalizer'])}"
    if parts["pre_tokenizer"] != {"type": "BertPreTokenizer"}:
        return f"pre_tokenizer {_type(parts['pre_tokenizer'])}"
    if not parts["model"]["continuing_subword_prefix"]:
        return "a model without continuing_subword_prefix"
    for token in parts["added_tokens"]:
        name = token["content"]
        if token["normalized"]:
            return f"added token {name!r} with normalized"
        if name[:1] not in string.punctuation or len(name.split()) != 1:
            return f"added token {name!r}, which does not begin with punctuation or has blanks"
    return _post_processor_gap(parts["post_processor"]) or _added_gap(parts)


def _type(part: Any) -> str:
    """Return the type of a step of a tokenizer.json, with its inner steps, for messages."""
    if not part:
        return "null"
    steps = part.get("normalizers") or part.get("pretokenizers") or part.get("processors")
    inner = f" of {', '.join(map(_type, steps))}" if steps else ""
    pattern = part["pattern"] if part.get("type") == "Split" else {}
    return part["type"] + inner + "".join(f" by {value!r}" for value in pattern.values())


def _byte_level_gap(parts: dict[str, Any]) -> str | None:
    """Return the first unsupported part of a byte-level BPE tokenizer, or None."""
    missing = [letter for letter in byte_letters() if letter not in parts["model"]["vocab"]]
    if missing:
        return f"a vocabulary that lacks {len(missing)} of the 256 bytes"
    if parts["normalizer"] not in (None, {"type": "NFC"}):
        return f"normalizer {_type(parts['normalizer'])}"
    step = parts["pre_tokenizer"] or {}
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    *splits, last = steps or [{}]
    patterns = tuple(split.get("pattern", {}).get("Regex") for split in splits)
    isolates = all(
        split == _split(pattern) for split, pattern in zip(splits, patterns, strict=True)
    )
    is_known = not splits or (isolates and patterns in SPLITS.values())
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": not splits}
    if not is_known or {**last, "trim_offsets": True} != {**plain, "trim_offsets": True}:
        return f"pre_tokenizer {_type(parts['pre_tokenizer'])} with these options"
    return None


def _split(pattern: str | None) -> dict[str, Any]:
    options = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {**options, "pattern": {"Regex": pattern}}


def _marked_gap(parts: dict[str, Any]) -> str | None:
    """Return the first unsupported part of a character BPE with byte fallback, or None."""
    vocab = parts["model"]["vocab"]
    missing = [piece for piece in _BYTE_PIECES if piece not in vocab]
    if missing:
        return f"byte_fallback and a vocabulary that lacks {len(missing)} of the 256 bytes"
    if parts["model"]["ignore_merges"]:
        return "byte_fallback with ignore_merges"
    if [parts["normalizer"], parts["pre_tokenizer"]] not in _MARKING:
        return (
            f"byte_fallback with normalizer {_type(parts['normalizer'])} and pre_tokenizer "
            f"{_type(parts['pre_tokenizer'])}"
        )
    return None


def _post_processor_gap(part: dict[str, Any] | None) -> str | None:
    """Return a post-processor that does more than surround a text, described, or None."""
    if part is None or part["type"] == "ByteLevel":
        return None
    if part["type"] == "Sequence":
        gaps = map(_post_processor_gap, part["processors"])
        return next((gap for gap in gaps if gap), None)
    if part["type"] in ("BertProcessing", "RobertaProcessing"):
        return None
    if part["type"] == "TemplateProcessing":
        texts = [item["Sequence"]["id"] for item in part["single"] if "Sequence" in item]
        return None if texts == ["A"] else "a template that does not contain the text once"
    return f"post_processor {_type(part)}"


def _added_gap(parts: dict[str, Any]) -> str | None:
    """Return the first unsupported flag, or overlap, of the added tokens, or None."""
    for token in parts["added_tokens"]:
        for flag in ("single_word", "lstrip", "rstrip"):
            if token[flag]:
                return f"added token {token['content']!r} with {flag}"
        if token["normalized"] and parts["normalizer"] and token["content"].strip(" "):
            return f"added token {token['content']!r} with normalized, and a normalizer"
    # The library searches the original text first, then the normalized text.
    bare, normalized = (
        {letter for token in parts["added_tokens"] for letter in token["content"]
         if token["normalized"] == wanted}
        for wanted in (False, True)
    )  # fmt: skip
    if bare & normalized:
        return "added tokens with and without normalized that may overlap"
    return None


def _model_gap(path: Path) -> str | None:
    """Return the first unsupported part of a SentencePiece model, or None."""
    pieces, trainer, normalizer = _read_model(path)
    if trainer.get(3, 1) != 2 or not trainer.get(35, 0):
        return "a SentencePiece model that is not BPE with byte_fallback"
    if trainer.get(24, 0):
        return "treat_whitespace_as_suffix"
    unknown = sorted({*trainer} - _INERT_TRAINER - {3, 24, 35})
    unknown += sorted({*normalizer} - {1, 2, 3, 4, 5, 6})
    if unknown:
        return f"field {unknown[0]} of the model, whose effect is not known"
    if normalizer.get(2):
        name = bytes(normalizer.get(1, b"")).decode(errors="replace")
        return f"normalization_rule_name {name} (only identity is supported)"
    if normalizer.get(4, 1):
        return "remove_extra_whitespaces"
    if not normalizer.get(5, 1):
        return "escape_whitespaces=false"
    for piece, _, kind in pieces:
        if kind not in (_NORMAL, _UNKNOWN, _CONTROL, _BYTE):
            return f"{_TYPES.get(kind, f'type {kind} of')} piece {piece!r}"
    return _pieces_gap(pieces)


def _pieces_gap(pieces: Sequence[tuple[str, float, int]]) -> str | None:
    """Return the first unsupported property of the pieces (duplicates, ties, ...), or None."""
    normal = {piece: score for piece, score, kind in pieces if kind == _NORMAL}
    others = {piece: kind for piece, _, kind in pieces if kind != _NORMAL}
    if len(normal) + len(others) < len(pieces):
        return "two pieces with equal text"
    if sorted(piece for piece, kind in others.items() if kind == _BYTE) != _BYTE_PIECES:
        return "a model that lacks some of the 256 bytes"
    for piece in normal:
        lacking = [letter for letter in piece if letter not in normal]
        if lacking:
            return f"piece {piece!r} without a piece for {lacking[0]!r}"
    for piece, kind in others.items():
        if kind != _CONTROL and _is_merged(piece, normal):
            return f"piece {piece!r}, which is not a normal piece and is joined of two pieces"
    scores = Counter(score for piece, score in normal.items() if _is_merged(piece, normal))
    score, count = max(scores.items(), key=lambda item: item[1], default=(0, 0))
    if count > 1:
        return f"{count} pieces with the score {score:g}"
    return None


def _is_merged(piece: str, parts: dict[str, float]) -> bool:
    """Whether a piece is the concatenation of two other pieces."""
    cuts = range(1, len(piece))
    return any(piece[:cut] in parts and piece[cut:] in parts for cut in cuts)


def _read_model(
    path: Path,
) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """Read the pieces (name, score, type), trainer and normalizer fields of a model file."""
    pieces: list[tuple[str, float, int]] = []
    messages: dict[int, dict[int, Any]] = {}
    for field, value in _fields(path.read_bytes()):
        if field == 1:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append((piece[1].decode(), score, piece.get(3, _NORMAL)))
        else:
            messages.setdefault(field, {}).update(_fields(value))
    return pieces, messages.get(2, {}), messages.get(3, {})


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protobuf message."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        wire_type = key & 7
        if wire_type == 0:
            value, offset = _varint(data, offset)
            yield key >> 3, value
            continue
        size, offset = (
            _varint(data, offset) if wire_type == 2 else ({1: 8, 5: 4}[wire_type], offset)
        )
        yield key >> 3, data[offset : offset + size]
        offset += size


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """Decode a varint (seven bits per byte, low bits first); return it and the next offset."""
    value = shift = 0
    while data[offset] & 0x80:
        value |= (data[offset] & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
    return value | data[offset] << shift, offset + 1
