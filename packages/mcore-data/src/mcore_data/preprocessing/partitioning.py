"""Tokenizes a corpus in parts, each to its own pair, on one host or on several hosts.

Part k of n is the k-th range of about one n-th of the inputs' bytes. The pairs of all parts,
joined by number, have the same bytes as the pair of a run without parts.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mcore_data.config import PreprocessConfig
from mcore_data.indexed.manifest import has_files, read_manifest
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.output_lock import refuse_finished
from mcore_data.preprocessing.sources import Corpus, divide
from mcore_data.preprocessing.tokenizing import (
    PreprocessReport,
    Progress,
    Tools,
    output_prefixes,
    preprocess_corpus,
    work_hash,
)

log = logging.getLogger(__name__)


def preprocess_parts(
    config: PreprocessConfig,
    corpus: Corpus,
    tools: Tools,
    on_progress: Callable[[Progress], None] | None,
    block_bytes: int,
) -> PreprocessReport:
    """Tokenize all parts and join them, or tokenize only the part ``config.partition``.

    A part that an earlier run finished, by its manifests, is not tokenized again.

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
