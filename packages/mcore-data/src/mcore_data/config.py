"""Options of tokenizers, preprocessing and training data; names are Megatron's flags.

The docstring under a field is its help text.
"""

from dataclasses import dataclass
from typing import Literal

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "ByteTokenizer",
]
TOKENIZER_TYPES: tuple[str, ...] = TokenizerType.__args__  # pyrefly: ignore


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Which tokenizer, and the local files that it is built from."""

    tokenizer_type: TokenizerType = "HuggingFaceTokenizer"
    """Kind of tokenizer, by Megatron's names."""
    tokenizer_model: str = ""
    """Model file or folder: a Hugging Face folder, a tokenizer.json, a SentencePiece model."""
    vocab_file: str = ""
    """vocab.json of GPT2BPETokenizer or vocab.txt of the BERT types."""
    merge_file: str = ""
    """merges.txt of GPT2BPETokenizer."""
    vocab_size: int = 0
    """Ids of NullTokenizer, without its end-of-document id, which comes after them."""
    vocab_extra_ids: int = 0
    """Sentinels <extra_id_0>, <extra_id_1>, ... to add, for T5. 0 means 100 for
    BertWordPieceCase and none for the others."""
    tokenizer_special_tokens: tuple[str, ...] = ()
    """Further special tokens to add behind the vocabulary."""

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("vocab_size", "vocab_extra_ids"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """Turning JSONL into ``.bin``/``.idx`` datasets."""

    input: tuple[str, ...]
    """JSONL files, plain or compressed (.gz, .bz2, .xz), read in the order given."""
    output_prefix: str
    """Outputs are <output-prefix>_<key>_document.bin and .idx, one pair for each key."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a record to tokenize, each into its own dataset."""
    append_eod: bool = False
    """End every document that is not empty with the end-of-document token."""
    workers: int = 1
    """Processes that parse and tokenize; 1 works in this process."""
    on_bad_record: Literal["refuse", "skip"] = "refuse"
    """What to do with an empty, truncated or otherwise wrong line: stop and name it, or
    leave it out, count it and name the first ones."""

    def __post_init__(self) -> None:
        """Check what can be checked without looking at files."""
        if not self.input:
            raise ValueError("--input names no file.")
        if not self.json_keys or len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError(f"--json-keys {' '.join(self.json_keys)}: give each key once.")
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers}: at least 1 is needed.")
