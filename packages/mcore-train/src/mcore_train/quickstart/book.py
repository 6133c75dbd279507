"""Prepares the shipped book as training data: held-out chapters, tokenizer, token files.

The book is the King James Bible of 1611 (public domain), one chapter a line. Held-out chapters
are not used before they are scored: the tokenizer, too, is trained only on the others.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.datasets.splitting import held_out
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.preprocessing.tokenizer_training import train_tokenizer

NUM_HELD_OUT = 60
"""Number of chapters that are scored and never trained on."""


@dataclass(frozen=True, slots=True)
class Book:
    """Texts of the chapters."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """Paths of the prepared data."""

    tokenizer: Path
    train: Path
    """Prefix of a ``.bin``/``.idx`` pair."""
    held_out: Path
    """Prefix of the pair of held-out chapters."""


def read_book(seed: int) -> Book:
    """Return the chapters of the shipped book, some of them held out by seed."""
    packed = files("mcore_train") / "books" / "kjv.jsonl.gz"
    lines = gzip.decompress(packed.read_bytes()).decode().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    kept, held = held_out(len(texts), NUM_HELD_OUT, seed)
    return Book(tuple(texts[i] for i in kept), tuple(texts[i] for i in held))


def token_files(folder: Path) -> TokenFiles:
    """Return the paths of prepared files below a folder; reads no disk."""
    return TokenFiles(
        folder / "tokenizer", folder / "train_text_document", folder / "held_out_text_document"
    )


def prepare(book: Book, folder: Path, vocab_size: int) -> tuple[int, int]:
    """Train a tokenizer on the training chapters and write both parts as tokens.

    Returns:
        Tokens of the training and of the held-out chapters, ends of documents included.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train = _write_lines(folder / "train.jsonl", book.train)
    held = _write_lines(folder / "held_out.jsonl", book.held_out)
    paths = token_files(folder)
    train_tokenizer([train], paths.tokenizer, vocab_size=vocab_size)
    options = TokenizerConfig(tokenizer_model=str(paths.tokenizer))
    counts = []
    for source in (train, held):
        report = preprocess(
            PreprocessConfig(
                input=(str(source),), output_prefix=str(source.with_suffix("")), append_eod=True
            ),
            options,
        )
        counts.append(report.num_tokens["text"])
    return counts[0], counts[1]


def _write_lines(path: Path, texts: Sequence[str]) -> Path:
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")
    return path
