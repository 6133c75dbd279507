"""Options of tokenizers, preprocessing and training data; names are Megatron's flags.

The docstring under a field is its help text.
"""

from dataclasses import dataclass
from typing import Literal

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "SFTTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "MultimodalTokenizer",
    "NullTokenizer",
    "NullMultimodalTokenizer",
    "ByteTokenizer",
]
EngineName = Literal["auto", "gigatoken", "words", "reference"]
TOKENIZER_TYPES: tuple[str, ...] = TokenizerType.__args__  # pyrefly: ignore
WITHOUT_FILES = ("NullTokenizer", "NullMultimodalTokenizer", "ByteTokenizer")
"""Types that are built from no file, and take no further tokens."""
FILES = ("tokenizer_model", "vocab_file", "merge_file")
"""Options that name what the others are built from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Which tokenizer, and the local files that it is built from."""

    tokenizer_type: TokenizerType = "HuggingFaceTokenizer"
    """Kind of tokenizer, by Megatron's names. SFTTokenizer is a Hugging Face folder whose chat
    template counts, for prepare-chats; MultimodalTokenizer one with a token for an image. Left
    out, --vocab-file with --merge-file is GPT2BPETokenizer, and a SentencePiece model is known
    by its content. Megatron's default: none."""
    tokenizer_model: str = ""
    """Model file or folder: a Hugging Face folder, a tokenizer.json, a SentencePiece model,
    or mergeable ranks for TikTokenizer."""
    vocab_file: str = ""
    """vocab.json of GPT2BPETokenizer or vocab.txt of the BERT types."""
    merge_file: str = ""
    """merges.txt of GPT2BPETokenizer."""
    vocab_size: int = 0
    """Ids of NullTokenizer, without its end-of-document id, which comes after them; of
    TikTokenizer all ids, special tokens included, where 0 takes every rank of the file."""
    vocab_extra_ids: int = 0
    """Sentinels <extra_id_0>, <extra_id_1>, ... to add, for T5. 0 means 100 for
    BertWordPieceCase and none for the others."""
    tokenizer_special_tokens: tuple[str, ...] = ()
    """Further special tokens to add behind the vocabulary. MultimodalTokenizer adds <image>
    if none is given."""
    image_tag_type: Literal["", "nvlm", "internvl"] = ""
    """Tags that MultimodalTokenizer puts around each <image> of a text: <Image> and </Image>,
    or <img> and </img>. Empty puts none."""
    tiktoken_pattern: Literal["v1", "v2", "gpt4"] = "v2"
    """How TikTokenizer splits text: Megatron's two patterns, or that of GPT-4 and Llama 3,
    which takes digits by threes."""
    tiktoken_num_special_tokens: int = 1000
    """Special tokens that TikTokenizer puts before the ranks: <unk>, <s>, </s>, <mask>,
    <pad>, <cls>, <sep>, then <SPECIAL_7> and on. 0 puts none, as Llama 3 has it."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "vocab_extra_ids", "tiktoken_num_special_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative.")
        if self.image_tag_type and self.tokenizer_type != "MultimodalTokenizer":
            raise ValueError(
                f"--image-tag-type {self.image_tag_type} has no effect with --tokenizer-type "
                f"{self.tokenizer_type}: leave it out, or use MultimodalTokenizer."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """Turning a corpus into ``.bin``/``.idx`` datasets."""

    input: tuple[str, ...]
    """Files in the order given: JSON lines (.jsonl, .json, .ndjson), text (.txt), both plain
    or compressed (.gz, .bz2, .xz, .zst), Parquet and Arrow. A folder stands for the records
    below it, or if there are none for its texts, a pattern such as 'part-*.jsonl.gz' for the
    files that it matches, both by name; files that are left out are named. - is JSON lines on
    standard input; URLs such as s3://bucket/part-*.jsonl go through fsspec."""
    output_prefix: str
    """Outputs are <output-prefix>_<key>_document.bin and .idx, one pair for each key, and a
    manifest beside them; with --split-sentences <output-prefix>_<key>_sentence."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a record, or columns of a table, to tokenize, each into its own dataset."""
    append_eod: bool = False
    """End every document that is not empty with the end-of-document token."""
    split_sentences: bool = False
    """Make each sentence a sequence of its document, for BERT and T5."""
    keep_newlines: bool = False
    """With --split-sentences, keep the line ends that follow a sentence."""
    sentence_splitter: Literal["auto", "rules", "punkt"] = "auto"
    """With --split-sentences: rules without data, NLTK's punkt (extra punkt), or punkt where
    it and its data are there, else rules."""
    lang: str = "english"
    """Language of punkt's data."""
    text_lines: bool = False
    """Take each line of a .txt file for a document instead of the whole file."""
    workers: int = 1
    """Processes that parse and tokenize, at most four a core or eight; 1 works in this one."""
    partitions: int = 1
    """Cut the inputs into so many parts of about one size, write a pair for each,
    <output-prefix>_<part>_<key>_document, and join them; the result is the same."""
    partition: int = -1
    """Do only this part of --partitions, from 0 on, and leave the joining to merge: for many
    hosts. -1 does all."""
    engine: EngineName = "auto"
    """What encodes: gigatoken (extra fast) for byte pairs, SentencePiece's included, words for
    WordPiece, reference for the tokenizer itself. auto takes the fast one only if it is known
    to implement every part of the tokenizer, and begins anew with the tokenizer itself if it
    gives other ids on a text that is checked."""
    verify: Literal["full", "sample", "off"] = "sample"
    """Encode texts by the tokenizer too and compare the ids: full all texts; sample the first
    256 of each process, those with a character not seen before, the first 16 with each added
    token, and one in 1024, long ones in part; off none. The manifest counts them."""
    overwrite: bool = False
    """Replace finished outputs that other inputs or options have made; they stay until the
    new ones are whole. The same command again always may."""
    on_bad_record: Literal["refuse", "skip"] = "refuse"
    """What to do with an empty, truncated or otherwise wrong record: stop and name it, or
    leave it out, count it and name the first ones."""

    def __post_init__(self) -> None:
        if not self.input:
            raise ValueError("--input names no file.")
        if not self.json_keys or len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError(f"--json-keys {' '.join(self.json_keys)}: give each key once.")
        if self.keep_newlines and not self.split_sentences:
            raise ValueError("--keep-newlines has no effect without --split-sentences.")
        splits = self.split_sentences and self.sentence_splitter != "rules"
        if self.lang != "english" and not splits:
            raise ValueError(
                f"--lang {self.lang} has no effect without --split-sentences, nor by rules: "
                "it names punkt's data."
            )
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers}: at least 1 is needed.")
        if self.partitions < 1 or not -1 <= self.partition < self.partitions:
            raise ValueError(
                f"--partitions {self.partitions} --partition {self.partition}: parts are "
                "counted from 0 to one less than --partitions, which is at least 1."
            )
        if self.partition >= 0 and self.partitions == 1:
            raise ValueError("--partition has no effect without --partitions.")


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
    data_mixture_path: str = ""
    """JSON file of a mixture that changes: a list of phases, each with data_path, a list as
    --data-path with weights, and from_sample or from_step, where it begins. No source loses
    or repeats a sample at a change."""
    sft: bool = False
    """The data are chats, written by mcore-data prepare-chats: rows pack whole chats, and
    only what the assistant says counts in the loss."""
    multiple_validation_sets: bool = False
    """Score every dataset of --valid-data-path by itself instead of one blend of them."""
    full_validation: bool = False
    """Score all validation data each time, every sample once whatever its dataset weighs,
    instead of --eval-iters batches."""
    object_storage_cache_path: str = ""
    """Local folder for the indices of datasets in object stores (s3://bucket/prefix)."""
    data_cache_path: str = ""
    """Folder for the sample indices. Empty builds them in memory in each process."""
    mock_data: bool = False
    """Train on made-up tokens; no files needed."""
    mock_vocab_size: int = 50_000
    """Vocabulary of --mock-data when there is no tokenizer."""
    mmap_bin_files: bool = True
    """Read .bin files by memory map; off reads them with plain file calls."""
    num_dataset_builder_threads: int = 1
    """Datasets of a blend that are opened and indexed at a time, for many on a slow disk."""
    mid_level_dataset_surplus: float = 0.005
    """Share by which each dataset of a weighted blend is built larger than its part."""
    dataloader_type: Literal["single", "cyclic", "external"] = "single"
    """single goes through the samples once, cyclic for ever in new permutations, external
    takes batches from the caller."""
    num_workers: int = 2
    """Processes on each rank that prepare batches, at most four a core or eight; 0 prepares
    them within the step."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out the last tokens of the validation data where they fill no sample; off pads
    them, without a loss on the padding."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""
    reset_attention_mask: bool = False
    """Let no token attend to what is before the last end of document."""
    eod_mask_loss: bool = False
    """No loss where the input token is an end of document."""
    create_attention_mask_in_dataloader: bool = False
    """Make dense [S, S] attention masks; causal attention needs none. Megatron's default:
    on."""
    dataloader_inter_document_masking: bool = False
    """Give borders of documents (cu_seqlens) for packed attention within each."""

    def __post_init__(self) -> None:
        own_paths = self.train_data_path or (
            not self.data_mixture_path and (self.valid_data_path or self.test_data_path)
        )
        sources = {
            "--mock-data": self.mock_data,
            "--data-mixture-path": self.data_mixture_path,
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "--train-data-path, --valid-data-path, --test-data-path": own_paths,
            "--per-split-data-args-path": self.per_split_data_args_path,
        }
        given = [name for name, value in sources.items() if value]
        if len(given) > 1:
            raise ValueError(f"give one source of data, not {' and '.join(given)}.")
        if self.split and (
            own_paths or self.per_split_data_args_path or self.data_mixture_path
        ):
            raise ValueError("--split divides --data-path; paths for each split need none.")
        if self.sft:
            self._check_sft()
        if self.multiple_validation_sets and len(self.valid_data_path) < 2:
            raise ValueError(
                "--multiple-validation-sets needs the datasets to score: name two or more by "
                "--valid-data-path."
            )
        if self.num_dataset_builder_threads < 1:
            raise ValueError("--num-dataset-builder-threads must be at least 1.")
        if self.num_workers < 0 or self.mid_level_dataset_surplus < 0:
            raise ValueError("--num-workers and --mid-level-dataset-surplus must be >= 0.")

    def _check_sft(self) -> None:
        """Refuse what chats have no use for."""
        if self.mock_data or self.data_mixture_path:
            raise ValueError("--sft reads prepared chats: name them by --data-path.")
        for name in (
            "reset_position_ids",
            "reset_attention_mask",
            "eod_mask_loss",
            "create_attention_mask_in_dataloader",
            "dataloader_inter_document_masking",
        ):
            if getattr(self, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} has no effect with --sft, which keeps chats "
                    "apart anyway: leave it out."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingConfig:
    """What is hidden of the samples of BERT and T5."""

    mask_prob: float = 0.15
    """Share of the tokens that are hidden, above 0 and below 1."""
    short_seq_prob: float = 0.1
    """Share of the samples that are made shorter than a full row, 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise ValueError(f"--mask-prob {self.mask_prob} must lie between 0 and 1.")
        if not 0 <= self.short_seq_prob <= 1:
            raise ValueError(f"--short-seq-prob {self.short_seq_prob} must lie in 0 to 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class FIMConfig:
    """Fill-in-the-middle: documents cut in three, to be read in another order."""

    fim_data: bool = False
    """Rewrite a share of the documents for fill-in-the-middle."""
    fim_rate: float = 0.5
    """Share of the documents (or, with --fim-split-sample, of the samples) rewritten."""
    fim_spm_rate: float = 0.5
    """Share of the rewritten ones in suffix-prefix-middle order; the others keep the prefix
    first."""
    fim_split_sample: str = ""
    """Token at which a document is cut into fragments that are rewritten one by one."""
    fim_fragment_rate: float = 0.0
    """With --fim-split-sample, share of the fragments rewritten; 0 means --fim-rate."""
    fim_no_prefix: str = ""
    """Leave a text alone that starts with this."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that fills what a rewritten sample is short of."""

    def __post_init__(self) -> None:
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} must lie in 0 to 1.")
        if not self.fim_data and (self.fim_split_sample or self.fim_no_prefix):
            raise ValueError("--fim-split-sample and --fim-no-prefix need --fim-data.")
        if self.fim_fragment_rate and not self.fim_split_sample:
            raise ValueError("--fim-fragment-rate has no effect without --fim-split-sample.")
