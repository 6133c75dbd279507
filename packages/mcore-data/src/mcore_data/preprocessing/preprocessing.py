"""Tokenizes a corpus into indexed datasets, in one piece or in parts.

``tokenizing.py`` tokenizes one piece.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.engines.spot_check import EngineDifferenceError
from mcore_data.indexed.manifest import has_files, read_manifest
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.output_lock import make_parent_folder, refuse_finished
from mcore_data.preprocessing.blocks import BLOCK_BYTES
from mcore_data.preprocessing.sources import Corpus, divide, find_inputs, report_left_out
from mcore_data.preprocessing.tokenizing import (
    PreprocessReport,
    Progress,
    Tools,
    build_tools,
    output_prefixes,
    preprocess_corpus,
    work_hash,
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


log = logging.getLogger(__name__)


def preprocess_parts(
    config: PreprocessConfig,
    corpus: Corpus,
    tools: Tools,
    on_progress: Callable[[Progress], None] | None,
    block_bytes: int,
) -> PreprocessReport:
    """Tokenize all parts and join them, or tokenize only the part ``config.partition``.

    Part k of n is the k-th range of about one n-th of the inputs' bytes. The pairs of all
    parts, joined by number, have the same bytes as the pair of a run without parts. A part that
    an earlier run finished, by its manifests, is not tokenized again.

    Returns:
        The report of the joined pairs, or of the one part.
    """
    parts = [
        (_part_config(config, number), part)
        for number, part in enumerate(divide(corpus, config.partitions))
        if config.partition in (-1, number)
    ]
    if config.partition < 0 and not config.overwrite:
        for part_config, part_corpus in parts:
            if _finished(part_config, part_corpus, tools) is None:
                # Joined pairs of other parts must not be replaced.
                refuse_finished(output_prefixes(config).values(), "")
    reports = []
    for number, (part_config, part_corpus) in enumerate(parts, max(config.partition, 0)):
        report = _finished(part_config, part_corpus, tools)
        if report is None:
            log.info("part %d of %d", number, config.partitions)
            report = preprocess_corpus(
                part_config, part_corpus, tools, on_progress, block_bytes
            )
        reports.append(report)
    if config.partition >= 0:
        return reports[0]
    joined = PreprocessReport(output_prefixes(config))
    for key, prefix in joined.prefixes.items():
        merge_pairs([report.prefixes[key] for report in reports], prefix, overwrite=True)
        joined.num_tokens[key] = sum(report.num_tokens.get(key, 0) for report in reports)
    for report in reports:
        joined.num_documents += report.num_documents
        joined.num_bad_records += report.num_bad_records
        joined.bad_records += report.bad_records
        joined.num_texts += report.num_texts
        joined.num_checked_texts += report.num_checked_texts
    joined.engine = " and ".join(sorted({report.engine for report in reports}))
    return joined


def _part_config(config: PreprocessConfig, number: int) -> PreprocessConfig:
    """Options of one part."""
    prefix = f"{config.output_prefix}_{number}"
    return replace(config, output_prefix=prefix, partitions=1, partition=-1)


def _finished(
    config: PreprocessConfig, corpus: Corpus, tools: Tools
) -> PreprocessReport | None:
    """Return the report of a part that an earlier run of the same work finished, else None."""
    report = PreprocessReport(output_prefixes(config))
    for key, prefix in report.prefixes.items():
        facts: dict[str, Any] = read_manifest(prefix)
        if facts.get("work") != work_hash(config, corpus, tools) or not has_files(
            prefix, facts
        ):
            return None
        if facts["tokenizer"]["engine"] == tools.distrusted:
            return None
        report.num_documents = facts["documents"]
        report.num_tokens[key] = facts["tokens"]
        report.num_bad_records = facts["bad_records"]["skipped"]
        report.bad_records = facts["bad_records"]["first"]
        report.num_texts = facts["verification"]["texts"]
        report.num_checked_texts = facts["verification"]["checked_texts"]
        report.engine = facts["tokenizer"]["engine"]
    return report
