"""A corpus to token datasets, whole or in parts; ``tokenizing.py`` does the work."""

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
    ``<output_prefix>.journal.json`` is there. What came by standard input begins anew.

    Args:
        config: inputs, outputs and what to do.
        tokenizer_config: the tokenizer.
        on_progress: called after each block; the run stops if it raises.
        block_bytes: input that one worker takes at a time. Decides which texts are verified,
            never the output.

    Raises:
        FileNotFoundError: if an input or a tokenizer file is missing.
        ValueError: if ``append_eod`` is set and the tokenizer has no such token, or an
            engine cannot do the tokenizer; if the outputs cannot be written, are being
            written, or were made by other work and are not to be overwritten.
        ImportError: if an input or engine needs an extra that is not installed.
        BadRecordError: at the first bad record, unless these are to be skipped; what was
            written stays, and the run continues when the cause is mended by skipping.
        EngineDifferenceError: if an engine is found to differ from the tokenizer.
        RuntimeError: if an input is damaged, a worker died, or the disk is full.
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
