"""The command ``mcore-ckpt``: convert, inspect and more. Help answers without torch."""

import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro

USAGE = """usage: mcore-ckpt COMMAND ...

Look at checkpoints and turn them into other formats.

commands:
{commands}

examples:
  mcore-ckpt convert hf-to-mcore --input Llama-3.2-1B --output runs/llama
  mcore-ckpt convert mcore-to-hf --input runs/llama --output Llama-again
  mcore-ckpt inspect runs/llama
  mcore-ckpt verify runs/llama
  mcore-ckpt average runs/llama/iter_0000100 runs/llama/iter_0000200 --output runs/mean

mcore-ckpt COMMAND --help tells a command's options."""

DIRECTIONS = {"hf->mcore": ("hf", "mcore"), "mcore->hf": ("mcore", "hf")}
"""What convert can do, and the words for its two sides."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 1 when it failed, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {summary}" for name, (summary, _) in COMMANDS.items()]
        print(USAGE.format(commands="\n".join(lines)))
        return 0
    name, *rest = words
    if name not in COMMANDS:
        return _refuse(f"command {name} is not known: use {', '.join(COMMANDS)}.", 2)
    command = COMMANDS[name][1]
    try:
        return tyro.cli(command, args=rest, prog=f"mcore-ckpt {name}")
    except ValueError as error:
        return _refuse(str(error), 2)
    except (RuntimeError, OSError) as error:
        return _refuse(str(error), 1)


def convert(
    direction: tyro.conf.Positional[str],
    *,
    input: Path,
    output: Path,
    dtype: str = "",
    max_shard_size: str = "5GB",
    model_type: str = "",
    check: bool = True,
) -> int:
    """Convert a checkpoint between Hugging Face's format and ours.

    Args:
        direction: hf-to-mcore or mcore-to-hf; also "hf->mcore" and "mcore->hf".
        input: Folder to read: a Hugging Face folder, or a run or step folder of ours.
        output: Folder to make: a run folder with a release, or a Hugging Face folder.
        dtype: Cast weights to bf16, fp16 or fp32; empty: as they are.
        max_shard_size: Largest weight file of a Hugging Face folder, such as 500MB or 5GB.
        model_type: Hugging Face family to write; empty: where the weights came from, or the
            first that fits.
        check: Read the result back and compare it with the source, bit by bit.
    """
    source, target, was_cut = parse_direction(direction)
    out = sys.stdout
    if was_cut:
        out = sys.stderr
        explain_redirection(source, target)
    from mcore_ckpt.conversion import hf_to_mcore, mcore_to_hf

    options: dict[str, Any] = {"dtype": dtype, "check": check, "on_progress": _progress()}
    if source == "hf":
        report = hf_to_mcore(input, output, **options)
    else:
        options |= {"max_shard_bytes": parse_size(max_shard_size), "model_type": model_type}
        report = mcore_to_hf(input, output, **options)
    proof = "each used once, read back and equal" if report.is_proven else "not read back"
    print(
        f"{report.output}: {report.family}, {report.num_tensors} tensors, "
        f"{report.num_bytes / 1e9:.3f} GB; {proof}.",
        file=out,
    )
    return 0


def inspect(
    folder: tyro.conf.Positional[Path],
    *,
    compare: Annotated[str, tyro.conf.arg(metavar="DIR")] = "",
    as_json: bool = False,
) -> int:
    """Show what a checkpoint holds.

    Args:
        folder: Run folder (its latest step) or step folder.
        compare: Another checkpoint; show where names, shapes, dtypes or bytes differ.
        as_json: Print JSON, a row a tensor.
    """
    from mcore_ckpt.inspection import describe, differences, rows

    if compare:
        found = differences(folder, compare)
        print("\n".join(found) if found else "no difference")
        return 1 if found else 0
    print(json.dumps(rows(folder), indent=1) if as_json else describe(folder))
    return 0


def verify(folder: tyro.conf.Positional[Path]) -> int:
    """Read every byte of a checkpoint and compare checksums.

    Args:
        folder: Run folder (its latest step) or step folder.
    """
    from mcore_ckpt.inspection import check

    step, num_tensors, num_bytes = check(folder)
    print(f"{step}: {num_tensors} tensors, {num_bytes / 1e9:.3f} GB, every checksum right.")
    return 0


def reshard(
    folder: tyro.conf.Positional[Path],
    *,
    output: Path,
    num_files: int = 1,
) -> int:
    """Write a checkpoint again as whole tensors in few files.

    Any checkpoint loads under any layout without this; it makes later reads longer and fewer.

    Args:
        folder: Run folder (its latest step) or step folder.
        output: Run folder to make, or to add the step to.
        num_files: Files to spread the tensors over.
    """
    from mcore_ckpt.rewriting import reshard as rewrite

    print(rewrite(folder, output, num_files=num_files))
    return 0


def average(folders: tyro.conf.Positional[tuple[Path, ...]], *, output: Path) -> int:
    """Average the weights of several checkpoints of one model.

    Args:
        folders: Two or more run or step folders.
        output: Run folder that gets the release.
    """
    from mcore_ckpt.rewriting import average as mean

    print(mean(folders, output))
    return 0


def parse_direction(word: str) -> tuple[str, str, bool]:
    """Understand a direction, also one that a shell has cut.

    Returns:
        Source, target, and whether only ``hf-`` or ``mcore-`` was left of it.

    Raises:
        ValueError: if it is none.
    """
    for name, (source, target) in DIRECTIONS.items():
        if word in (name, name.replace("->", "-to-"), name.replace("->", "2")):
            return source, target, False
        if word == f"{source}-":
            return source, target, True
    spellings = [name.replace("->", "-to-") for name in DIRECTIONS]
    raise ValueError(f"direction {word!r} is not known: use {' or '.join(spellings)}.")


def explain_redirection(source: str, target: str) -> None:
    """Say what an unquoted ``>`` did, and remove the empty file that it made.

    The file is removed only if it is this process's standard output and empty; nothing is
    ever printed to it.
    """
    print(
        f"mcore-ckpt: the shell took '>{target}' of '{source}->{target}' for a redirection of "
        f"the output to a file '{target}'; converting {source} to {target} all the same. "
        f"Write {source}-to-{target}, or quote it.",
        file=sys.stderr,
    )
    path = Path(target)
    try:
        file, standard = path.lstat(), os.fstat(1)
    except OSError:
        return
    is_ours = (file.st_dev, file.st_ino) == (standard.st_dev, standard.st_ino)
    if is_ours and stat.S_ISREG(file.st_mode) and file.st_size == 0:
        path.unlink()


def parse_size(text: str) -> int:
    """Read a size such as ``500MB`` or ``5GB`` in bytes; units are powers of 1000.

    Raises:
        ValueError: if it is none, or is not positive.
    """
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    digits = text.rstrip("KMGTBkmgtb")
    unit = text[len(digits) :].upper()
    try:
        size = int(float(digits) * units[unit])
    except (ValueError, KeyError):
        size = 0
    if size <= 0:
        raise ValueError(f"--max-shard-size {text} is no size: use a number with MB or GB.")
    return size


def _progress(stream: TextIO | None = None) -> Callable[[int, int, str], None] | None:
    """Draw a line of progress, on a terminal only."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return None
    shown = -1

    def show(done: int, total: int, name: str) -> None:
        nonlocal shown
        percent = 100 * done // max(1, total)
        if percent != shown:
            shown = percent
            end = "\n" if done == total else ""
            stream.write(f"\r{percent:3d} % of {total / 1e9:.2f} GB  {name:60.60}{end}")
            stream.flush()

    return show


def _refuse(message: str, code: int) -> int:
    print(f"mcore-ckpt: error: {message}", file=sys.stderr)
    return code


COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "convert": ("between Hugging Face folders and ours", convert),
    "inspect": ("tensors, shapes and sizes; or how two checkpoints differ", inspect),
    "verify": ("read every byte and compare checksums", verify),
    "reshard": ("write the boxes of many ranks again as whole tensors", reshard),
    "average": ("the mean of several checkpoints' weights", average),
}
