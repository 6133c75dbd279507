"""The command ``mcore-data``: tokenizes corpora, and inspects, merges and explains datasets."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from mcore_base.command_line import file_text, parse
from mcore_base.entry_point import run_program
from mcore_base.options import Rule, rules
from mcore_base.terminal import parse_size
from mcore_data.config import DataConfig, LaunchConfig, PreprocessConfig, TokenizerConfig

# Options of Megatron that are accepted and ignored: the order of documents is always kept.
_IGNORED = ("--keep-sequential-samples",)

ABOUT = """Corpora to tokens on disk, tokens on disk to training samples.

examples:
  mcore-data train-tokenizer --input book.jsonl --output tokenizer --vocab-size 4096
  mcore-data preprocess --input book.jsonl --output-prefix book \\
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --append-eod
  mcore-data inspect book_text_document --tokenizer tokenizer
  mcore-data verify book_text_document
  mcore-data plan --input 'part-*.jsonl' --output-prefix big --tokenizer-model tokenizer
  mcore-data launch --plan big.plan.json --num-tasks 4
  mcore-data status --plan big.plan.json
  mcore-data merge --plan big.plan.json
  mcore-data merge --input a_text_document b_text_document --output-prefix both
  mcore-data prepare-chats --input chats.jsonl --output-prefix chats --tokenizer-model qwen
  mcore-data prepare-preferences --input pairs.jsonl --output-prefix pairs \\
      --tokenizer-model qwen
  mcore-data index --data-path book_text_document --data-cache-path cache --seq-length 128 \\
      --num-samples 1000 10 10
  mcore-data explain --run runs/quickstart/checkpoint --step 3

pages:
  docs/data.md            train-tokenizer preprocess inspect verify prepare-chats index explain
  docs/objectives.md      prepare-preferences
  docs/data-at-scale.md   plan launch status merge"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 1 when it failed, 2 for bad input."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("mcore_data").setLevel(logging.INFO)  # other packages: warnings only
    return run_program("mcore-data", ABOUT, COMMANDS, argv, exit_code, _call)


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, 1 for failures of files, 0 for a fault of the program."""
    if isinstance(error, (ValueError, FileNotFoundError, ImportError)):
        return 2
    return int(isinstance(error, (RuntimeError, OSError)))


def _call(function: Callable[..., int], program: str, words: list[str]) -> int:
    return parse(function, program, [word for word in words if word not in _IGNORED])


_NEEDS_CACHE = Rule(
    ("data_cache_path",),
    lambda v: not v.data_cache_path,
    "give --data-cache-path, the folder for the indices.",
)
_PAIRS_OR_PLAN = Rule(
    ("input", "output_prefix", "allow_missing", "plan", "physical"),
    lambda v: (
        (v.physical and not v.plan)
        or bool(v.plan) == bool(v.input and v.output_prefix)
        or (v.plan and (v.input or v.output_prefix or v.allow_missing))
    ),
    "give --input and --output-prefix, or only --plan (with --physical or --overwrite).",
)
_ONE_QUESTION = Rule(
    ("step", "document"),
    lambda v: (v.step > 0) == (v.document >= 0),
    "give --step (and --sample), or --prefix and --document.",
)


def preprocess(
    job: PreprocessConfig,
    tokenizer: TokenizerConfig,
    log_interval: Annotated[int, rules(minimum=0)] = 0,
) -> int:
    """Tokenize a corpus into one .bin/.idx pair and manifest for each key.

    Args:
        job: inputs, outputs and options of preprocessing.
        tokenizer: type and files of the tokenizer.
        log_interval: documents between two lines of progress; 0 prints a line every ten
            seconds, or draws a bar on a terminal. Megatron's default is 1000.
    """
    from mcore_data.preprocessing.preprocessing import preprocess as run

    if job.plan:
        return _preprocess_plan(job, tokenizer, log_interval)
    with _progress("preprocessing", log_interval) as advance:
        report = run(job, tokenizer, advance)
    if report.num_bad_records:  # the first ones have been logged
        print(f"bad records skipped in all: {report.num_bad_records}", file=sys.stderr)
    if not report.num_documents:
        print("warning: the inputs hold no record, so the outputs are empty", file=sys.stderr)
    for key, prefix in report.prefixes.items():
        print(
            f"{prefix}.bin/.idx: {report.num_documents:,} documents, "
            f"{report.num_tokens.get(key, 0):,} tokens"
        )
    checked = f"{report.num_checked_texts:,} of {report.num_texts:,} texts"
    if report.engine == "reference":
        print("encoded by the tokenizer itself")
    elif report.num_checked_texts:
        print(f"encoded by {report.engine}; {checked} by the tokenizer too, with the same ids")
    else:
        print(f"encoded by {report.engine}; no text was compared with the tokenizer's ids")
    return 0


def _preprocess_plan(
    job: PreprocessConfig, tokenizer: TokenizerConfig, log_interval: int
) -> int:
    """Work on a plan; return 1 if units failed."""
    from dataclasses import fields

    from mcore_data.preprocessing.plan_worker import work_on_plan
    from mcore_data.preprocessing.work_plan import changed_options, read_plan

    worker_options = ("plan", "workers", "on_bad_record", "scratch_path", "claim_timeout_s")
    names = [each.name for each in fields(job) if each.name not in worker_options]
    flags = changed_options(job, names)
    flags += changed_options(tokenizer, [each.name for each in fields(tokenizer)])
    if flags:
        raise ValueError(
            f"{' and '.join(flags)} with --plan: these options are part of the plan. Leave "
            "them out, or make a new plan with them."
        )
    plan = read_plan(job.plan)
    with _progress("unit", log_interval) as advance:
        report = work_on_plan(
            plan,
            workers=job.workers,
            on_bad_record=job.on_bad_record,
            scratch_path=job.scratch_path,
            claim_timeout_s=job.claim_timeout_s,
            on_progress=advance,
        )
    if report.num_bad_records:
        print(f"bad records skipped in all: {report.num_bad_records}", file=sys.stderr)
    print(
        f"{job.plan}: this worker wrote {report.num_units} of {len(plan.units)} units, "
        f"{report.num_documents:,} documents, {report.num_tokens:,} tokens"
    )
    for number, error in report.failures.items():
        print(f"unit {number} failed: {error}", file=sys.stderr)
    return int(bool(report.failures))


def plan(job: PreprocessConfig, tokenizer: TokenizerConfig, unit_size: str = "1GiB") -> int:
    """List the inputs once and divide them into units, for any number of workers.

    Writes <output-prefix>.plan.json, from which preprocess --plan, status and merge work.

    Args:
        job: inputs, outputs and options of preprocessing.
        tokenizer: type and files of the tokenizer.
        unit_size: bytes of a unit, such as 500MB or 1GiB. Plain JSON and text lines on a disk
            are cut between lines, .zst between frames, .gz between members, Parquet between
            row groups; a larger file of another kind, or at a URL, is one unit.
    """
    from mcore_data.preprocessing.work_plan import make_plan

    made = make_plan(job, tokenizer, parse_size(unit_size, "--unit-size"))
    num_bytes = sum(unit.num_bytes for unit in made.units)
    print(f"{made.address}: {len(made.units)} units, {num_bytes:,} bytes")
    return 0


def launch(plan: str, launch: LaunchConfig, scratch_path: str = "") -> int:
    """Start workers of a plan on this machine, as Slurm array jobs or as Ray tasks.

    Args:
        plan: <output-prefix>.plan.json of mcore-data plan.
        launch: where and how the workers run.
        scratch_path: local folder for files that are being written, for a plan in an object
            store.
    """
    from mcore_data.preprocessing.executors import run_local, run_ray, run_slurm
    from mcore_data.preprocessing.work_plan import describe_status, read_plan, status_of

    made = read_plan(plan)
    if launch.executor == "slurm":
        lines = run_slurm(made, launch, scratch_path)
        print("\n".join(f"job {line}" if launch.submit_jobs else line for line in lines))
        if not launch.wait:
            return 0
    elif launch.executor == "ray":
        run_ray(made, launch, scratch_path)
    else:
        run_local(made, launch, scratch_path)
    status = status_of(made)
    print("\n".join(describe_status(made, status)))
    return int(len(status.done) < status.num_units)


def status(plan: str) -> int:
    """Show how many units of a plan are done, running, failed and waiting, and the rate.

    Args:
        plan: <output-prefix>.plan.json of mcore-data plan.
    """
    from mcore_data.preprocessing.work_plan import describe_status, read_plan, status_of

    made = read_plan(plan)
    print("\n".join(describe_status(made, status_of(made))))
    return 0


def merge(
    input: tuple[str, ...] = (),
    output_prefix: str = "",
    overwrite: bool = False,
    allow_missing: bool = False,
    plan: Annotated[str, _PAIRS_OR_PLAN] = "",
    physical: bool = False,
    scratch_path: str = "",
    workers: Annotated[int, rules(minimum=1)] = 1,
) -> int:
    """Join .bin/.idx pairs into one, or the units of a plan into one dataset.

    Manifests are compared: pairs with different tokenizers, keys or settings are refused, and
    parts of --partitions must be complete, each given once.

    Args:
        input: prefixes of pairs, or folders, of which all pairs are joined, sub-folders
            included; in the order given and by name in a folder, but parts by number.
        output_prefix: the pair to write, without .bin or .idx.
        overwrite: replace a finished pair that was made from other files, once the new pair is
            complete. Repeating the same command needs no --overwrite.
        allow_missing: join parts of --partitions although some of them are missing.
        plan: join all units of this plan instead, at the plan's output prefix, as a logical
            dataset: an index and a manifest, whose tokens stay in the units' files.
        physical: with --plan, write one .bin/.idx pair.
        scratch_path: local folder for small files, if the plan is in an object store.
        workers: threads that copy tokens.
    """
    from mcore_data.indexed.inspection import find_pairs
    from mcore_data.indexed.merging import merge_pairs
    from mcore_data.preprocessing.work_plan import merge_plan, read_plan

    if plan:
        datasets = merge_plan(
            read_plan(plan),
            physical=physical,
            overwrite=overwrite,
            scratch_path=scratch_path,
            workers=workers,
        )
        for merged in datasets.values():
            kind = ".bin/.idx" if physical else ": logical dataset"
            print(
                f"{merged.prefix}{kind}: {merged.num_documents:,} documents, "
                f"{merged.num_tokens:,} tokens"
            )
        return 0
    prefixes = [prefix for word in input for prefix in find_pairs(word, output_prefix)]
    merged = merge_pairs(
        prefixes,
        output_prefix,
        overwrite=overwrite,
        allow_missing=allow_missing,
        workers=workers,
    )
    print(
        f"{output_prefix}.bin/.idx: {len(prefixes)} pairs, {merged.num_documents:,} documents, "
        f"{merged.num_tokens:,} tokens"
    )
    return 0


def inspect(
    prefix: str,
    /,
    tokenizer: str = "",
    samples: Annotated[int, rules(minimum=0)] = 2,
    object_storage_cache_path: str = "",
) -> int:
    """Print counts, sequence lengths and some sequences of a .bin/.idx pair.

    Args:
        prefix: the pair, without .bin or .idx.
        tokenizer: folder or file of the tokenizer, to print sequences as text.
        samples: sequences to print.
        object_storage_cache_path: local folder for the index of a pair in an object store.
    """
    from dataclasses import asdict

    from mcore_data.indexed.inspection import length_histogram, quick_check, summarize
    from mcore_data.indexed.reader import IndexedDataset
    from mcore_data.tokenizers.building import load_tokenizer

    coder = load_tokenizer(tokenizer) if tokenizer else None
    dataset = IndexedDataset(prefix, cache_path=object_storage_cache_path)
    for name, value in asdict(summarize(dataset)).items():
        print(f"{name.replace('_', ' '):>14}: {value}")
    print(f"{'checks':>14}: {quick_check(prefix, cache_path=object_storage_cache_path)}")
    print("\nsequences by length in tokens")
    print("\n".join(length_histogram(dataset)))
    for number in range(min(samples, len(dataset))):
        tokens = dataset[number][:64].tolist()
        shown = coder.decode(tokens) if coder else str(tokens)
        print(f"\nsequence {number}: {shown}")
    return 0


def verify(prefix: str, /) -> int:
    """Check a .bin/.idx pair: header, pointers, sizes, tokens, and the manifest's checksums.

    Args:
        prefix: the pair, without .bin or .idx.
    """
    from mcore_data.indexed.inspection import verify_pair

    print(f"{prefix}: no damage found. {verify_pair(prefix)}")
    return 0


def index(
    data: Annotated[DataConfig, _NEEDS_CACHE],
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int = 1234,
) -> int:
    """Build the sample indices of a run in advance, on any machine.

    Args:
        data: the run's data flags, with --data-cache-path.
        seq_length: --seq-length of the run.
        num_samples: samples of train, valid and test that the run uses: its steps (or
            --eval-iters) times its global batch size. 0 means one epoch of train, and none of
            valid and test, unless --full-validation is given.
        seed: --seed of the run.
    """
    from mcore_data.datasets.from_flags import build_indices

    sizes = build_indices(data, sequence_length=seq_length, seed=seed, num_samples=num_samples)
    for name, size in sizes.items():
        print(f"{name}: {size:,} samples" if size else f"{name}: none")
    return 0


def prepare_chats(
    input: Path,
    output_prefix: str,
    tokenizer: TokenizerConfig,
    chat_template: str = "",
    json_key: str = "messages",
    on_bad_record: Literal["refuse", "skip"] = "refuse",
) -> int:
    """Tokenize chats for mcore-train --sft, and mark the assistant's tokens.

    Args:
        input: JSONL file; each line has a list of messages with role and content, and the tools
            of its chat, if any.
        output_prefix: prefix of the two outputs, <output-prefix>_tokens and
            <output-prefix>_learnt.
        tokenizer: type and files of the tokenizer.
        chat_template: file with a Jinja template; default: the tokenizer's template, or ChatML.
        json_key: key of a line's list of messages.
        on_bad_record: refuse a file with lines that cannot be used, or skip these lines;
            the first ten are named.
    """
    from mcore_data.datasets.chat import prepare_chats as prepare
    from mcore_data.tokenizers.building import build_tokenizer

    template = file_text("--chat-template", chat_template)
    report = prepare(
        input,
        output_prefix,
        build_tokenizer(tokenizer),
        template,
        json_key=json_key,
        on_bad_record=on_bad_record,
    )
    print(
        f"{output_prefix}: {report.num_chats:,} chats, {report.num_tokens:,} tokens, "
        f"{report.num_learnt:,} of them to be learnt"
    )
    return 0


def prepare_preferences(
    input: Path,
    output_prefix: str,
    tokenizer: TokenizerConfig,
    chat_template: str = "",
    on_bad_record: Literal["refuse", "skip"] = "refuse",
) -> int:
    """Tokenize pairs of a chosen and a rejected answer for mcore-train --objective dpo.

    Args:
        input: JSONL file; each line has prompt, chosen and rejected, as texts or as lists of
            messages, or chosen and rejected alone, as whole chats.
        output_prefix: prefix of the two outputs, <output-prefix>_tokens and
            <output-prefix>_learnt.
        tokenizer: type and files of the tokenizer.
        chat_template: file with a Jinja template; default: the tokenizer's template, or ChatML.
        on_bad_record: refuse a file with lines that cannot be used, or skip these lines;
            the first ten are named.
    """
    from mcore_data.datasets.preferences import prepare_preferences as prepare
    from mcore_data.tokenizers.building import build_tokenizer

    template = file_text("--chat-template", chat_template)
    built = build_tokenizer(tokenizer)
    report = prepare(input, output_prefix, built, template, on_bad_record=on_bad_record)
    print(
        f"{output_prefix}: {report.num_pairs:,} pairs, {report.num_tokens:,} tokens, "
        f"{report.num_answer_tokens:,} of them in answers"
    )
    return 0


def explain(
    run: Path,
    step: Annotated[int, _ONE_QUESTION] = 0,
    sample: int = 0,
    prefix: str = "",
    document: int = -1,
) -> int:
    """Show which text a sample of a step was made from, or which steps read a document.

    Args:
        run: run folder or step folder of mcore-train.
        step: step to explain, counted from 1.
        sample: index of the sample in the step's global batch.
        prefix: pair that holds the document; optional if the run reads a single pair.
        document: number of the document in the pair.
    """
    from mcore_data.tracing.explaining import RunData, draw_explanation, draw_origin

    data = RunData(run)
    if step > 0:
        print("\n".join(draw_explanation(data, step, sample)))
        return 0
    visits = list(data.visits(prefix, document))
    print(draw_origin(data.origin(prefix, document), prefix or "the pair"))
    for visit in visits:
        source = visit.source
        print(
            f"step {visit.step}, sample {visit.sample}: tokens {source.offset}-"
            f"{source.offset + source.length} of sequence {source.sequence}"
        )
    if not visits:
        print(f"no step up to {data.plan.iteration} has read it")
    return 0


def train_tokenizer(
    input: tuple[Path, ...],
    output: Path,
    vocab_size: int,
    json_keys: tuple[str, ...] = ("text",),
) -> int:
    """Train a byte-level BPE tokenizer on JSONL files.

    Args:
        input: files, folders and patterns as in preprocess, such as a folder of .txt files.
        output: folder for tokenizer.json and tokenizer_config.json.
        vocab_size: largest number of ids, including the 256 bytes and the end of document.
        json_keys: keys of a record whose texts are used.
    """
    from mcore_data.preprocessing.tokenizer_training import train_tokenizer as train

    tokenizer = train(
        input,
        output,
        vocab_size=vocab_size,
        json_keys=json_keys,
        show_progress=sys.stderr.isatty(),
    )
    print(json.dumps({"output": str(output), "vocab_size": tokenizer.vocab_size}))
    return 0


def _progress(title: str, log_interval: int) -> Any:
    """Return a progress bar for a terminal without --log-interval, else progress lines."""
    from mcore_data.preprocessing.progress import Bar, Lines

    if sys.stderr.isatty() and not log_interval:
        return Bar(title)
    return Lines(title, log_interval)


COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "preprocess": ("a corpus to .bin/.idx pairs", preprocess),
    "train-tokenizer": ("train byte-level BPE on a corpus", train_tokenizer),
    "plan": ("divide a corpus into units for many workers", plan),
    "launch": ("start workers of a plan: local, Slurm or Ray", launch),
    "status": ("show which units of a plan are done", status),
    "merge": ("join pairs, or the units of a plan, into one", merge),
    "inspect": ("show what a pair holds", inspect),
    "verify": ("check every pointer and token of a pair", verify),
    "prepare-chats": ("tokenize chats for fine-tuning", prepare_chats),
    "prepare-preferences": ("tokenize pairs of answers for DPO", prepare_preferences),
    "explain": ("show which text made a sample, or where a document went", explain),
    "index": ("build the sample indices of a run beforehand", index),
}
