"""Tokenizes a corpus into indexed datasets, in one piece or in parts.

``tokenizing.py`` has the code of one piece, ``partitioning.py`` that of several.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.engines.spot_check import EngineDifferenceError
from mcore_data.indexed.output_lock import make_parent_folder
from mcore_data.preprocessing.blocks import BLOCK_BYTES
from mcore_data.preprocessing.partitioning import preprocess_parts
from mcore_data.preprocessing.sources import Corpus, find_inputs, report_left_out
from mcore_data.preprocessing.tokenizing import (
    PreprocessReport,
    Progress,
    build_tools,
    preprocess_corpus,
)

log = logging.getLogger(__name__)


def preprocess(
    config: PreprocessConfig,
    tokenizer_config: TokenizerConfig,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> PreprocessReport:
    """Tokenize a corpus into one indexed dataset for each key.

    Continues an interrupted run of the same inputs, tokenizer and options if its journal
    ``<output_prefix>.journal.json`` exists. A run from standard input starts from the
    beginning. If the engine that ``auto`` chose gives wrong ids, the run starts again with the
    tokenizer itself.

    Args:
        config: inputs, outputs and options.
        tokenizer_config: the tokenizer.
        on_progress: called after each block; an exception from it stops the run.
        block_bytes: bytes of input in one block. It affects which texts are verified, never
            the output.

    Raises:
        FileNotFoundError: if an input or a tokenizer file is missing.
        ValueError: if ``append_eod`` is set and the tokenizer has no end-of-document token,
            or the engine does not support the tokenizer; if the outputs cannot be written,
            another process is writing them, or they exist from other inputs or options and
            ``overwrite`` is off.
        ImportError: if an input or engine needs an extra that is not installed.
        BadRecordError: at the first bad record, unless ``on_bad_record`` is "skip"; the same
            command with "skip" continues the run.
        EngineDifferenceError: if the engine's ids of a text are not the tokenizer's, and the
            engine was chosen by name or an input is a stream.
        RuntimeError: if an input or the journal is damaged, a worker died, or the disk is
            full.
    """
    corpus = find_corpus(config)
    make_parent_folder(config.output_prefix)
    tools = build_tools(config, tokenizer_config)
    work = preprocess_parts if config.partitions > 1 else preprocess_corpus
    try:
        return work(config, corpus, tools, on_progress, block_bytes)
    except EngineDifferenceError as error:
        if config.engine != "auto" or any(source.is_stream for source in corpus.sources):
            raise EngineDifferenceError(
                f"{error} Repeat the command with --engine reference, which starts from the "
                "beginning."
            ) from None
        log.warning("%s Starting again with the tokenizer itself.", error)
    config = replace(config, engine="reference")
    exact = build_tools(config, tokenizer_config, distrusted=tools.encoder.engine.name)
    return work(config, corpus, exact, on_progress, block_bytes)


def find_corpus(config: PreprocessConfig) -> Corpus:
    """List the inputs of ``--input``, and log ignored files; raises as ``preprocess``."""
    sources = find_inputs(config.input, text_lines=config.text_lines)
    texts = [source.path for source in sources if source.kind in ("text", "text_lines")]
    if texts and len(config.json_keys) > 1:
        raise ValueError(
            f"--json-keys {' '.join(config.json_keys)}: {texts[0]} is plain text, whose "
            "documents have one text each. Give one key, or preprocess this file separately."
        )
    return Corpus(sources, report_left_out(config.input))
