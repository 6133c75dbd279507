"""Options of tokenizers, preprocessing and training data; names are Megatron's flags.

A field's docstring is its help text.
"""

import operator
from dataclasses import dataclass
from typing import Any, Literal

from mcore_base.options import ON, Because, Options, Rule, When, option

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
"""Types that need no file and accept no added tokens."""
FILES = ("tokenizer_model", "vocab_file", "merge_file")
"""Options that name the files of all other types."""


_FROM_FILES = (
    When(
        "tokenizer_type",
        lambda kind: kind not in WITHOUT_FILES,
        "--tokenizer-type of one that reads files",
    ),
)
_NO_PACKED = Because("which takes no packed documents", "flash4", instead="use auto")
_APART = Because("whose rows already keep chats separate")
_SENTENCES = {"is_causal": When("is_causal", operator.not_, "samples of sentences (bert, t5)")}


def _several_sources(values: Any) -> str:
    """Return the error message if several options name the training data, else ''."""
    flags = [name for name in values.sources if name != "--train-data-path"]
    if values.has_split_paths:
        flags.append("--train-data-path, --valid-data-path, --test-data-path")
    return f"give one source of data, not {' and '.join(flags)}." if len(flags) > 1 else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig(Options):
    """Type of the tokenizer, and its local files."""

    tokenizer_type: TokenizerType = "HuggingFaceTokenizer"
    """Type of tokenizer, by Megatron's names. SFTTokenizer is a Hugging Face folder with a chat
    template, for prepare-chats; MultimodalTokenizer a Hugging Face folder plus a token for an
    image. If not given, --vocab-file with --merge-file means GPT2BPETokenizer, and a
    SentencePiece model is recognised by its content. Megatron's default: none."""
    tokenizer_model: str = option("", part_of=_FROM_FILES)
    """Model file or folder: a Hugging Face folder, a tokenizer.json, a SentencePiece model,
    or mergeable ranks for TikTokenizer."""
    vocab_file: str = option("", part_of=_FROM_FILES)
    """vocab.json of GPT2BPETokenizer or vocab.txt of the BERT types."""
    merge_file: str = option("", part_of=_FROM_FILES)
    """merges.txt of GPT2BPETokenizer."""
    vocab_size: int = option(0, minimum=0)
    """Number of ids. NullTokenizer adds its end-of-document id after them; of TikTokenizer they
    include special tokens, and 0 means every rank of the file."""
    vocab_extra_ids: int = option(0, minimum=0)
    """Sentinels <extra_id_0>, <extra_id_1>, ... to add, for T5. 0 means 100 for
    BertWordPieceCase and none for other types."""
    tokenizer_special_tokens: tuple[str, ...] = ()
    """Special tokens to add after the vocabulary. MultimodalTokenizer adds <image> by
    default."""
    image_tag_type: Literal["", "nvlm", "internvl"] = option(
        "", needs={"tokenizer_type": "MultimodalTokenizer"}
    )
    """Tags that MultimodalTokenizer puts around each <image> of a text: <Image> and </Image>
    (nvlm), or <img> and </img> (internvl). Empty: none."""
    tiktoken_pattern: Literal["v1", "v2", "gpt4"] = option(
        "v2", part_of={"tokenizer_type": "TikTokenizer"}
    )
    """How TikTokenizer splits text: Megatron's patterns v1 and v2, or the pattern of GPT-4 and
    Llama 3, which groups digits by threes."""
    tiktoken_num_special_tokens: int = option(
        1000, minimum=0, part_of={"tokenizer_type": "TikTokenizer"}
    )
    """Special tokens that TikTokenizer puts before the ranks: <unk>, <s>, </s>, <mask>,
    <pad>, <cls>, <sep>, then <SPECIAL_7> and so on. 0: none, as in Llama 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig(Options):
    """Options of tokenizing a corpus into ``.bin``/``.idx`` datasets."""

    input: tuple[str, ...] = ()
    """Files in the order given: JSON lines (.jsonl, .json, .ndjson), text (.txt), CSV (.csv,
    .tsv), Common Crawl's texts (.wet), all plain or compressed (.gz, .bz2, .xz, .zst), Parquet
    and Arrow. A folder means all record files in
    it, or if there are none all its text files; a pattern such as 'part-*.jsonl.gz' means the
    files that match; both in the order of names. Ignored files are listed. - is JSON lines on
    standard input; URLs such as s3://bucket/part-*.jsonl are read through fsspec."""
    output_prefix: str = ""
    """Outputs are <output-prefix>_<key>_document.bin and .idx with a manifest, one pair for
    each key; with --split-sentences <output-prefix>_<key>_sentence."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a record, or columns of a table, to tokenize, each into its own dataset.
    data.text is the key text of the object under data."""
    keep_keys: tuple[str, ...] = ()
    """Keys of a record, such as id or meta.url, whose values are stored with each document:
    explain prints them, and --blocklist finds documents by them."""
    append_eod: bool = False
    """End every non-empty document with the end-of-document token."""
    split_sentences: bool = False
    """Store each sentence as a sequence of its document, for BERT and T5."""
    keep_newlines: bool = option(False, needs={"split_sentences": ON})
    """With --split-sentences, keep the line ends that follow a sentence."""
    sentence_splitter: Literal["auto", "rules", "punkt"] = "auto"
    """With --split-sentences: rules, which need no data; punkt, of NLTK (extra punkt); auto,
    punkt if NLTK and its data are installed, else rules."""
    lang: str = option("english", needs={"split_sentences": ON})
    """Language of punkt's data."""
    text_lines: bool = False
    """Make each line of a .txt file a document, not the whole file."""
    workers: int = option(1, minimum=1)
    """Processes that parse and tokenize, at most four per core or eight; 1 starts none."""
    partitions: int = 1
    """Split the inputs into this many parts of about equal size, write a pair for each,
    <output-prefix>_<part>_<key>_document, and join them; the result is the same."""
    partition: int = -1
    """Process only this part of --partitions, counted from 0, and do not join: for several
    hosts, followed by merge. -1: all parts."""
    engine: EngineName = "auto"
    """Encoder of texts: gigatoken (extra fast) for byte-pair encoding, including
    SentencePiece's; words for WordPiece; reference, the tokenizer itself. auto uses the fast
    engine only if the engine is known to implement every part of the tokenizer, and starts over
    with the tokenizer if a checked text gets other ids."""
    verify: Literal["full", "sample", "off"] = "sample"
    """Which texts the tokenizer encodes too, to compare the ids: full, all texts; sample, the
    first 256 of each process, texts with a new character, the first 16 with each added token,
    and one in 1024, long texts in part; off, none. The manifest counts the checked texts."""
    overwrite: bool = False
    """Replace finished outputs that were made from other inputs or options, once the new ones
    are complete. Repeating the same command needs no --overwrite."""
    scratch_path: str = ""
    """Local folder for files that are being written, for outputs in an object store
    (s3://bucket/prefix)."""
    on_bad_record: Literal["refuse", "skip"] = "refuse"
    """What to do with an empty, truncated or otherwise wrong record: refuse, stop and name it;
    skip, leave it out, count it and name the first ones."""
    plan: str = ""
    """<output-prefix>.plan.json of mcore-data plan: write units of the plan until none is left.
    Any number of workers may do so at the same time. Inputs, tokenizer and settings are the
    plan's; --workers and --on-bad-record may be given."""
    claim_timeout_s: float = option(120.0, minimum=30, needs=(When("plan", bool, "--plan"),))
    """Seconds without a change of its lock file after which a worker of --plan counts as dead,
    and another worker continues its unit. A lock is touched every 15 seconds, and NFS may show
    a change a minute later. A dead worker of the same machine is detected at once."""

    rules = (
        Rule(
            ("input", "output_prefix", "plan"),
            lambda v: not v.plan and not (v.input and v.output_prefix),
            "give --input and --output-prefix, or --plan with a plan that has them.",
        ),
        Rule(
            ("json_keys",),
            lambda v: not v.json_keys or len(set(v.json_keys)) != len(v.json_keys),
            "--json-keys {json_keys}: give each key once.",
        ),
        Rule(
            ("keep_keys",),
            lambda v: len(set(v.keep_keys)) != len(v.keep_keys),
            "--keep-keys {keep_keys}: give each key once.",
        ),
        Rule(
            ("lang", "sentence_splitter"),
            lambda v: v.lang != "english" and v.sentence_splitter == "rules",
            "--lang {lang} has no effect with --sentence-splitter rules: it names punkt's "
            "data.",
        ),
        Rule(
            ("partitions", "partition"),
            lambda v: v.partitions < 1 or not -1 <= v.partition < v.partitions,
            "--partitions {partitions} --partition {partition}: parts are counted from 0 to "
            "one less than --partitions, which is at least 1.",
        ),
        Rule(
            ("partitions", "partition"),
            lambda v: v.partitions == 1 and v.partition == 0,
            "--partition has no effect without --partitions.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig(Options):
    """Executor of a plan's workers, and their number and size."""

    executor: Literal["local", "slurm", "ray"] = "local"
    """How workers are started: local, as processes of this machine; slurm, as array jobs; ray,
    as a task for each unit (extra ray)."""
    num_tasks: int = option(1, minimum=1)
    """Workers at a time."""
    cpus_per_task: int = option(1, minimum=1)
    """Cores, and processes that tokenize, of each worker."""
    max_retries: int = option(3, minimum=0)
    """Number of dead workers that are replaced; with slurm, how often missing units are
    submitted again; with ray, how often a unit is tried again."""
    skip_bad_records: bool = False
    """Leave bad records out, as --on-bad-record skip does."""
    submit_jobs: bool = option(False, needs={"executor": "slurm"})
    """Submit the jobs; by default the batch script is only written, and the commands are
    printed. Repeating the command submits workers for the missing units."""
    wait: bool = option(False, needs={"submit_jobs": ON})
    """Wait until all units are done, and submit missing units again when all jobs ended."""
    max_array: int = option(1000, minimum=1, part_of={"executor": "slurm"})
    """Largest number of tasks of one array job, below Slurm's MaxArraySize; more tasks make
    several jobs."""
    slurm_options: tuple[str, ...] = option((), part_of={"executor": "slurm"})
    """More options of sbatch, such as partition=cpu time=12:00:00."""
    ray_address: str = option("", part_of={"executor": "ray"})
    """Address of a Ray cluster, or auto; empty: RAY_ADDRESS, or a new one on this machine."""

    rules = (
        Rule(
            ("slurm_options",),
            lambda v: not all("=" in word for word in v.slurm_options),
            "--slurm-options {slurm_options}: give NAME=VALUE, such as partition=cpu.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Options):
    """Which datasets to train on, how they are split and how samples are made."""

    data_path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, or alternating weights and prefixes: 0.7 code 0.3 books."""
    tokenize_on_the_fly: bool = option(
        False,
        needs=(
            When("data_cache_path", bool, "--data-cache-path"),
            When("data_args_path", operator.not_, "paths on the command line"),
            When("per_split_data_args_path", operator.not_, "paths on the command line"),
            When("data_mixture_path", operator.not_, "paths on the command line"),
        ),
        idle_with={"mock_data": ON, **_SENTENCES},
        excludes={
            "sft": Because("as chats are prepared by mcore-data prepare-chats"),
            "preferences": Because("as pairs are prepared by mcore-data prepare-preferences"),
        },
    )
    """--data-path and the paths of the splits name texts, as --input of mcore-data preprocess:
    files, folders, patterns or URLs. Before the first step all ranks tokenize them once, into
    --data-cache-path."""
    text_key: str = option("text", part_of={"tokenize_on_the_fly": ON})
    """Key of a record, such as text or data.text, that --tokenize-on-the-fly tokenizes."""
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
    """File with the arguments of --data-path, for blends of many datasets."""
    per_split_data_args_path: str = ""
    """JSON file with the keys train, valid and test, each a list as --data-path."""
    data_mixture_path: str = option("", idle_with=_SENTENCES)
    """JSON file of a mixture that changes during training: a list of phases, each with
    data_path, a list as --data-path with weights, and its start, from_sample or from_step. No
    sample of a source is lost or repeated at a change."""
    sft: bool = option(
        False,
        idle_with=_SENTENCES,
        excludes={
            "mock_data": Because("as it reads prepared chats, by --data-path"),
            "data_mixture_path": Because("as it reads prepared chats, by --data-path"),
        },
    )
    """The data are chats, written by mcore-data prepare-chats: rows pack full chats, and only
    the assistant's tokens count in the loss."""
    preferences: bool = option(
        False,
        idle_with=_SENTENCES,
        excludes={
            "sft": Because("as the data are either chats or pairs of answers"),
            "mock_data": Because("as it reads prepared pairs, by --data-path"),
            "data_mixture_path": Because("as it reads prepared pairs, by --data-path"),
        },
    )
    """The data are pairs of a chosen and a rejected answer, written by mcore-data
    prepare-preferences: rows pack full pairs. --objective dpo turns it on."""
    multiple_validation_sets: bool = option(False, idle_with=_SENTENCES)
    """Evaluate every dataset of --valid-data-path separately instead of their blend."""
    validation_set_names: tuple[str, ...] = option((), part_of={"multiple_validation_sets": ON})
    """Names of the validation sets in reports, in the order of --valid-data-path; without
    names: the paths."""
    full_validation: bool = option(
        False,
        needs=(When("interval", bool, "--eval-interval and --eval-iters"),),
        excludes={"dataloader_type": Because("as external data have no length", "external")},
    )
    """Evaluate all validation data each time, instead of --eval-iters batches: every sample
    once, regardless of weights."""
    blocklist: str = option(
        "",
        idle_with={"mock_data": ON, **_SENTENCES},
        excludes={"preferences": Because("which pairs answers by their tokens")},
    )
    """File of documents to leave out of training, one per line: a value that preprocess
    --keep-keys stored, such as an id or a URL, or a prefix, a tab and a document's number.
    Their tokens become end-of-document ids without a loss; all other samples do not
    change."""
    object_storage_cache_path: str = ""
    """Local folder for the indices of datasets in object stores (s3://bucket/prefix)."""
    object_storage_cache_gib: float = option(
        0.0, minimum=0, needs=(When("object_storage_cache_path", bool, "a cache path"),)
    )
    """GiB of tokens that all processes of a host cache in --object-storage-cache-path; the
    oldest are removed. 0: tokens are not cached on disk."""
    data_cache_path: str = option("", idle_with=_SENTENCES)
    """Folder for the sample indices. Empty: each process builds the indices in memory."""
    mock_data: bool = False
    """Train on generated tokens; no files needed."""
    mock_vocab_size: int = option(50_000, part_of={"mock_data": ON})
    """Vocabulary of --mock-data without a tokenizer."""
    mmap_bin_files: bool = True
    """Read .bin files by memory map; off: by plain file reads."""
    num_dataset_builder_threads: int = option(1, minimum=1)
    """Datasets of a blend that are opened and indexed concurrently, for slow disks."""
    mid_level_dataset_surplus: float = option(0.005, minimum=0)
    """Fraction of extra samples for which each dataset of a weighted blend is built."""
    dataloader_type: Literal["single", "cyclic", "external"] = "single"
    """single reads the samples once; cyclic repeats them endlessly in new permutations;
    external gets batches from the caller."""
    num_workers: int = option(2, minimum=0)
    """Processes on each rank that prepare batches, at most four per core or eight; 0: batches
    are prepared within the step."""
    drop_last_partial_validation_sequence: bool = True
    """Drop the last tokens of the validation data if they do not fill a sample; off: pad them,
    without a loss on the padding."""
    reset_position_ids: bool = option(
        False, idle_with={"sft": _APART, "preferences": _APART, **_SENTENCES}
    )
    """Count positions from 0 again after each end of document."""
    reset_attention_mask: bool = option(
        False,
        idle_with={"sft": _APART, "preferences": _APART, **_SENTENCES},
        excludes={
            "dataloader_inter_document_masking": Because(
                "as one takes borders at end-of-document tokens, the other those of the stored "
                "documents"
            ),
            "attention_backend": _NO_PACKED,
        },
    )
    """Let no token attend to tokens before the last end of document."""
    eod_mask_loss: bool = option(
        False, idle_with={"sft": _APART, "preferences": _APART, **_SENTENCES}
    )
    """No loss at positions whose input token is an end of document."""
    create_attention_mask_in_dataloader: bool = option(
        False, idle_with={"sft": _APART, "preferences": _APART}
    )
    """Add dense [S, S] attention masks to samples, which causal attention does not need.
    Megatron's default: on."""
    dataloader_inter_document_masking: bool = option(
        False,
        idle_with={"sft": _APART, "preferences": _APART, **_SENTENCES},
        excludes={"attention_backend": _NO_PACKED},
    )
    """Add document borders (cu_seqlens) to samples, for attention within documents."""

    rules = (
        Rule(("data_path", "mock_data"), _several_sources),
        Rule(
            ("data_path", "dataloader_type", "train_iters"),
            lambda v: v.dataloader_type == "external" and bool(v.sources),
            "--dataloader-type external takes its batches from the caller: leave --data-path "
            "and the other sources out.",
        ),
        Rule(
            ("data_path", "dataloader_type", "train_iters"),
            lambda v: v.dataloader_type != "external" and not v.sources,
            "no training data: give --data-path PREFIX, or --mock-data for generated tokens.",
        ),
        Rule(
            ("create_attention_mask_in_dataloader", "train_iters"),
            lambda v: v.create_attention_mask_in_dataloader,
            "--create-attention-mask-in-dataloader makes masks that training does not use: "
            "leave it out (--reset-attention-mask uses the borders of documents).",
        ),
        Rule(
            ("split",),
            lambda v: (
                v.split
                and (v.per_split_data_args_path or v.data_mixture_path or v.has_split_paths)
            ),
            "--split divides --data-path and has no effect on separate paths for each split: "
            "leave it out.",
        ),
        Rule(
            ("multiple_validation_sets", "valid_data_path"),
            lambda v: v.multiple_validation_sets and len(v.valid_data_path) < 2,
            "--multiple-validation-sets needs two or more datasets: name them by "
            "--valid-data-path.",
        ),
        Rule(
            ("validation_set_names", "valid_data_path"),
            lambda v: (
                v.validation_set_names
                and len(set(v.validation_set_names)) != len(v.valid_data_path)
            ),
            "--validation-set-names {validation_set_names}: give one distinct name for each "
            "dataset of --valid-data-path {valid_data_path}.",
        ),
    )

    @property
    def has_split_paths(self) -> bool:
        """Whether training, validation and test data have separate options."""
        held_out = self.valid_data_path or self.test_data_path
        return bool(self.train_data_path or (held_out and not self.data_mixture_path))

    @property
    def sources(self) -> list[str]:
        """Flags of the given options that name training data."""
        values = {
            "--mock-data": self.mock_data,
            "--data-mixture-path": self.data_mixture_path,
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "--train-data-path": self.train_data_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
        }
        return [name for name, value in values.items() if value]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingConfig(Options):
    """Masking of the samples of BERT and T5."""

    mask_prob: float = option(0.15, above=0, below=1)
    """Share of the tokens that are masked, above 0 and below 1."""
    short_seq_prob: float = option(0.1, minimum=0, maximum=1)
    """Share of the samples that are shorter than a full row, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FIMConfig(Options):
    """Fill-in-the-middle: documents are cut into three parts, which are reordered."""

    fim_data: bool = option(False, idle_with=_SENTENCES)
    """Rewrite a share of the documents for fill-in-the-middle."""
    fim_rate: float = option(0.5, minimum=0, maximum=1, part_of={"fim_data": ON})
    """Share of the documents (or, with --fim-split-sample, of the samples) rewritten."""
    fim_spm_rate: float = option(0.5, minimum=0, maximum=1, part_of={"fim_data": ON})
    """Share of the rewritten documents in suffix-prefix-middle order; the others are in
    prefix-suffix-middle order."""
    fim_split_sample: str = option("", needs={"fim_data": ON})
    """Token at which a document is cut into fragments, which are rewritten separately."""
    fim_fragment_rate: float = option(0.0, minimum=0, maximum=1, needs={"fim_split_sample": ON})
    """With --fim-split-sample, share of the fragments rewritten; 0 means --fim-rate."""
    fim_no_prefix: str = option("", needs={"fim_data": ON})
    """Do not rewrite texts that start with this string."""
    fim_prefix_token: str = option("<fim_prefix>", part_of={"fim_data": ON})
    """Token before the prefix."""
    fim_middle_token: str = option("<fim_middle>", part_of={"fim_data": ON})
    """Token before the middle."""
    fim_suffix_token: str = option("<fim_suffix>", part_of={"fim_data": ON})
    """Token before the suffix."""
    fim_pad_token: str = option("<fim_pad>", part_of={"fim_data": ON})
    """Token that pads a rewritten sample."""
