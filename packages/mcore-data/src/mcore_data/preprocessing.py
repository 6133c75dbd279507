"""JSONL to token datasets: bounded memory, in order, and able to continue after a crash.

This process cuts the inputs into blocks, workers parse and tokenize them, and this process
appends the results in order. After every block a journal says how far inputs and outputs
are, so a run that was killed continues there; the result is the same byte for byte. Final
names appear only when all is written.
"""

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.encoding import EncodedBlock, encode_block
from mcore_data.index_format import idx_path, token_dtype
from mcore_data.indexed_writing import IndexedWriter
from mcore_data.records import (
    BLOCK_BYTES,
    BadRecordError,
    Block,
    describe_bad_line,
    find_inputs,
    is_compressed,
    read_blocks,
)
from mcore_data.sentences import split_sentences
from mcore_data.tokenizer import Tokenizer, build_tokenizer

log = logging.getLogger(__name__)

_NAMED_BAD_RECORDS = 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        done_bytes: bytes of the inputs that are behind us.
        total_bytes: bytes of all inputs; 0 if unknown because one is compressed.
        num_documents: documents written.
        num_tokens: tokens written, of all keys.
        elapsed_s: seconds since this process began.
    """

    done_bytes: int
    total_bytes: int
    num_documents: int
    num_tokens: int
    elapsed_s: float


@dataclass(slots=True)
class PreprocessReport:
    """What a finished run wrote.

    Attributes:
        prefixes: prefix of the dataset of each key.
        num_documents: documents in each dataset, empty ones included.
        num_tokens: tokens in each dataset, by key.
        num_bad_records: lines left out.
        bad_records: the first of them, with file and line.
    """

    prefixes: dict[str, Path]
    num_documents: int = 0
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_bad_records: int = 0
    bad_records: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Journal:
    """Where a run stands: the state that survives a kill."""

    fingerprint: str
    source: int = 0
    start: int = 0
    lines: int = 0
    done_bytes: int = 0
    num_documents: int = 0
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_bad_records: int = 0
    bad_records: list[str] = field(default_factory=list)
    outputs: dict[str, dict[str, int]] = field(default_factory=dict)


def preprocess(
    config: PreprocessConfig,
    tokenizer_config: TokenizerConfig,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> PreprocessReport:
    """Tokenize JSONL files into one indexed dataset for each key.

    Continues an interrupted run of the same inputs, tokenizer and options if its journal
    ``<output_prefix>.journal.json`` is there.

    Args:
        config: inputs, outputs and what to do.
        tokenizer_config: the tokenizer; each worker builds its own.
        on_progress: called after each block; the run stops if it raises.
        block_bytes: input that one worker takes at a time. Does not change the output.

    Raises:
        FileNotFoundError: if an input or a tokenizer file is missing.
        ValueError: if ``append_eod`` is asked of a tokenizer that has no such token.
        BadRecordError: at the first bad record, unless these are to be skipped; what was
            written stays, and the run continues when the cause is mended by skipping.
        RuntimeError: if an input is damaged or a worker died.
    """
    sources = find_inputs(config.input)
    tokenizer = build_tokenizer(tokenizer_config)
    if config.append_eod and tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: {tokenizer_config.tokenizer_type} knows no end-of-document token. "
            "Add it to the tokenizer's files as eos_token."
        )
    journal_path = Path(f"{config.output_prefix}.journal.json")
    journal = _open_journal(journal_path, _fingerprint(config, tokenizer, sources))
    level = "sentence" if config.split_sentences else "document"
    prefixes = {key: Path(f"{config.output_prefix}_{key}_{level}") for key in config.json_keys}
    writers = _open_writers(prefixes, tokenizer, journal)
    run = _Run(
        config=config,
        sources=sources,
        writers=writers,
        journal=journal,
        journal_path=journal_path,
        on_progress=on_progress,
        block_bytes=block_bytes,
    )
    try:
        run.write_blocks(tokenizer, tokenizer_config)
    except BaseException:
        for writer in writers.values():
            writer.suspend()
        raise
    for writer in writers.values():
        writer.finalize()
    journal_path.unlink(missing_ok=True)
    return PreprocessReport(
        prefixes,
        journal.num_documents,
        journal.num_tokens,
        journal.num_bad_records,
        journal.bad_records,
    )


@dataclass(kw_only=True, slots=True)
class _Run:
    """The loop over blocks, and the bookkeeping after each."""

    config: PreprocessConfig
    sources: list[Path]
    writers: dict[str, IndexedWriter]
    journal: _Journal
    journal_path: Path
    on_progress: Callable[[Progress], None] | None
    block_bytes: int
    began: float = field(default_factory=time.monotonic)

    @property
    def total_bytes(self) -> int:
        """Bytes of all inputs, 0 if a compressed one hides how many it has."""
        if any(is_compressed(path) for path in self.sources):
            return 0
        return sum(path.stat().st_size for path in self.sources)

    def write_blocks(self, tokenizer: Tokenizer, tokenizer_config: TokenizerConfig) -> None:
        """Encode what is left of the inputs and append it."""
        eod = tokenizer.eod if self.config.append_eod else None
        split = (
            partial(split_sentences, keep_newlines=self.config.keep_newlines)
            if self.config.split_sentences
            else None
        )
        blocks = self._blocks()
        if self.config.workers == 1:
            encoded = (
                (
                    source,
                    block,
                    encode_block(block, tokenizer, self.config.json_keys, eod=eod, split=split),
                )
                for source, block in blocks
            )
            for source, block, result in encoded:
                self._append(source, block, result)
            return
        encode = partial(
            _encode_in_worker,
            config=tokenizer_config,
            json_keys=self.config.json_keys,
            eod=eod,
            split=split,
        )
        ahead = 2 * self.config.workers
        with ProcessPoolExecutor(self.config.workers, get_context("spawn")) as pool:
            try:
                for source, block, result in _in_order(pool, encode, blocks, ahead):
                    self._append(source, block, result)
            except BrokenProcessPool as error:
                raise RuntimeError(
                    "a worker process died, most likely for want of memory. The same command "
                    "continues where it stopped; use fewer --workers."
                ) from error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        start = self.journal.start
        for source in range(self.journal.source, len(self.sources)):
            for block in read_blocks(self.sources[source], start, self.block_bytes):
                yield source, block
            start = 0

    def _append(self, source: int, block: Block, result: EncodedBlock) -> None:
        journal = self.journal
        if source != journal.source:
            journal.source, journal.start, journal.lines = source, 0, 0
        self._note_bad_records(block, result)
        for key, part in result.keys.items():
            self.writers[key].add_documents(part.tokens, part.lengths, part.sequences)
            journal.num_tokens[key] = journal.num_tokens.get(key, 0) + len(part.tokens)
        journal.num_documents += result.num_documents
        journal.start = block.start + block.num_bytes
        journal.done_bytes += block.num_bytes
        journal.lines += result.num_lines
        journal.outputs = {key: writer.position() for key, writer in self.writers.items()}
        _write_atomically(self.journal_path, json.dumps(asdict(journal)))
        if self.on_progress:
            self.on_progress(
                Progress(
                    journal.done_bytes,
                    self.total_bytes,
                    journal.num_documents,
                    sum(journal.num_tokens.values()),
                    time.monotonic() - self.began,
                )
            )

    def _note_bad_records(self, block: Block, result: EncodedBlock) -> None:
        for bad in result.bad:
            sentence = describe_bad_line(block.path, self.journal.lines, bad)
            if self.config.on_bad_record == "refuse":
                raise BadRecordError(
                    f"{sentence} Mend the line, or leave such lines out with "
                    "--on-bad-record skip."
                )
            if len(self.journal.bad_records) < _NAMED_BAD_RECORDS:
                self.journal.bad_records.append(sentence)
                log.warning("skipped: %s", sentence)
        self.journal.num_bad_records += len(result.bad)


def _in_order(
    pool: Executor,
    encode: Callable[[Block], EncodedBlock],
    blocks: Iterator[tuple[int, Block]],
    ahead: int,
) -> Iterator[tuple[int, Block, EncodedBlock]]:
    """Results in the order of the blocks, with ``ahead`` blocks in flight at most."""
    waiting: deque[tuple[int, Block, Future[EncodedBlock]]] = deque()
    for source, block in blocks:
        waiting.append((source, block, pool.submit(encode, block)))
        if len(waiting) >= ahead:
            first_source, first_block, future = waiting.popleft()
            yield first_source, first_block, future.result()
    while waiting:
        first_source, first_block, future = waiting.popleft()
        yield first_source, first_block, future.result()


@lru_cache(maxsize=1)
def _tokenizer_of_worker(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer once in each worker process."""
    return build_tokenizer(config)


def _encode_in_worker(block: Block, config: TokenizerConfig, **options: Any) -> EncodedBlock:
    return encode_block(block, _tokenizer_of_worker(config), **options)


def _open_writers(
    prefixes: dict[str, Path], tokenizer: Tokenizer, journal: _Journal
) -> dict[str, IndexedWriter]:
    dtype = token_dtype(tokenizer.vocab_size)
    return {
        key: IndexedWriter(prefix, dtype, resume_at=journal.outputs.get(key))
        for key, prefix in prefixes.items()
        if not _is_finished(prefix, journal.outputs.get(key))
    }


def _is_finished(prefix: Path, stand: dict[str, int] | None) -> bool:
    """Whether a killed run had already given this output its final names."""
    return (
        stand is not None
        and idx_path(prefix).is_file()
        and not Path(f"{prefix}.lengths.partial").exists()
    )


def _open_journal(path: Path, fingerprint: str) -> _Journal:
    """Load the journal of an interrupted run of the same work, or start one."""
    if path.is_file():
        fields: dict[str, Any] = json.loads(path.read_text())
        if fields["fingerprint"] == fingerprint:
            log.info("continuing after %s documents", fields["num_documents"])
            return _Journal(**fields)
        log.warning("%s is of other inputs or options: starting from the beginning", path)
    return _Journal(fingerprint)


def _fingerprint(config: PreprocessConfig, tokenizer: Tokenizer, sources: list[Path]) -> str:
    """Hash of everything that decides the output's bytes; skipping may be decided late."""
    facts = [
        [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in sources],
        config.json_keys,
        [config.append_eod, config.split_sentences, config.keep_newlines],
        tokenizer.fingerprint(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    partial = Path(f"{path}.partial")
    partial.write_text(text)
    partial.replace(path)
