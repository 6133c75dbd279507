"""Tokenizes a corpus into indexed datasets, whole or in parts; ``tokenizing.py`` does it."""

from collections.abc import Callable, Sequence

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed.output_lock import make_parent_folder
from mcore_data.preprocessing.blocks import BLOCK_BYTES, InputSource
from mcore_data.preprocessing.partitioning import preprocess_parts
from mcore_data.preprocessing.sources import Corpus, find_inputs, report_left_out
from mcore_data.preprocessing.tokenizing import (
    PreprocessReport,
    Progress,
    build_tools,
    preprocess_corpus,
)


def preprocess(
    config: PreprocessConfig,
    tokenizer_config: TokenizerConfig,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> PreprocessReport:
    """Tokenize a corpus into one indexed dataset for each key.

    Continues an interrupted run of the same inputs, tokenizer and options if its journal
    ``<output_prefix>.journal.json`` exists. A run from standard input begins anew.

    Args:
        config: inputs, outputs and options.
        tokenizer_config: the tokenizer.
        on_progress: called after each block; an exception from it stops the run.
        block_bytes: bytes of input in one block. Decides which texts are verified, never the
            output.

    Raises:
        FileNotFoundError: if an input or a tokenizer file is missing.
        ValueError: if ``append_eod`` is set and the tokenizer has no end-of-document token,
            or the engine does not support the tokenizer; if the outputs cannot be written, or
            another process is writing them, or other work made them and ``overwrite`` is off.
        ImportError: if an input or engine needs an extra that is not installed.
        BadRecordError: at the first bad record, unless ``on_bad_record`` is "skip"; the same
            command with "skip" continues the run.
        EngineDifferenceError: if the engine's ids of a text are not the tokenizer's.
        RuntimeError: if an input or the journal is damaged, a worker died, or the disk is
            full.
    """
    sources = find_inputs(config.input, text_lines=config.text_lines)
    _check_keys(config, sources)
    corpus = Corpus(sources, report_left_out(config.input))
    make_parent_folder(config.output_prefix)
    tools = build_tools(config, tokenizer_config)
    if config.partitions > 1:
        return preprocess_parts(config, corpus, tools, on_progress, block_bytes)
    return preprocess_corpus(config, corpus, tools, on_progress, block_bytes)


def _check_keys(config: PreprocessConfig, sources: Sequence[InputSource]) -> None:
    texts = [source.path for source in sources if source.kind in ("text", "text_lines")]
    if texts and len(config.json_keys) > 1:
        raise ValueError(
            f"--json-keys {' '.join(config.json_keys)}: {texts[0]} is plain text and has one "
            "text a document. Give one key, or preprocess it by itself."
        )
