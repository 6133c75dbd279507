"""The command ``mcore-ckpt``: convert, inspect and more. Help is printed without torch."""

import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mcore_base.command_line import parse
from mcore_base.entry_point import run_program
from mcore_base.options import Rule
from mcore_base.terminal import ended_by_sigterm, progress_line, size_text
from mcore_ckpt.conversion.options import ConvertOptions, MergeOptions, UpcycleOptions
from mcore_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from mcore_ckpt.conversion.conversion import ConversionReport

ABOUT = """Inspect checkpoints and convert them between formats.

examples:
  mcore-ckpt convert hf-to-mcore --input Llama-3.2-1B --output runs/llama
  mcore-ckpt convert mcore-to-hf --input runs/llama --output Llama-again
  mcore-ckpt convert hf-to-megatron --input Llama-3.2-1B --output megatron/llama
  mcore-ckpt inspect runs/llama
  mcore-ckpt verify runs/llama
  mcore-ckpt reshard runs/llama --output runs/whole
  mcore-ckpt average runs/llama/iter_0000100 runs/llama/iter_0000200 --output runs/mean
  mcore-ckpt merge math-tuned code-tuned --base Llama-3.2-1B --method ties --output merged
  mcore-ckpt upcycle runs/llama --output runs/experts --num-experts 8

pages:
  docs/checkpoints.md   convert inspect verify reshard average merge
  docs/experts.md       upcycle"""

FORMATS = ("hf", "mcore", "megatron", "dcp")
"""Formats that convert reads and writes; the two most used come first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 1 when it failed, 2 for bad input."""
    return run_program("mcore-ckpt", ABOUT, COMMANDS, argv, exit_code, _call)


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, 1 for damaged or missing files, 0 for a bug of the program."""
    if isinstance(error, ValueError):
        return 2
    return int(isinstance(error, (CheckpointError, OSError)))


def _call(function: Callable[..., int], program: str, words: list[str]) -> int:
    if ("--output", "") in pairwise(words) or "--output=" in words:
        raise ValueError(
            "--output is empty: give a folder. Is a variable of the shell not set?"
        )
    with ended_by_sigterm():
        return parse(function, program, words)


def convert(direction: str, /, *, input: Path, output: Path, conversion: ConvertOptions) -> int:
    """Convert a checkpoint between Hugging Face, ours, Megatron and PyTorch's distributed one.

    Args:
        direction: FROM-to-TO or "FROM->TO", of hf, mcore, megatron and dcp; mcore-to-peft
            writes only the adapters, all others merge adapters into their base.
        input: Folder to read: a Hugging Face folder, a run or step folder of ours or of
            Megatron's (torch_dist, or mp_rank_00), or a torch.distributed.checkpoint directory.
        output: Folder to create; for mcore a run folder, which may exist and gets a release.
        conversion: casts, cuts and checks.
    """
    source, target, was_cut = parse_direction(direction)
    if was_cut:
        target = explain_redirection(source, target)
    from mcore_ckpt.conversion.conversion import convert as run

    if target == "peft":
        from mcore_ckpt.conversion.peft_export import convert_adapters as run
    report = run(source, input, target, output, conversion, on_progress=progress_line())
    _print_report(report, was_cut=was_cut)
    return 0


def _print_report(report: "ConversionReport", *, was_cut: bool) -> None:
    out = sys.stderr if was_cut else sys.stdout  # the shell has redirected stdout to a file
    proof = "each used once, read back and equal" if report.is_proven else "not read back"
    skipped = f" Left behind, as no weights: {report.left_behind}." * bool(report.left_behind)
    notes = "" if report.has_tokenizer else " There was no tokenizer to copy."
    if report.quantization:
        notes += f" Dequantized on reading: {report.quantization}."
    if report.not_carried:
        notes += f" Not taken along: {', '.join(report.not_carried)}."
    print(
        f"{report.output}: {report.family}, {report.num_tensors} tensors, "
        f"{size_text(report.num_bytes)}; {proof}.{skipped}{notes}",
        file=out,
    )
    if report.fingerprint:
        print(f"fingerprint {report.fingerprint}", file=out)
    if report.logits_differ_by is not None:
        differ = f"logits differ by {report.logits_differ_by:.1e} of the largest"
        print(f"mcore against transformers: {differ}", file=out)


_ONE_LIST = Rule(
    ("as_json", "compare"),
    lambda v: v.as_json and v.compare,
    "--as-json lists one checkpoint: leave it out, or --compare.",
)


def inspect(
    folder: Path,
    /,
    *,
    compare: str = "",
    config: str = "",
    as_json: Annotated[bool, _ONE_LIST] = False,
) -> int:
    """Show the tensors, shapes and sizes of a checkpoint of any format.

    Args:
        folder: Run folder (its latest step) or step folder, of ours or of Megatron's; Hugging
            Face folder; torch.distributed.checkpoint directory.
        compare: Another checkpoint; list the differences of names, shapes, dtypes and bytes.
        config: config.json of the model, for a checkpoint that does not name its model: to
            compare it, or to list old files of Megatron's without arguments.
        as_json: Print JSON, a row a tensor.
    """
    from mcore_ckpt.conversion.inspection import describe, differences, rows

    if compare:
        sentences = differences(folder, compare, config, progress_line())
        print("\n".join(sentences) if sentences else "no difference")
        return 1 if sentences else 0
    text = json.dumps(rows(folder, config), indent=1) if as_json else describe(folder, config)
    print(text)
    return 0


def verify(folder: Path, /, *, fingerprint: str = "") -> int:
    """Read every byte of a checkpoint and compare checksums, or the weights' fingerprint.

    Args:
        folder: Run folder (its latest step) or step folder; with --fingerprint also a folder of
            Hugging Face, Megatron or torch.distributed.checkpoint, which have no checksums.
        fingerprint: Fingerprint that convert printed for the weights, in any format. It does
            not cover config.json and the tokenizer.
    """
    from mcore_ckpt.conversion.inspection import check, check_fingerprint, find_format

    proofs = []
    step, num_tensors, num_bytes = folder, 0, 0
    if not fingerprint or find_format(folder)[0] == "mcore":
        step, num_tensors, num_bytes = check(folder, progress_line())
        proofs.append("every checksum right")
    if fingerprint:
        step, num_tensors, num_bytes = check_fingerprint(folder, fingerprint, progress_line())
        proofs.append("weights of that fingerprint (which covers no config.json or tokenizer)")
    print(f"{step}: {num_tensors} tensors, {size_text(num_bytes)}, {', '.join(proofs)}.")
    return 0


def reshard(folder: Path, /, *, output: Path, num_files: int = 1) -> int:
    """Write a checkpoint again as whole tensors in few files.

    Any checkpoint loads under any layout without this; fewer and longer files load faster.

    Args:
        folder: Run folder (its latest step) or step folder.
        output: Run folder that gets the step; created if it does not exist.
        num_files: Files to spread the tensors over.
    """
    from mcore_ckpt.conversion.resharding import reshard as rewrite

    print(rewrite(folder, output, num_files=num_files, on_progress=progress_line()))
    return 0


def average(folders: tuple[Path, ...], /, *, output: Path) -> int:
    """Average the weights of several checkpoints of one model; merge has other methods.

    Args:
        folders: Run or step folders; a single one gives the average that its run kept
            (--ema-decay or --optimizer schedule_free of mcore-train). Or checkpoints of any
            format, the first one a Hugging Face folder.
        output: Run folder that gets the release, or Hugging Face folder to create.
    """
    from mcore_ckpt.conversion.inspection import find_format

    if folders and find_format(folders[0])[0] == "hf":
        return merge(folders, output=output, how=MergeOptions())
    from mcore_ckpt.conversion.resharding import average_checkpoints

    print(average_checkpoints(folders, output, on_progress=progress_line()))
    return 0


def merge(folders: tuple[Path, ...], /, *, output: Path, how: MergeOptions) -> int:
    """Merge checkpoints of one model: a mean, an arc, or the sum of what tunings changed.

    Args:
        folders: Checkpoints of any format.
        output: Hugging Face folder to create if the base (without a base: the first checkpoint)
            is a Hugging Face folder; otherwise the run folder that gets the release.
        how: method and factors.
    """
    from mcore_ckpt.conversion.merging import merge as run

    print(run(folders, output, how, on_progress=progress_line()))
    return 0


def upcycle(folder: Path, /, *, output: Path, experts: UpcycleOptions) -> int:
    """Turn a dense model into a mixture of experts, for further training.

    Args:
        folder: Dense model: run folder (its latest step), step folder, or a folder of Hugging
            Face or Megatron.
        output: Run folder that gets the release.
        experts: number, routing and layers of the experts.
    """
    from mcore_ckpt.conversion.upcycling import upcycle as make

    print(make(folder, output, experts, on_progress=progress_line()))
    return 0


def parse_direction(word: str) -> tuple[str, str, bool]:
    """Parse the direction of a conversion, complete or cut off at ``>`` by a shell.

    Returns:
        Source, target (empty if the shell cut it off), and whether the shell did.

    Raises:
        ValueError: if the word is not a direction.
    """
    for source in FORMATS:
        if word == f"{source}-":
            return source, "", True
        for target in (*FORMATS, "peft"):
            if word in (f"{source}->{target}", f"{source}-to-{target}", f"{source}2{target}"):
                return source, target, False
    raise ValueError(
        f"direction {word!r} is not known: use FROM-to-TO, such as hf-to-mcore, of "
        f"{', '.join(FORMATS)}."
    )


def explain_redirection(source: str, target: str = "") -> str:
    """Print what an unquoted ``>`` did, and remove the empty file that the shell created.

    The file is removed only if it is empty and the standard output of this process, which
    prints nothing to it.

    Args:
        source: format before the arrow.
        target: format after the arrow; empty: the format that is now the name of a file.

    Returns:
        The format after the arrow.
    """
    target = target or _eaten_target(source)
    print(
        f"mcore-ckpt: the shell read '>{target}' in '{source}->{target}' as a redirection of "
        f"the output to a file '{target}'; {source} is converted to {target} nevertheless. "
        f"Write {source}-to-{target}, or quote the arrow.",
        file=sys.stderr,
    )
    path = Path(target)
    if _is_standard_output(path) and path.stat().st_size == 0:
        path.unlink()
    return target


def _eaten_target(source: str) -> str:
    """Return the format whose name the shell gave to a file, standard output or any other."""
    others = [name for name in FORMATS if name != source]
    likely = ["mcore" if source == "hf" else "hf"]
    for is_file_of_shell in (_is_standard_output, Path.is_file):
        likely = [name for name in others if is_file_of_shell(Path(name))] or likely
        if len(likely) == 1 and is_file_of_shell(Path(likely[0])):
            break
    return likely[0]


def _is_standard_output(path: Path) -> bool:
    try:
        file, standard = path.lstat(), os.fstat(1)
    except OSError:
        return False
    is_same = (file.st_dev, file.st_ino) == (standard.st_dev, standard.st_ino)
    return is_same and stat.S_ISREG(file.st_mode)


COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "convert": ("between Hugging Face, ours, Megatron and PyTorch's format", convert),
    "inspect": ("tensors, shapes and sizes; or how two checkpoints differ", inspect),
    "verify": ("read every byte and compare checksums", verify),
    "reshard": ("write the boxes of many ranks again as whole tensors", reshard),
    "average": ("the mean of several checkpoints' weights", average),
    "merge": ("means, arcs, task arithmetic and TIES of several checkpoints", merge),
    "upcycle": ("a mixture of experts of a dense model", upcycle),
}
