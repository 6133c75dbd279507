"""Where a command writes: refused before it starts, and gone again if it fails."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt.paths import is_complete, make_fresh, remove, step_folder, sync_folder


def check_place(source: Path, output: Path) -> None:
    """Refuse an output within the input, and one that can be no folder.

    Raises:
        ValueError: with both paths.
    """
    here, there = source.resolve(), output.resolve()
    if here.is_dir() and (here == there or here in there.parents):
        raise ValueError(
            f"--output {output} lies in --input {source}: give a folder elsewhere, so that the "
            "input stays as it is."
        )
    above = next(folder for folder in (there, *there.parents) if folder.exists())
    if not above.is_dir():
        raise ValueError(f"--output {output} cannot be made: {above} is a file.")
    if not os.access(above, os.W_OK):
        raise ValueError(f"--output {output} cannot be made: {above} may not be written to.")


@contextmanager
def fresh_step(run_folder: str | Path, step: int | str) -> Iterator[Path]:
    """Give a fresh folder for a step, which the caller commits; it goes away with an error.

    For commands: a save leaves what a kill would leave, and the next one cleans up.

    Raises:
        CheckpointError: if the step is there already.
    """
    target = make_fresh(step_folder(run_folder, step))
    try:
        yield target
    except BaseException:
        if not is_complete(target):
            remove(target)
        raise


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes ``output`` if all goes well, else goes away.

    Raises:
        ValueError: if the output is in the way.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not empty: give a new folder.")
    unfinished = output.with_name(f".{output.name}.partial.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
        sync_folder(output.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
