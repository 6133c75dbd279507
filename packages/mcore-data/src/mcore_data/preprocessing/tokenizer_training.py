"""Trains a byte-level BPE tokenizer on a corpus, so that no tokenizer is downloaded."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from mcore_data.indexed.output_lock import make_folder
from mcore_data.preprocessing.sources import find_inputs, read_texts, report_left_out
from mcore_data.tokenizers.hf import END_OF_TEXT, HFTokenizer, set_byte_level

_SMALLEST = 257


def train_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    json_keys: Sequence[str] = ("text",),
    show_progress: bool = False,
) -> HFTokenizer:
    """Train byte-level BPE with ``<|endoftext|>`` as end of document, and save it.

    All 256 bytes are in the vocabulary, so every text can be encoded without loss.

    Args:
        inputs: files, folders and patterns, as ``PreprocessConfig.input``.
        output: folder for ``tokenizer.json`` and ``tokenizer_config.json``, which
            ``load_tokenizer`` and ``transformers.AutoTokenizer`` open.
        vocab_size: upper limit of the number of ids, including the end of document and the
            bytes. A small corpus may give fewer merges.
        json_keys: keys of a record to train on.
        show_progress: show the progress bars of the tokenizers library.

    Raises:
        ValueError: if ``vocab_size`` is below 257, there is no text, a record is bad (file
            and line named), or the output cannot be written.
    """
    if vocab_size < _SMALLEST:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: 256 bytes and {END_OF_TEXT} take "
            f"{_SMALLEST}."
        )
    make_folder(Path(output), f"--output {output}")
    core = tokenizers.Tokenizer(models.BPE())
    set_byte_level(core)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    texts = _texts(inputs, json_keys)
    first = next(filter(None, texts), None)
    if first is None:
        raise ValueError(
            f"--input {' '.join(map(str, inputs))} holds no text to train on: give files with "
            "text."
        )
    core.train_from_iterator(chain([first], texts), trainer)
    roles = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    tokenizer = HFTokenizer(core, {**roles, "clean_up_tokenization_spaces": False})
    tokenizer.save(output)
    return tokenizer


def _texts(inputs: Sequence[str | Path], json_keys: Sequence[str]) -> Iterator[str]:
    words = list(map(str, inputs))
    report_left_out(words)
    for source in find_inputs(words):
        yield from read_texts(source, json_keys)
