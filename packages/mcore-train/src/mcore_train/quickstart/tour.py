"""Implements ``mcore-train quickstart``: from a book's text to a generated paragraph.

Trains a tokenizer and a small GPT on the shipped book, scores held-out chapters, resumes from
its own checkpoint, converts to a Hugging Face folder and generates text, in a few minutes on a
CPU. The commands that it prints at the end do the same stages. With several ranks all of them
train and score, and the first generates. A stopped tour continues from its last checkpoint.
"""

import json
import logging
import shutil
import textwrap
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mcore_base.terminal import curve_text
from mcore_ckpt.conversion.conversion import mcore_to_hf
from mcore_data.datasets.arrangement import SampleOptions
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.loading.loader import build_loader
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import SamplingConfig
from mcore_infer.generation import generate
from mcore_infer.loading import load_model
from mcore_models.flops import num_parameters
from mcore_models.protocol import LanguageModel
from mcore_parallel.collectives import all_reduce
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import Run
from mcore_train.checkpoints.adapter_bases import model_shards
from mcore_train.checkpoints.resuming import build_run, optimizer_shards
from mcore_train.config import LoadConfig, SaveConfig
from mcore_train.evaluation import EvalScore, evaluate
from mcore_train.loop import train
from mcore_train.quickstart.book import Book, prepare, read_book, token_files
from mcore_train.quickstart.plan import (
    SEQ_LENGTH,
    VOCAB_SIZE,
    QuickstartConfig,
    build_tour_plan,
)
from mcore_train.reporting.log import METRICS, Reporter, StepReport, set_up
from mcore_train.resolution import Plan
from mcore_train.running import build_reporter, joined_world

log = logging.getLogger(__name__)

TEMPERATURE = 0.8
RESUMED_STEPS = 10
"""Number of last steps that are trained twice: without a stop, and from a checkpoint."""
MARKER = "quickstart.json"
"""File with the options of a tour and later its results; it marks a folder as a tour's."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of the training."""

    run: Run
    is_exact: bool
    """Whether the resumed steps are equal to the last bit."""


def run_quickstart(options: QuickstartConfig) -> int:
    """Run the tour on this rank; return the exit code.

    Returns:
        0; 1 if SIGTERM or Ctrl-C stopped it before training was done.

    Raises:
        ValueError: if the options conflict with each other or with the number of ranks.
    """
    started_s = time.monotonic()
    world = launcher.read_environment()
    console = set_up(world.rank == 0)
    output = Path(options.tour.output)
    book = read_book(options.tour.seed)
    plan = build_tour_plan(options, world.world_size)
    with joined_world(plan) as ctx:
        if world.rank == 0:
            if _is_stopped_tour(output, options):
                log.info("The tour in %s continues.\n", output)
            else:
                _clear(output)
                _prepare(book, output)
                _write_marker(output, {"options": asdict(options)})
        _meet(ctx)
        trained = _train(plan, ctx, console if world.rank == 0 else None)
        if trained is None:
            log.info("The tour stops here. The same command continues it.")
            return 1
        score = _score(trained.run, output)
        if world.rank == 0:
            results = _report_score(score, book) | {"resumed_exactly": trained.is_exact}
            results |= _convert_and_write(options, trained.run)
            results |= {"minutes": (time.monotonic() - started_s) / 60}
            _write_marker(output, results)
            log.info("%s\n", _loss_plot(output / "checkpoint" / METRICS))
            _log_next_commands(output, results)
        _meet(ctx)
    return 0


def _prepare(book: Book, output: Path) -> None:
    started_s = time.monotonic()
    num_bytes = sum(len(text.encode()) for text in book.train)
    log.info(
        "The book: %d chapters (%.1f MB) to learn from, %d held out.",
        len(book.train),
        num_bytes / 1e6,
        len(book.held_out),
    )
    tokens, _ = prepare(book, output / "data", VOCAB_SIZE)
    log.info(
        "Tokenizer of %d tokens trained, text encoded: %d tokens, %.2f bytes each (%.0f s).\n",
        VOCAB_SIZE,
        tokens,
        num_bytes / tokens,
        time.monotonic() - started_s,
    )


def _train(plan: Plan, ctx: ParallelContext, console: Console | None) -> TrainingResult | None:
    """Train to the end; then repeat the last steps from the checkpoint before them.

    Returns:
        None if a signal stopped it before.
    """
    run = build_run(plan, ctx)
    log.info(
        "A GPT of %.2f million parameters, %d steps of %d tokens, on %d x %s:",
        num_parameters(plan.config.model, plan.vocab_size) / 1e6,
        plan.train_iters,
        plan.tokens_per_step,
        plan.world_size,
        ctx.device.type,
    )
    before = plan.train_iters - RESUMED_STEPS
    if run.origin.checkpoint:
        log.info("  continuing after step %d", run.progress.iteration)

    def log_step(report: StepReport) -> None:
        log.info(
            "  step %5d   loss %.3f   %6.0f tokens/s",
            report.iteration,
            report.loss,
            report.tokens_per_s,
        )

    with build_reporter(
        plan, console, with_lines=False, continues_from=run.progress.iteration
    ) as reporter:
        for until in (before, plan.train_iters):
            if run.progress.iteration < until and not train(
                run, reporter, until=until, on_report=log_step
            ):
                return None
    again = _again(plan, ctx, before)
    if again is None:
        return None
    is_exact = _is_same(run, again, ctx)
    log.info(
        "Continued from the checkpoint of step %d, the last %d steps come out %s.\n",
        before,
        RESUMED_STEPS,
        "equal to the last bit" if is_exact else "DIFFERENT",
    )
    return TrainingResult(run, is_exact)


def _again(plan: Plan, ctx: ParallelContext, step: int) -> Run | None:
    """Train from the checkpoint of a step to the end, without saving; None if stopped."""
    config = replace(
        plan.config,
        loading=LoadConfig(load=plan.config.saving.save, ckpt_step=step),
        saving=SaveConfig(),
    )
    run = build_run(replace(plan, config=config), ctx)
    return run if train(run, Reporter(None)) else None


def _is_same(a: Run, b: Run, ctx: ParallelContext) -> bool:
    """Whether all weights and optimizer state are equal on all ranks, bitwise."""
    pairs = [(model_shards(a), model_shards(b)), (optimizer_shards(a), optimizer_shards(b))]
    same = all(
        torch.equal(one.data, two.data)
        for left, right in pairs
        for name, shard in left.items()
        for one, two in zip(shard.pieces, right[name].pieces, strict=True)
    )
    return bool(all_reduce(torch.tensor(float(same), device=ctx.device), ctx.world, "min"))


def _score(run: Run, output: Path) -> EvalScore:
    """Return the score of the held-out chapters: every token but the first, on all ranks."""
    chapters = GPTDataset(
        IndexedDataset(token_files(output / "data").held_out),
        sequence_length=SEQ_LENGTH,
        options=SampleOptions(drop_last_partial=False),
    )
    loader = build_loader(
        chapters,
        dataloader_type="full",
        micro_batch_size=run.plan.config.batch.micro_batch_size,
        dp_rank=run.ctx.dp.rank,
        dp_size=run.ctx.dp.size,
    )
    return evaluate(run, loader, len(loader))  # pyrefly: ignore[bad-argument-type]


def _report_score(score: EvalScore, book: Book) -> dict[str, float]:
    bits = score.bits_per_byte(sum(len(text.encode()) for text in book.held_out))
    log.info(
        "The %d held-out chapters: %.3f bits per byte, perplexity per token %.1f.\n",
        len(book.held_out),
        bits,
        score.perplexity,
    )
    return {"bits_per_byte": bits, "perplexity_per_token": score.perplexity}


def _convert_and_write(options: QuickstartConfig, run: Run) -> dict[str, Any]:
    """Convert the last checkpoint and generate text with it, on one rank, from any layout."""
    output, config = Path(options.tour.output), run.plan.config
    shutil.rmtree(output / "hf", ignore_errors=True)  # left by a tour that was stopped here
    mcore_to_hf(config.saving.save, output / "hf")
    log.info("Converted to a Hugging Face folder: %s\n", output / "hf")
    loaded = load_model(config.saving.save, ParallelContext.single(run.ctx.device))
    assert loaded.tokenizer is not None
    text = write_text(
        loaded.model,
        loaded.tokenizer,
        num_words=options.tour.num_words,
        context_tokens=SEQ_LENGTH,
        temperature=TEMPERATURE,
        seed=options.tour.seed,
    )
    log.info("It writes (temperature %.1f):\n\n%s\n", TEMPERATURE, textwrap.fill(text, 88))
    return {"text": text}


def _loss_plot(metrics: Path) -> str:
    """Draw the reported losses over the steps, and those of the held-out chapters."""
    curves: dict[str, list[tuple[float, float]]] = {"train": [], "valid": []}
    for line in metrics.read_text("utf-8").splitlines():
        report = json.loads(line)
        if report["kind"] in curves:
            curves[report["kind"]].append((report["iteration"], report["loss"]))
    title = "Loss in nats per token over the steps; o: the held-out chapters"
    return f"{title}\n\n{curve_text(curves['train'], curves['valid'])}"


def _log_next_commands(output: Path, results: dict[str, Any]) -> None:
    """Log a summary and the commands to try next."""
    log.info(
        "Done in %.1f minutes: %.3f bits per byte. Next:",
        results["minutes"],
        results["bits_per_byte"],
    )
    run = "uv run " if launcher.is_under_uv_run() else ""
    model, tuned = output / "checkpoint", output.with_name(f"{output.name}-lora")
    on_two_ranks = output.with_name(f"{output.name}-tp2")
    following = f"""\
  # Text of this model:
  RUNmcore-infer generate --load {model} --prompt "In the beginning"
  # The same training on two ranks:
  RUNmcore-train quickstart --nproc 2 --tensor-model-parallel-size 2 --output {on_two_ranks}
  # LoRA on a Hugging Face folder; a published model needs data of its own tokenizer
  # (docs/tutorials/fine-tuning.md):
  RUNmcore-train gpt --load {output / "hf"} --finetune --peft lora --seq-length {SEQ_LENGTH} \\
    --train-data-path {token_files(output / "data").train} \\
    --micro-batch-size 8 --train-iters 50 --lr 1e-3 --save {tuned}
  # A server of that model, for clients of OpenAI's interface:
  RUNmcore-infer serve --load {tuned}
  # A plan for a cluster (docs/tutorials/one-to-eight-gpus.md):
  RUNmcore-train plan --model llama-3-8b --gpus 8 --gpu h100 --seq-length 8192"""
    log.info("%s", following.replace("RUN", run))


def _is_stopped_tour(output: Path, options: QuickstartConfig) -> bool:
    """Whether a tour of these options was stopped after its data were prepared."""
    marker = output / MARKER
    if not marker.is_file():
        return False
    ours = json.loads(json.dumps(asdict(options)))  # JSON turns tuples into lists
    try:
        return dict(json.loads(marker.read_bytes())).get("options") == ours
    except (ValueError, TypeError, RecursionError):
        return False  # damaged: the tour begins anew


def _write_marker(output: Path, content: dict[str, Any]) -> None:
    (output / MARKER).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _clear(output: Path) -> None:
    """Empty the folder of a tour; raise if the folder holds anything else."""
    if output.is_dir() and any(output.iterdir()):
        if not (output / MARKER).is_file():
            raise ValueError(
                f"--output {output} is not empty and not the folder of a quickstart: give "
                "another folder."
            )
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    _write_marker(output, {})


def _meet(ctx: ParallelContext) -> None:
    """Wait for all ranks."""
    all_reduce(torch.zeros((), device=ctx.device), ctx.world).item()


def write_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    num_words: int,
    context_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Return a sampled text of ``num_words`` words, which may exceed the model's context.

    Text is generated half a context at a time, with the half before it as the prompt. Ends of
    documents become line breaks.

    Args:
        model: whole, in eval mode.
        tokenizer: has an end-of-document token, which begins the text.
        num_words: length of the text; longer texts are cut.
        context_tokens: tokens that the model was trained to see.
        temperature: divisor of the logits; below 1 likely tokens become likelier.
        seed: of the draws.
    """
    eod, half = tokenizer.eod, context_tokens // 2
    assert eod is not None
    sampling = SamplingConfig(num_tokens=half, temperature=temperature, ignore_eod=True)
    tokens, text = [eod], ""
    while len(text.split()) <= num_words:
        (more,) = generate(model, [tokens[-half:]], sampling, seed=seed + len(tokens))
        tokens += more.ids
        text = _decode(tokens, tokenizer)
    return " ".join(text.split()[:num_words])


def _decode(tokens: list[int], tokenizer: Tokenizer) -> str:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == tokenizer.eod:
            parts.append([])
        else:
            parts[-1].append(token)
    return "\n".join(tokenizer.decode(part) for part in parts if part)
