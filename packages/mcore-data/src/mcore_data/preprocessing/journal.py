"""Progress of a preprocessing run on disk, from which the same command continues.

The journal file is replaced about once a second and when a run stops, after the partial outputs
that it describes were flushed to the disk. A run that finds a journal truncates the partial
outputs to its sizes and continues with the next block. The file has a digest of its content, so
a damaged journal raises an error and is never used.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_data.indexed.index_format import CorruptDatasetError
from mcore_data.indexed.manifest import DIGEST, parse_json, replace_json

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Journal:
    """Progress through inputs and outputs.

    Attributes:
        fingerprint: hash of everything that determines the output's bytes.
        source: number of the current input.
        start: start of the next block in the current input.
        records: records of the current input that were read, good and bad.
        done_bytes: stored bytes of all inputs that were read.
        num_documents: documents written.
        num_tokens: tokens written, by key.
        num_texts: texts encoded.
        num_characters: characters of these texts.
        checked_texts: texts that the reference tokenizer encoded too.
        checked_characters: characters of these texts.
        num_bad_records: records left out.
        bad_records: file, line and fault of the first bad records.
        outputs: bytes of each partial file, by key of the corpus.
    """

    fingerprint: str
    source: int = 0
    start: int = 0
    records: int = 0
    done_bytes: int = 0
    num_documents: int = 0
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_texts: int = 0
    num_characters: int = 0
    checked_texts: int = 0
    checked_characters: int = 0
    num_bad_records: int = 0
    bad_records: list[str] = field(default_factory=list)
    outputs: dict[str, dict[str, int]] = field(default_factory=dict)


def write_journal(path: Path, journal: dict[str, Any]) -> None:
    """Replace the file by ``journal``, a ``Journal`` as a dict."""
    replace_json(path, journal)


def open_journal(path: Path, fingerprint: str) -> Journal:
    """Load the journal of an interrupted run of the same work, or return a new journal.

    Raises:
        CorruptDatasetError: if the file is damaged.
    """
    if not path.is_file():
        return Journal(fingerprint)
    fields = parse_json(path.read_bytes()) or {}
    fields.pop(DIGEST, None)
    try:
        journal = Journal(**fields)
    except TypeError:
        raise CorruptDatasetError(
            f"{path}, the progress of an interrupted run, is damaged or of another version. "
            "Remove the file and repeat the command, which then starts from the beginning."
        ) from None
    if journal.fingerprint != fingerprint:
        log.warning("%s is of other inputs or options: starting from the beginning", path)
        return Journal(fingerprint)
    log.info("continuing after %s documents", journal.num_documents)
    return journal
