"""Tokenizers of the ``tokenizers`` library: HF folders, GPT-2 BPE, BERT word pieces.

Each is saved as a ``tokenizer.json`` and a ``tokenizer_config.json``, a folder that
``transformers`` opens. Truncation and padding of a ``tokenizer.json`` are switched off.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mcore_data.tokenizers.declared_tokens import add_declared_tokens, read_config

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token")


class HFTokenizer:
    """A ``tokenizers.Tokenizer`` with the roles of its special tokens.

    Args:
        core: the tokenizer; truncation and padding are switched off in place.
        config: content of ``tokenizer_config.json``: the token of each role, the chat template
            and other fields. A missing ``eos_token`` is replaced by the first usual name that
            the vocabulary has.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
        if "eos_token" not in self.config:
            names = [name for name in _END_NAMES if self.token_id(name) is not None]
            if names:
                self.config["eos_token"] = names[0]
        self.vocab_size = max(core.get_vocab().values(), default=-1) + 1
        self.eod = self._role("eos_token")
        self.bos = self._role("bos_token")
        self.pad = self._role("pad_token")

    @cached_property
    def text(self) -> str:
        """Content of ``tokenizer.json``."""
        return self.core.to_str()

    @property
    def special_names(self) -> list[str]:
        """Names of the added tokens, which are found in a text before it is split, by id."""
        return [
            token.content for _, token in sorted(self.core.get_added_tokens_decoder().items())
        ]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens in the text become their ids.

        Raises:
            ValueError: if the text is not valid Unicode, such as an argument in another coding.
        """
        try:
            return self.core.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise ValueError(f"{text[:40]!r} is not a text in UTF-8.") from None

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of many texts; TOKENIZERS_PARALLELISM sets the number of threads."""
        encodings = self.core.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self.core.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of one token by its name."""
        return self.core.token_to_id(token)

    def fingerprint(self) -> str:
        """Return a hash of the serialised tokenizer and the roles."""
        roles = json.dumps([self.eod, self.bos, self.pad])
        return hashlib.sha256((self.text + roles).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.core.save(str(Path(folder) / "tokenizer.json"))
        text = json.dumps(self.config, indent=2, ensure_ascii=False)
        (Path(folder) / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the two texts that ``save`` writes."""
        return _rebuild, (self.text, self.config)

    def _role(self, role: str) -> int | None:
        name = _content(self.config.get(role))
        return None if name is None else self.token_id(name)


def open_hf_tokenizer(path: str | Path, special_tokens: Sequence[str] = ()) -> HFTokenizer:
    """Open a Hugging Face folder or a bare ``tokenizer.json``.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a tokenizer, or the folder's other files contradict it.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Save the tokenizer in its fast form "
            "(transformers: tokenizer.save_pretrained), or use its own --tokenizer-type."
        )
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
    add_declared_tokens(core, file.parent)
    core.add_special_tokens(list(special_tokens))
    return HFTokenizer(core, _read_roles(file.parent))


def build_gpt2_bpe(
    vocab_file: str | Path, merge_file: str | Path, special_tokens: Sequence[str] = ()
) -> HFTokenizer:
    """Build GPT-2's byte-level BPE from ``vocab.json`` and ``merges.txt``."""
    try:
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:
        raise ValueError(
            f"--vocab-file {vocab_file} and --merge-file {merge_file} are not a BPE model: "
            f"{error}"
        ) from error
    core = tokenizers.Tokenizer(model)
    set_byte_level(core)
    known = [END_OF_TEXT] if core.token_to_id(END_OF_TEXT) is not None else []
    core.add_special_tokens([*known, *special_tokens])
    return HFTokenizer(core)


def build_bert_wordpiece(
    vocab_file: str | Path, *, lower_case: bool, special_tokens: Sequence[str] = ()
) -> HFTokenizer:
    """Build BERT's WordPiece tokenizer from ``vocab.txt``; texts get no [CLS] or [SEP].

    Each line of the file is a token.
    """
    lines = Path(vocab_file).read_text(encoding="utf-8").split("\n")
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines) if line.rstrip("\r")}
    if "[UNK]" not in vocab:
        raise ValueError(
            f"--vocab-file {vocab_file} has no [UNK]: it is not a BERT vocabulary."
        )
    core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    special_names = [
        name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocab
    ]
    core.add_special_tokens([*special_names, *special_tokens])
    roles = {
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return HFTokenizer(core, {role: name for role, name in roles.items() if name in vocab})


def set_byte_level(core: tokenizers.Tokenizer) -> None:
    """Set GPT-2's byte-level splitting and decoding on a BPE tokenizer, in place."""
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()


def byte_letters() -> list[str]:
    """Return the printable letter of each byte in byte-level vocabularies (GPT-2's table)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = count(256)
    return [chr(byte if byte in plain else next(moved)) for byte in range(256)]


def _read_roles(folder: Path) -> dict[str, Any]:
    """Return the config of a Hugging Face folder, with the chat template of its own file."""
    config = read_config(folder)
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    for role in _ROLES:
        if config.get(role, "") is None:
            del config[role]
    return config


def _content(token: object) -> str | None:
    """Return the name of a token that is given as text or as the fields of an added token."""
    if isinstance(token, Mapping):
        return token.get("content")
    return token if isinstance(token, str) else None


def _rebuild(text: str, config: dict[str, Any]) -> HFTokenizer:
    return HFTokenizer(tokenizers.Tokenizer.from_str(text), config)
