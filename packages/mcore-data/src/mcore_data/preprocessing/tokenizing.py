"""Tokenizes sources to pairs in one pass, in order, in bounded memory, restartable.

This process cuts the inputs into blocks, workers parse and tokenize them, and this process
appends the results in order. About once a second a journal records the positions in inputs and
outputs, from which a killed run continues; the result is the same byte for byte. Files get
their final names when all tokens are written; the manifest is written last.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_base.stores import as_path
from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.engines.building import build_engine
from mcore_data.engines.spot_check import SAMPLE_SHARE, EngineDifferenceError, Verifier
from mcore_data.indexed.index_format import idx_path, token_dtype
from mcore_data.indexed.manifest import manifest_path, write_manifest
from mcore_data.indexed.object_store import address_of, is_remote, upload_files
from mcore_data.indexed.output_lock import naming_full_disks, only_writer, refuse_finished
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.preprocessing.blocks import Block, InputSource, describe
from mcore_data.preprocessing.encoding import EncodedBlock, Encoder
from mcore_data.preprocessing.journal import Journal, open_journal, write_journal
from mcore_data.preprocessing.records import BadRecordError
from mcore_data.preprocessing.sentences import Splitter, build_splitter
from mcore_data.preprocessing.sources import (
    Corpus,
    count_records,
    digest,
    fingerprint,
    read_blocks,
    refuse_changed,
)
from mcore_data.preprocessing.workers import encode_all, max_workers
from mcore_data.tokenizers.building import build_tokenizer, eod_advice
from mcore_data.tokenizers.protocol import Tokenizer

log = logging.getLogger(__name__)

_MAX_LISTED_BAD_RECORDS = 20
_JOURNAL_EVERY_S = 1.0
_SAVE_SHARE = 20  # saves take at most 1/20 of the time
_SOURCE_FACTS = ("path", "kind", "size", "stamp", "start", "stop")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        done_bytes: stored bytes of the inputs that were read.
        total_bytes: stored bytes of all inputs; 0 if an input is a stream.
        num_documents: documents written.
        num_tokens: tokens written, of all keys.
        elapsed_s: seconds since this process began the run.
        began_bytes: bytes of ``done_bytes`` that an earlier process read.
        began_tokens: tokens of ``num_tokens`` that an earlier process wrote.
    """

    done_bytes: int
    total_bytes: int
    num_documents: int
    num_tokens: int
    elapsed_s: float
    began_bytes: int = 0
    began_tokens: int = 0


@dataclass(slots=True)
class PreprocessReport:
    """Counts of a finished run.

    Attributes:
        prefixes: prefix of the dataset of each key.
        num_documents: documents in each dataset, empty ones included.
        num_tokens: tokens in each dataset, by key.
        num_bad_records: records left out.
        bad_records: file, line and fault of the first bad records.
        num_texts: texts encoded, of all keys.
        num_checked_texts: texts that the tokenizer itself encoded, alone or for comparison.
        engine: name of the engine that encoded.
    """

    prefixes: dict[str, Path]
    num_documents: int = 0
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_bad_records: int = 0
    bad_records: list[str] = field(default_factory=list)
    num_texts: int = 0
    num_checked_texts: int = 0
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """Tokenizer, encoder and splitter, shared by all parts of a run.

    Attributes:
        tokenizer: the reference tokenizer.
        encoder: encodes blocks in the workers.
        splitter: splits texts into sentences; None keeps each text as one sequence.
        distrusted: name of an engine that gave wrong ids; its finished parts are encoded again.
    """

    tokenizer: Tokenizer
    encoder: Encoder
    splitter: Splitter | None
    distrusted: str = ""


def build_tools(
    config: PreprocessConfig, tokenizer_config: TokenizerConfig, *, distrusted: str = ""
) -> Tools:
    """Build tokenizer, engine and splitter; raises as ``preprocess`` does."""
    tokenizer = build_tokenizer(tokenizer_config)
    if config.append_eod and tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: {tokenizer_config.tokenizer_type} has no end-of-document token. "
            f"{eod_advice(tokenizer_config)}"
        )
    engine = build_engine(tokenizer, config.engine)
    verifier = Verifier(engine, tokenizer, config.verify)
    splitter = None
    if config.split_sentences:
        splitter = build_splitter(
            config.sentence_splitter, lang=config.lang, keep_newlines=config.keep_newlines
        )
    encoder = Encoder(
        engine=engine,
        verifier=None if engine.name == "reference" else verifier,
        json_keys=config.json_keys,
        keep_keys=config.keep_keys,
        dtype=token_dtype(tokenizer.vocab_size),
        eod=tokenizer.eod if config.append_eod else None,
        split=splitter.split if splitter else None,
    )
    return Tools(tokenizer, encoder, splitter, distrusted)


def preprocess_corpus(
    config: PreprocessConfig,
    corpus: Corpus,
    tools: Tools,
    on_progress: Callable[[Progress], None] | None,
    block_bytes: int,
) -> PreprocessReport:
    """Tokenize a corpus into a pair for each key; raises as ``preprocess`` does.

    Pairs in an object store are written in ``config.scratch_path``, and copied when complete.
    """
    if is_remote(config.output_prefix):
        return _preprocess_to_store(config, corpus, tools, on_progress, block_bytes)
    with only_writer(config.output_prefix), naming_full_disks(config.output_prefix):
        return _preprocess_alone(config, corpus, tools, on_progress, block_bytes)


FILES = (".bin", ".idx", ".origins", ".kept", ".manifest.json")
"""Suffixes of a pair's files in the order of upload; a manifest marks a complete pair."""


def scratch_folder(output_prefix: str | Path, scratch_path: str | Path) -> Path:
    """Return the local folder for outputs of an object store, a function of the output prefix.

    Raises:
        ValueError: if no folder is given.
    """
    if not scratch_path:
        raise ValueError(
            f"{output_prefix} is in an object store: give --scratch-path, a local folder with "
            "space for the outputs of one worker."
        )
    return Path(scratch_path) / digest(address_of(as_path(output_prefix).parent))[:16]


def _preprocess_to_store(
    config: PreprocessConfig,
    corpus: Corpus,
    tools: Tools,
    on_progress: Callable[[Progress], None] | None,
    block_bytes: int,
) -> PreprocessReport:
    prefixes = output_prefixes(config)
    folder = scratch_folder(config.output_prefix, config.scratch_path)
    folder.mkdir(parents=True, exist_ok=True)
    local = replace(config, output_prefix=str(folder / as_path(config.output_prefix).name))
    with only_writer(config.output_prefix):
        if not config.overwrite:
            refuse_finished(prefixes.values(), work_hash(config, corpus, tools))
        with only_writer(local.output_prefix), naming_full_disks(local.output_prefix):
            local = replace(local, overwrite=True)
            report = _preprocess_alone(local, corpus, tools, on_progress, block_bytes)
            for key, prefix in prefixes.items():
                manifest_path(prefix).unlink(missing_ok=True)
                upload_files(report.prefixes[key], prefix, FILES)
                for suffix in FILES:
                    Path(f"{report.prefixes[key]}{suffix}").unlink(missing_ok=True)
    return replace(report, prefixes=prefixes)


def _preprocess_alone(
    config: PreprocessConfig,
    corpus: Corpus,
    tools: Tools,
    on_progress: Callable[[Progress], None] | None,
    block_bytes: int,
) -> PreprocessReport:
    """Do the work of ``preprocess_corpus``; the caller holds the lock of the outputs."""
    prefixes = output_prefixes(config)
    journal_path = Path(f"{config.output_prefix}.journal.json")
    work = work_hash(config, corpus, tools)
    journal = open_journal(journal_path, work)
    if not journal.outputs and not config.overwrite:
        refuse_finished(prefixes.values(), work)
    writers = {
        key: IndexedWriter(
            prefix, tools.encoder.dtype, resume_at=journal.outputs.get(key), checksum=True
        )
        for key, prefix in prefixes.items()
        if not _is_finished(prefix, journal.outputs.get(key))
    }
    run = _Run(
        config=config,
        sources=corpus.sources,
        writers=writers,
        journal=journal,
        journal_path=journal_path,
        on_progress=on_progress,
        block_bytes=block_bytes,
    )
    verifier = tools.encoder.verifier
    encoder = replace(tools.encoder, verifier=verifier.begin() if verifier else None)
    try:
        run.write_blocks(encoder)
    except BaseException as error:
        for writer in writers.values():
            writer.suspend()
        if isinstance(error, EngineDifferenceError):
            journal_path.unlink(missing_ok=True)  # a repeated run starts from the beginning
        raise
    for key, prefix in prefixes.items():
        manifest_path(prefix).unlink(missing_ok=True)  # of an earlier pair
        checksum = writers[key].finalize() if key in writers else ""
        facts = _facts(key, config, corpus, tools, journal)
        write_manifest(prefix, {**facts, "bin_sha256": checksum})
    journal_path.unlink(missing_ok=True)
    return PreprocessReport(
        prefixes,
        journal.num_documents,
        journal.num_tokens,
        journal.num_bad_records,
        journal.bad_records,
        journal.num_texts,
        journal.checked_texts,
        tools.encoder.engine.name,
    )


def output_prefixes(config: PreprocessConfig) -> dict[str, Path]:
    """Return the prefix of each key's pair, with Megatron's suffixes."""
    level = "sentence" if config.split_sentences else "document"
    return {key: as_path(f"{config.output_prefix}_{key}_{level}") for key in config.json_keys}


@dataclass(kw_only=True, slots=True)
class _Run:
    """Writes encoded blocks to the pairs and progress to the journal."""

    config: PreprocessConfig
    sources: Sequence[InputSource]
    writers: dict[str, IndexedWriter]
    journal: Journal
    journal_path: Path
    on_progress: Callable[[Progress], None] | None
    block_bytes: int
    began: float = field(default_factory=time.monotonic)

    def write_blocks(self, encoder: Encoder) -> None:
        """Encode the blocks that the journal does not cover, and append them."""
        sizes = [source.num_bytes for source in self.sources]
        before = [0, *itertools.accumulate(sizes)]
        total = 0 if any(source.is_stream for source in self.sources) else before[-1]
        start = Progress(self.journal.done_bytes, total, 0, 0, 0)
        start = replace(start, num_tokens=sum(self.journal.num_tokens.values()))
        results = encode_all(
            encoder,
            self._blocks(),
            num_workers=limit_workers(self.config.workers),
            block_bytes=self.block_bytes,
        )
        unsaved: dict[str, Any] = {}
        due = 0.0
        try:
            with closing(results):
                for (source, block), result in results:
                    self._append(source, block, result)
                    self.journal.done_bytes = before[source] + block.done_bytes
                    unsaved = asdict(self.journal)
                    began = time.monotonic()
                    if began >= due:
                        self._save(unsaved)
                        unsaved, now = {}, time.monotonic()
                        due = now + max(_JOURNAL_EVERY_S, _SAVE_SHARE * (now - began))
                    self._report(start)
            refuse_changed(self.sources[: self.journal.source + 1])
        finally:
            if unsaved:  # the state after the last complete block, also if the next one failed
                self._save(unsaved)

    def _save(self, journal: dict[str, Any]) -> None:
        """Flush the partial outputs to the disk, then the journal that describes them."""
        for writer in self.writers.values():
            writer.sync()
        write_journal(self.journal_path, journal)

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        keys = tuple(dict.fromkeys((*self.config.json_keys, *self.config.keep_keys)))
        start = self.journal.start
        for number in range(self.journal.source, len(self.sources)):
            for block in read_blocks(self.sources[number], keys, start, self.block_bytes):
                yield number, block
            start = 0

    def _append(self, source: int, block: Block, result: EncodedBlock) -> None:
        journal = self.journal
        if source != journal.source:
            journal.source, journal.start, journal.records = source, 0, 0
        self._note_bad_records(block, result)
        origins = result.origins(source, journal.records)
        for key, part in result.keys.items():
            self.writers[key].add_origins(origins)
            self.writers[key].add_kept(result.kept)
            self.writers[key].add_documents(part.tokens, part.lengths, part.sequences)
            count = int(part.lengths.sum(dtype="int64"))
            journal.num_tokens[key] = journal.num_tokens.get(key, 0) + count
        journal.num_documents += result.num_documents
        journal.num_texts += result.num_texts
        journal.num_characters += result.num_characters
        journal.checked_texts += result.checked.texts
        journal.checked_characters += result.checked.characters
        journal.start = block.end
        journal.records += result.num_records
        journal.outputs = {key: writer.position() for key, writer in self.writers.items()}

    def _report(self, start: Progress) -> None:
        if self.on_progress is None:
            return
        self.on_progress(
            Progress(
                self.journal.done_bytes,
                start.total_bytes,
                self.journal.num_documents,
                sum(self.journal.num_tokens.values()),
                time.monotonic() - self.began,
                began_bytes=start.done_bytes,
                began_tokens=start.num_tokens,
            )
        )

    def _note_bad_records(self, block: Block, result: EncodedBlock) -> None:
        if not result.bad:
            return
        source = self.sources[self.journal.source]
        refuse_changed([source])
        before = self.journal.records
        if source.start:
            before += count_records(source.path, source.kind, source.start)
        for bad in result.bad:
            message = f"{describe(block.path, block.kind, before + bad.number)}: {bad.reason}."
            if self.config.on_bad_record == "refuse":
                raise BadRecordError(
                    f"{message} Correct the record, or leave bad records out with "
                    "--on-bad-record skip."
                )
            if len(self.journal.bad_records) < _MAX_LISTED_BAD_RECORDS:
                self.journal.bad_records.append(message)
                log.warning("skipped: %s", message)
        self.journal.num_bad_records += len(result.bad)


def _is_finished(prefix: Path, position: dict[str, int] | None) -> bool:
    """Whether a killed run had already renamed this output to its final names."""
    return (
        position is not None
        and idx_path(prefix).is_file()
        and not Path(f"{prefix}.lengths.partial").exists()
    )


def limit_workers(num_workers: int) -> int:
    """Return ``num_workers``, limited to ``max_workers`` of this machine's cores."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    limit = max_workers(num_cores)
    if num_workers > limit:
        log.warning(
            "--workers %d exceeds the limit of %d for %d cores: starting %d",
            *(num_workers, limit, num_cores, limit),
        )
    return min(num_workers, limit)


def work_hash(config: PreprocessConfig, corpus: Corpus, tools: Tools) -> str:
    """Return a hash of everything that determines the output's bytes.

    The engine is not included, since all engines give the same ids. ``on_bad_record`` is not
    included either, since a stopped run may continue with another value.
    """
    splitter = tools.splitter.name if tools.splitter else ""
    return digest(
        [
            fingerprint(corpus),
            list(config.json_keys),
            [config.append_eod, splitter, config.keep_newlines],
            tools.tokenizer.fingerprint(),
            *([list(config.keep_keys)] if config.keep_keys else ()),
        ]
    )


def _facts(
    key: str,
    config: PreprocessConfig,
    corpus: Corpus,
    tools: Tools,
    journal: Journal,
) -> dict[str, object]:
    """Return the facts for the manifest of one key's pair."""
    exact = tools.encoder.engine.name == "reference"
    facts: dict[str, object] = {
        "work": work_hash(config, corpus, tools),
        "key": key,
        "keep_keys": list(config.keep_keys),
        "documents": journal.num_documents,
        "tokens": journal.num_tokens.get(key, 0),
        "dtype": tools.encoder.dtype.name,
        "append_eod": config.append_eod,
        "eod": tools.encoder.eod,
        "sentence_splitter": tools.splitter.name if tools.splitter else "none",
        "keep_newlines": config.keep_newlines,
        "tokenizer": {
            "sha256": tools.tokenizer.fingerprint(),
            "vocab_size": tools.tokenizer.vocab_size,
            "engine": tools.encoder.engine.name,
        },
        "verification": {
            "mode": "reference" if exact else config.verify,
            "share": {"full": 1.0, "sample": SAMPLE_SHARE, "off": 0.0}[config.verify],
            "texts": journal.num_texts,
            "characters": journal.num_characters,
            "checked_texts": journal.checked_texts,
            "checked_characters": journal.checked_characters,
            "differences": 0,
        },
        "bad_records": {"skipped": journal.num_bad_records, "first": journal.bad_records},
        "inputs": [
            {name: getattr(source, name) for name in _SOURCE_FACTS} for source in corpus.sources
        ],
        "left_out": corpus.left_out,
    }
    if (part := corpus.part) is not None:
        facts["parts"] = {
            "numbers": [part.number],
            "of": part.num_parts,
            "corpus": part.corpus,
        }
    return facts
