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
    """JSONL files, plain or compressed (.gz, .bz2, .xz), in the order given. A folder stands
    for its *.jsonl and *.json files, plain or compressed; a pattern such as 'part-*.jsonl.gz'
    for what it matches; both by name."""
    output_prefix: str
    """Outputs are <output-prefix>_<key>_document.bin and .idx, one pair for each key;
    with --split-sentences <output-prefix>_<key>_sentence."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a record to tokenize, each into its own dataset."""
    append_eod: bool = False
    """End every document that is not empty with the end-of-document token."""
    split_sentences: bool = False
    """Make each sentence a sequence of its document, for BERT and T5."""
    keep_newlines: bool = False
    """With --split-sentences, keep the line ends that follow a sentence."""
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
        if self.keep_newlines and not self.split_sentences:
            raise ValueError("--keep-newlines has no effect without --split-sentences.")
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers}: at least 1 is needed.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where training data is, how it is split and how samples are made."""

    data_path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, or weights and prefixes in turn: 0.7 code 0.3 books."""
    split: str = ""
    """Shares of train, valid and test in --data-path. Empty means 969,30,1 (mock data:
    1,1,1)."""
    train_data_path: tuple[str, ...] = ()
    """As --data-path, for training only."""
    valid_data_path: tuple[str, ...] = ()
    """As --data-path, for validation only."""
    test_data_path: tuple[str, ...] = ()
    """As --data-path, for the test only."""
    data_args_path: str = ""
    """File with the words of --data-path, for blends of many datasets."""
    per_split_data_args_path: str = ""
    """JSON file with the keys train, valid and test, each a list as --data-path."""
    data_cache_path: str = ""
    """Folder for the sample indices. Empty builds them in memory in each process."""
    mock_data: bool = False
    """Train on made-up tokens; no files needed."""
    mock_vocab_size: int = 50_000
    """Vocabulary of --mock-data when there is no tokenizer."""
    mmap_bin_files: bool = True
    """Read .bin files by memory map; off reads them with plain file calls."""
    mid_level_dataset_surplus: float = 0.005
    """Share by which each dataset of a weighted blend is built larger than its part."""
    dataloader_type: Literal["single", "cyclic", "external"] = "single"
    """single goes through the samples once, cyclic for ever in new permutations, external
    takes batches from the caller."""
    num_workers: int = 2
    """Processes on each rank that prepare batches; 0 prepares them within the step."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""
    reset_attention_mask: bool = False
    """Let no token attend to what is before the last end of document."""
    eod_mask_loss: bool = False
    """No loss where the input token is an end of document."""
    create_attention_mask_in_dataloader: bool = False
    """Make dense [S, S] attention masks; causal attention needs none."""
    dataloader_inter_document_masking: bool = False
    """Give borders of documents (cu_seqlens) for packed attention within each."""

    def __post_init__(self) -> None:
        """Check that there is at most one source and that counts make sense."""
        own_paths = self.train_data_path or self.valid_data_path or self.test_data_path
        sources = {
            "--mock-data": self.mock_data,
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "--train-data-path, --valid-data-path, --test-data-path": own_paths,
            "--per-split-data-args-path": self.per_split_data_args_path,
        }
        given = [name for name, value in sources.items() if value]
        if len(given) > 1:
            raise ValueError(f"give one source of data, not {' and '.join(given)}.")
        if self.split and (own_paths or self.per_split_data_args_path):
            raise ValueError("--split divides --data-path; paths for each split need none.")
        if self.num_workers < 0 or self.mid_level_dataset_surplus < 0:
            raise ValueError("--num-workers and --mid-level-dataset-surplus must be >= 0.")
