"""Opens tokenizers by folder, file or Megatron's ``--tokenizer-type``.

``load_tokenizer`` opens a folder that a tokenizer's ``save`` wrote (checkpoints hold one), a
Hugging Face folder, or a type name with its files. Nothing is downloaded.
"""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_data.config import FILES, TOKENIZER_TYPES, WITHOUT_FILES, TokenizerConfig
from mcore_data.tokenizers.protocol import MARKER, Tokenizer

log = logging.getLogger(__name__)

# The first message of a SentencePiece model is a piece, and in it the first field its text.
_SENTENCEPIECE_START = re.compile(rb"\n[^{]\n", re.DOTALL)
# A JSON list of ranks, or base64 and a number.
_RANKS_START = re.compile(rb"\s*\[|[A-Za-z0-9+/]+=* 0\s")


def load_tokenizer(folder_or_type: str | Path, **options: Any) -> Tokenizer:
    """Open a tokenizer from a folder or file, or by Megatron's type name.

    Args:
        folder_or_type: a folder written by ``save`` or by Hugging Face, a
            ``tokenizer.json``, or one of ``TOKENIZER_TYPES``.
        **options: fields of ``TokenizerConfig``, for a type; a file may be a ``Path``.

    Raises:
        ValueError: if the type is unknown, or a file it needs was not given.
        FileNotFoundError: if a file or folder does not exist.
        ImportError: if the type needs an extra that is not installed.
    """
    name = str(folder_or_type)
    if name in TOKENIZER_TYPES:
        plain: dict[str, Any] = {field: _plain(value) for field, value in options.items()}
        return build_tokenizer(TokenizerConfig(tokenizer_type=name, **plain))  # pyrefly: ignore
    if options:
        raise ValueError(
            f"{', '.join(options)}: only tokenizer types take options, and {name} is a path. "
            f"Types: {', '.join(TOKENIZER_TYPES)}."
        )
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(
            f"{name} is neither a tokenizer folder or file nor a known type. "
            f"Types: {', '.join(TOKENIZER_TYPES)}."
        )
    return build_tokenizer(_detect(path))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return tuple(value) if isinstance(value, list) else value


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that a config names; raises the errors of ``load_tokenizer``."""
    kind = config.tokenizer_type
    if kind == "HuggingFaceTokenizer":
        config = _with_detected_type(config)
        kind = config.tokenizer_type
    if kind in WITHOUT_FILES:
        return _build_plain(config)
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        return _build_sentencepiece(config)
    if kind == "TikTokenizer":
        return _build_tiktoken(config)
    if kind == "MultimodalTokenizer":
        return _build_multimodal(config)
    if kind in TOKENIZER_TYPES:
        return _build_hf(config)
    raise ValueError(
        f"--tokenizer-type {kind} is unknown. Use one of {', '.join(TOKENIZER_TYPES)}."
    )


def _with_detected_type(config: TokenizerConfig) -> TokenizerConfig:
    """Replace the default type if the given files are of another type.

    Raises:
        ValueError: if the file holds mergeable ranks, whose pattern the user must give.
    """
    if config.vocab_file and config.merge_file and not config.tokenizer_model:
        return replace(config, tokenizer_type="GPT2BPETokenizer")
    path = Path(config.tokenizer_model)
    if (path / MARKER).is_file():
        saved = _detect(path)
        return replace(
            saved,
            tokenizer_special_tokens=(
                saved.tokenizer_special_tokens + config.tokenizer_special_tokens
            ),
            vocab_extra_ids=config.vocab_extra_ids,
        )
    file = path / "tokenizer.model" if path.is_dir() else path
    if (path.is_dir() and (path / "tokenizer.json").is_file()) or not file.is_file():
        return config
    with file.open("rb") as opened:
        start = opened.read(64)
    if _SENTENCEPIECE_START.match(start):
        roles = file.parent / "tokenizer_config.json"
        fields = json.loads(roles.read_text(encoding="utf-8")) if roles.is_file() else {}
        kind = "Llama2Tokenizer" if fields.get("add_bos_token") else "SentencePieceTokenizer"
        log.info("%s is a SentencePiece model: read as --tokenizer-type %s", file, kind)
        return replace(config, tokenizer_type=kind)
    if _RANKS_START.match(start):
        raise ValueError(
            f"--tokenizer-model {file} holds mergeable ranks. Use --tokenizer-type "
            "TikTokenizer (for Llama 3 with --tiktoken-pattern gpt4 and "
            "--tiktoken-num-special-tokens 0)."
        )
    return config


def eod_advice(config: TokenizerConfig) -> str:
    """Return advice for an error message: how to give a tokenizer an end-of-document token."""
    kind = config.tokenizer_type
    if kind == "TikTokenizer":
        return (
            "Name it by --tokenizer-special-tokens; for Llama 3: --tokenizer-special-tokens "
            "'<|begin_of_text|>' '<|end_of_text|>'."
        )
    if kind == "GPT2BPETokenizer":
        return "Add it by --tokenizer-special-tokens '<|endoftext|>'."
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        return "The model was trained without eos_id: use a model that has it."
    if kind.startswith("Bert"):
        return "The vocab.txt must hold [SEP]."
    return "Name it as eos_token in the tokenizer_config.json of the same folder."


def _build_plain(config: TokenizerConfig) -> Tokenizer:
    from mcore_data.tokenizers.plain import ByteTokenizer, NullTokenizer

    for field in (*FILES, "tokenizer_special_tokens", "vocab_extra_ids"):
        if getattr(config, field):
            raise ValueError(
                f"--{field.replace('_', '-')} has no effect on a {config.tokenizer_type}, "
                "which reads no files and has no added tokens: leave it out."
            )
    if config.tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    return NullTokenizer(_needed(config, "vocab_size"))


def _build_sentencepiece(config: TokenizerConfig) -> Tokenizer:
    from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(
        _needed_file(config, "tokenizer_model", may_be_folder=True),
        add_bos=config.tokenizer_type == "Llama2Tokenizer",
        special_tokens=_extra_tokens(config),
    )


def _build_tiktoken(config: TokenizerConfig) -> Tokenizer:
    from mcore_data.tokenizers.tiktoken_ranks import build_tiktoken

    return build_tiktoken(
        _needed_file(config, "tokenizer_model"),
        pattern=config.tiktoken_pattern,
        num_special_tokens=config.tiktoken_num_special_tokens,
        vocab_size=config.vocab_size,
        special_tokens=_extra_tokens(config),
    )


def _build_multimodal(config: TokenizerConfig) -> Tokenizer:
    from mcore_data.tokenizers.multimodal import IMAGE, MultimodalTokenizer

    source = _needed_file(config, "tokenizer_model", may_be_folder=True)
    special_tokens = _extra_tokens(config) or [IMAGE]
    return MultimodalTokenizer.open(source, special_tokens, config.image_tag_type)


def _build_hf(config: TokenizerConfig) -> Tokenizer:
    from mcore_data.tokenizers import hf

    if config.tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer"):
        source = _needed_file(config, "tokenizer_model", may_be_folder=True)
        return hf.open_hf_tokenizer(source, _extra_tokens(config))
    if config.tokenizer_type == "GPT2BPETokenizer":
        return hf.build_gpt2_bpe(
            _needed_file(config, "vocab_file"),
            _needed_file(config, "merge_file"),
            _extra_tokens(config),
        )
    return hf.build_bert_wordpiece(
        _needed_file(config, "vocab_file"),
        lower_case=config.tokenizer_type == "BertWordPieceLowerCase",
        special_tokens=_extra_tokens(config),
    )


def _detect(path: Path) -> TokenizerConfig:
    """Detect the type of a tokenizer folder or file; return its config."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (folder / MARKER).is_file():
        fields = json.loads((folder / MARKER).read_text())
        for name in FILES:
            if fields.get(name):
                fields[name] = str(folder / fields[name])
        fields["tokenizer_special_tokens"] = tuple(fields.get("tokenizer_special_tokens", ()))
        return TokenizerConfig(**fields)
    if path.is_file() or (folder / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    if (folder / "tokenizer.model").is_file():
        return TokenizerConfig(tokenizer_model=str(folder / "tokenizer.model"))
    if (folder / "vocab.txt").is_file():
        return TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt")
        )
    raise FileNotFoundError(
        f"{path} holds no tokenizer: it has none of {MARKER}, tokenizer.json, vocab.json with "
        "merges.txt, tokenizer.model, vocab.txt."
    )


def _extra_tokens(config: TokenizerConfig) -> list[str]:
    """Return the special tokens to add, each once: the named tokens, then the sentinels."""
    count = config.vocab_extra_ids
    if count == 0 and config.tokenizer_type == "BertWordPieceCase":
        count = 100  # Megatron trains T5 with its cased type
    sentinels = [f"<extra_id_{i}>" for i in range(count)]
    return list(dict.fromkeys([*config.tokenizer_special_tokens, *sentinels]))


def _needed(config: TokenizerConfig, field: str) -> int:
    value = getattr(config, field)
    if not value:
        raise ValueError(
            f"--tokenizer-type {config.tokenizer_type} needs --{field.replace('_', '-')}."
        )
    return value


def _needed_file(config: TokenizerConfig, field: str, *, may_be_folder: bool = False) -> Path:
    flag = "--" + field.replace("_", "-")
    value = getattr(config, field)
    if not value:
        raise ValueError(f"--tokenizer-type {config.tokenizer_type} needs {flag}.")
    path = Path(value)
    if not path.exists():
        raise FileNotFoundError(
            f"{flag} {value} does not exist. Tokenizers are read from local files, never "
            "downloaded."
        )
    if path.is_dir() and not may_be_folder:
        raise ValueError(
            f"{flag} {value} is a folder, and --tokenizer-type {config.tokenizer_type} takes a "
            "file."
        )
    return path
