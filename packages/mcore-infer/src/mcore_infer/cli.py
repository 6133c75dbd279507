"""The command ``mcore-infer``. Help answers without loading torch."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mcore_infer.config import SamplingConfig
from mcore_parallel.command_line import parse
from mcore_parallel.entry_point import run_program

if TYPE_CHECKING:
    from mcore_data.tokenizers.protocol import Tokenizer
    from mcore_infer.loading import LoadedModel
    from mcore_models.protocol import LanguageModel

ABOUT = """Write and judge text with a trained model.

examples:
  mcore-infer generate --load runs/tiny --prompt "In the beginning"
  mcore-infer generate --load runs/tiny --prompt "Once" --num-tokens 50 --top-k 40 --seed 7
  mcore-infer evaluate --load runs/tiny --input chapter.txt"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model, and where it runs."""

    load: str
    """Run folder, or a step folder of it."""

    ckpt_step: int = 0
    """Step of a run folder; 0: the latest."""

    tokenizer: str = ""
    """Folder or file of the tokenizer; empty: the one in the checkpoint."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: cuda where it is present."""

    tensor_model_parallel_size: int = 0
    """Ranks that split each matrix; 0: all that were started."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 1 when it failed, 2 for bad input."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_program("mcore-infer", ABOUT, COMMANDS, argv, exit_code, parse)


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, 1 for failed files or devices, 0 for an error in the program."""
    if isinstance(error, (ValueError, FileNotFoundError)):
        return 2
    return int(
        isinstance(error, OSError) or (isinstance(error, RuntimeError) and _is_outside(error))
    )


def _is_outside(error: RuntimeError) -> bool:
    """Whether files or the device's memory failed, not the program."""
    from torch import OutOfMemoryError

    from mcore_ckpt.errors import CheckpointError

    return isinstance(error, (CheckpointError, OutOfMemoryError))


def generate(
    model: ModelOptions,
    sampling: SamplingConfig,
    prompt: tuple[str, ...] = ("",),
    seed: int = 1234,
) -> int:
    """Write on after a prompt; the text streams to standard output.

    Args:
        model: which one.
        sampling: how tokens are drawn.
        prompt: Beginning of the text; several prompts are written on together. An empty one
            begins a document.
        seed: Of the draws; prompt i draws from seed + i.
    """
    with _opened(model) as (loaded, tokenizer, is_first):
        if len(prompt) == 1:
            _write_one(prompt[0], sampling, seed, loaded.model, tokenizer, is_first)
            return 0
        from mcore_infer.generation import generate_text

        texts = generate_text(loaded.model, tokenizer, prompt, sampling, seed)
        if is_first:
            for beginning, text in zip(prompt, texts, strict=True):
                print(f"{beginning}{text}\n")
    return 0


def evaluate(
    model: ModelOptions,
    input: tuple[Path, ...],
    seq_length: int = 0,
    overlapping_eval: int = 0,
    micro_batch_size: int = 8,
) -> int:
    """Print how well a model predicts text files, one document each.

    Args:
        model: which one.
        input: Text files in UTF-8.
        seq_length: Tokens of context; 0: the model's positions, or 1024.
        overlapping_eval: New tokens of each window; 0: half the context.
        micro_batch_size: Windows in one forward pass.
    """
    texts = [_read_text(file) for file in input]
    with _opened(model) as (loaded, tokenizer, is_first):
        from mcore_infer.evaluation import score_texts

        limit = loaded.description.config.max_position_embeddings
        score = score_texts(
            loaded.model,
            tokenizer,
            texts,
            context_tokens=seq_length or limit or 1024,
            stride=overlapping_eval,
            batch=micro_batch_size,
        )
        if is_first:
            print(
                f"loss {score.loss:.4f} per token | perplexity {score.perplexity:.2f} | "
                f"bits per byte {score.bits_per_byte:.4f} | {score.num_tokens} tokens | "
                f"{score.num_bytes} bytes"
            )
    return 0


def _read_text(file: Path) -> str:
    if file.is_dir():
        raise ValueError(f"--input {file} is a folder: give text files.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--input {file} is no text in UTF-8 ({error.reason}).") from None


def _write_one(
    prompt: str,
    sampling: SamplingConfig,
    seed: int,
    model: "LanguageModel",
    tokenizer: "Tokenizer",
    is_first: bool,
) -> None:
    """Continue one prompt, printing text as soon as it ends in whole characters."""
    from mcore_infer.generation import prompt_ids, stop_ids, stream
    from mcore_infer.streaming import TextStream

    text = TextStream(tokenizer)
    tokens = stream(
        model,
        [prompt_ids(tokenizer, prompt)],
        sampling,
        seed=seed,
        eod=None if sampling.ignore_eod else tokenizer.eod,
        stop=stop_ids(tokenizer, sampling),
    )
    pieces = (text.add(token.id) for token in tokens)
    if not is_first:
        for _ in pieces:
            pass
        return
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(text.rest())


@contextmanager
def _opened(options: ModelOptions) -> Iterator[tuple["LoadedModel", "Tokenizer", bool]]:
    """Join the world and load the model; also yield whether this rank prints."""
    from mcore_ckpt.storage.paths import resolve_folder
    from mcore_data.tokenizers.building import load_tokenizer
    from mcore_infer.loading import load_model
    from mcore_parallel.config import ParallelConfig
    from mcore_parallel.launch.launcher import initialize, read_environment, shut_down
    from mcore_parallel.mesh import ParallelContext

    folder = resolve_folder(options.load, options.ckpt_step)  # before any rank waits
    environment = read_environment()
    tp = options.tensor_model_parallel_size or environment.world_size
    try:
        device = initialize(options.device)
        ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=tp), device)
        loaded = load_model(folder, ctx)
        tokenizer = loaded.tokenizer
        if options.tokenizer:
            tokenizer = load_tokenizer(options.tokenizer)
        if tokenizer is None:
            raise ValueError(f"{folder} holds no tokenizer: give its folder with --tokenizer.")
        yield loaded, tokenizer, environment.rank == 0
    finally:
        shut_down()


COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "generate": ("write on after a prompt", generate),
    "evaluate": ("loss, perplexity and bits per byte of a text file", evaluate),
}
