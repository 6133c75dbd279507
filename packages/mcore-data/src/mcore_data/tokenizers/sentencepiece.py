"""Tokenizers of the ``sentencepiece`` library (extra ``sentencepiece``)."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from mcore_data.tokenizers.protocol import MARKER


class SentencePieceTokenizer:
    """A ``tokenizer.model`` with special tokens added after its vocabulary.

    Args:
        path: the model file.
        add_bos: start each encoded text with the model's BOS, as Llama 2 does.
        special_tokens: names that get the ids after those of the model. ``encode`` never
            returns these ids; ``token_id`` does.

    Raises:
        ImportError: if ``sentencepiece`` is not installed.
        ValueError: if the file is not a SentencePiece model, or ``add_bos`` is set and the
            model has no BOS.
    """

    def __init__(
        self, path: str | Path, *, add_bos: bool = False, special_tokens: Sequence[str] = ()
    ) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise ImportError(
                "SentencePiece models need the extra: pip install 'mcore-data[sentencepiece]'."
            ) from None
        self.path = Path(path)
        if self.path.is_dir():
            self.path = self.path / "tokenizer.model"
        try:
            self._model = SentencePieceProcessor(model_file=str(self.path))
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--tokenizer-model {self.path} is not a SentencePiece model: {error}"
            ) from error
        self._add_bos = add_bos
        self._special = {token: len(self._model) + i for i, token in enumerate(special_tokens)}
        self._special_names = {i: token for token, i in self._special.items()}
        self.vocab_size = len(self._model) + len(self._special)
        self.eod = _known(self._model.eos_id())
        self.bos = _known(self._model.bos_id())
        self.pad = _known(self._model.pad_id())
        if add_bos and self.bos is None:
            raise ValueError(
                f"{self.path} has no BOS, which Llama2Tokenizer adds to every text: use "
                "--tokenizer-type SentencePieceTokenizer."
            )

    @property
    def control_names(self) -> list[str]:
        """Control pieces such as <s>; in a text they are encoded as plain text."""
        ids = range(len(self._model))
        return [self._model.id_to_piece(i) for i in ids if self._model.is_control(i)]

    @property
    def special_names(self) -> list[str]:
        """Control pieces, for probes: an engine may take them for control ids."""
        return self.control_names

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self._model.encode(text, add_bos=self._add_bos and add_special_tokens)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of many texts, on one thread: processes divide the work."""
        return self._model.encode(
            list(texts), add_bos=self._add_bos and add_special_tokens, num_threads=1
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids; control ids of the model have no text."""
        parts = []
        for special, run in groupby(map(int, ids), key=self._special_names.__contains__):
            if not special:
                parts.append(self._model.decode(list(run)))
            elif not skip_special_tokens:
                parts += [self._special_names[i] for i in run]
        return "".join(parts)

    def token_id(self, token: str) -> int | None:
        """Return the id of an added special token or of a piece."""
        if token in self._special:
            return self._special[token]
        piece = self._model.piece_to_id(token)
        return None if piece == self._model.unk_id() else piece

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each id inside a text; None for an id without text."""
        pieces = [self._bytes(i) for i in range(len(self._model))]
        return pieces + [None] * len(self._special)

    def _bytes(self, i: int) -> bytes | None:
        model = self._model
        if model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
            return None
        piece = model.id_to_piece(i)
        if model.is_byte(i):  # <0x0A>
            return bytes([int(piece[3:-1], 16)])
        return piece.replace("\u2581", " ").encode()

    def fingerprint(self) -> str:
        """Return a hash of the model file and the added tokens."""
        digest = hashlib.sha256(self.path.read_bytes())
        digest.update(json.dumps([self._add_bos, list(self._special)]).encode())
        return digest.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Copy the model file and write the added tokens."""
        target = Path(folder) / "tokenizer.model"
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.resolve() != self.path.resolve():
            shutil.copyfile(self.path, target)
        fields = {
            "tokenizer_type": "Llama2Tokenizer" if self._add_bos else "SentencePieceTokenizer",
            "tokenizer_model": target.name,
            "tokenizer_special_tokens": list(self._special),
        }
        (target.parent / MARKER).write_text(json.dumps(fields, indent=2) + "\n")


def _known(token: int) -> int | None:
    return token if token >= 0 else None
