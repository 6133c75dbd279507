"""The command ``mcore-infer``. Help answers without loading torch."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_infer.config import SamplingConfig

if TYPE_CHECKING:
    from mcore_data.tokenizers.building import Tokenizer
    from mcore_infer.loading import LoadedModel
    from mcore_models.gpt import GPT

USAGE = """usage: mcore-infer COMMAND ...

Write and judge text with a trained model.

commands:
  generate  write on after a prompt
  evaluate  loss, perplexity and bits per byte of a text file

examples:
  mcore-infer generate --load runs/tiny --prompt "In the beginning"
  mcore-infer generate --load runs/tiny --prompt "Once" --num-tokens 50 --top-k 40 --seed 7
  mcore-infer evaluate --load runs/tiny --input chapter.txt

mcore-infer COMMAND --help tells a command's options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model, and where it runs."""

    load: str
    """Run folder, or a step folder of it."""

    ckpt_step: int = 0
    """Step of a run folder; 0: the latest."""

    tokenizer: str = ""
    """Folder or file of the tokenizer; empty: the one in the checkpoint."""

    device: str = "auto"
    """cuda, cpu, or auto: cuda where it is present."""

    tensor_model_parallel_size: int = 0
    """Ranks that split each matrix; 0: all that were started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """Write on after a prompt; the text streams to standard output."""

    model: ModelOptions
    prompt: tuple[str, ...] = ("",)
    """Beginning of the text; several prompts are written on together. An empty one begins a
    document."""

    seed: int = 1234
    """Of the draws; prompt i draws from seed + i."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Judge text files: one document each."""

    model: ModelOptions
    input: tuple[str, ...]
    """Text files in UTF-8."""

    seq_length: int = 0
    """Tokens of context; 0: the model's positions, or 1024."""

    overlapping_eval: int = 0
    """New tokens of each window; 0: half the context."""

    micro_batch_size: int = 8
    """Windows in one forward pass."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 1 when it failed, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, *rest = words
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"mcore-infer: error: no command {name!r}: use one of {known}.", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return COMMANDS[name](rest)
    except (ValueError, FileNotFoundError) as error:
        print(f"mcore-infer: error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:  # tyro's, after help or a flag that cannot be read
        return end.code if isinstance(end.code, int) else 2
    except RuntimeError as error:
        if not _is_outside(error):
            raise
        print(f"mcore-infer: failed: {error}", file=sys.stderr)
        return 1


def _is_outside(error: RuntimeError) -> bool:
    """Whether files or the device's memory are to blame, and no fault in a program."""
    from torch import OutOfMemoryError

    from mcore_ckpt.errors import CheckpointError

    return isinstance(error, (CheckpointError, OutOfMemoryError))


def generate(words: Sequence[str]) -> int:
    """Write on after one or more prompts."""
    config = _parse(GenerateConfig, "mcore-infer generate", words)
    with _opened(config.model) as (loaded, tokenizer, is_first):
        if len(config.prompt) == 1:
            _write_one(config, loaded.model, tokenizer, is_first)
            return 0
        from mcore_infer.generation import generate_text

        texts = generate_text(
            loaded.model, tokenizer, config.prompt, config.sampling, config.seed
        )
        if is_first:
            for prompt, text in zip(config.prompt, texts, strict=True):
                print(f"{prompt}{text}\n")
    return 0


def evaluate(words: Sequence[str]) -> int:
    """Print how well a model predicts text files."""
    config = _parse(EvaluateConfig, "mcore-infer evaluate", words)
    texts = [Path(name).read_text(encoding="utf-8") for name in config.input]
    with _opened(config.model) as (loaded, tokenizer, is_first):
        from mcore_infer.evaluation import score_texts

        limit = loaded.description.config.max_position_embeddings
        score = score_texts(
            loaded.model,
            tokenizer,
            texts,
            context_tokens=config.seq_length or limit or 1024,
            stride=config.overlapping_eval,
            batch=config.micro_batch_size,
        )
        if is_first:
            print(
                f"loss {score.loss:.4f} per token | perplexity {score.perplexity:.2f} | "
                f"bits per byte {score.bits_per_byte:.4f} | {score.num_tokens} tokens | "
                f"{score.num_bytes} bytes"
            )
    return 0


def _write_one(
    config: GenerateConfig, model: "GPT", tokenizer: "Tokenizer", is_first: bool
) -> None:
    """Write on after one prompt, each piece of text as soon as it is whole characters."""
    from mcore_infer.generation import prompt_ids, stop_ids, stream
    from mcore_infer.streaming import TextStream

    sampling = config.sampling
    text = TextStream(tokenizer)
    tokens = stream(
        model,
        [prompt_ids(tokenizer, config.prompt[0])],
        sampling,
        seed=config.seed,
        eod=None if sampling.ignore_eod else tokenizer.eod,
        stop=stop_ids(tokenizer, sampling),
    )
    pieces = (text.add(token.id) for token in tokens)
    if not is_first:
        for _ in pieces:
            pass
        return
    print(config.prompt[0], end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(text.rest())


@contextmanager
def _opened(options: ModelOptions) -> Iterator[tuple["LoadedModel", "Tokenizer", bool]]:
    """Join the other ranks and load; also say whether this rank is the one that speaks."""
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


def _parse(kind: type, program: str, words: Sequence[str]):
    import tyro

    return tyro.cli(kind, prog=program, args=list(words), config=(tyro.conf.OmitArgPrefixes,))


COMMANDS = {"generate": generate, "evaluate": evaluate}
