"""Where a preprocessing run stands: the state that survives a kill.

Every now and then, and whatever ends a run but a kill, the journal is replaced as a whole,
once the outputs hold all that it says; a run that finds it cuts the outputs to that and goes
on from there.
"""

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Journal:
    """Progress through inputs and outputs.

    Attributes:
        fingerprint: hash of everything that decides the output's bytes.
        source: number of the input that is being read.
        start: where its next block starts.
        records: records of that input that are behind us, good and bad.
        done_bytes: stored bytes of all inputs that are behind us.
        num_documents: documents written.
        num_tokens: tokens written, by key.
        num_texts: texts encoded.
        num_characters: their length together.
        checked_texts: texts that the tokenizer encoded too, for verification.
        checked_characters: their length together.
        num_bad_records: records left out.
        bad_records: the first of them, described.
        outputs: sizes of the partial files, by key.
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

    def to_text(self) -> str:
        """The journal as it stands, for ``write_journal``."""
        return json.dumps(asdict(self))


def write_journal(path: Path, text: str) -> None:
    """Replace the file as a whole."""
    partial = Path(f"{path}.partial")
    partial.write_text(text)
    partial.replace(path)


def open_journal(path: Path, fingerprint: str) -> Journal:
    """Load the journal of an interrupted run of the same work, or start one."""
    if path.is_file():
        fields: dict[str, Any] = json.loads(path.read_text())
        if fields["fingerprint"] == fingerprint:
            log.info("continuing after %s documents", fields["num_documents"])
            return Journal(**fields)
        log.warning("%s is of other inputs or options: starting from the beginning", path)
    return Journal(fingerprint)
