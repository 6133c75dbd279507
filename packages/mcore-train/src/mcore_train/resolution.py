"""Resolves a config and a world size into a ``Plan``, or reports every conflict at once.

``resolve`` reads no device and no file, and loads no torch. A run that cannot work fails here,
on every rank and before any process group exists, with one message that lists all faults and
what to change for each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from mcore_base.command_line import FaultCollector
from mcore_base.options import OptionsError, find_faults
from mcore_data.tokenizers.building import build_tokenizer
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tracing.data_plan import BatchSizePhase
from mcore_models.building.layouts import stage_problems
from mcore_models.families import GPT_FAMILY, Family
from mcore_models.logical_tensors import moe_layers
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import check_schedule
from mcore_parallel.pipeline_parallel.stages import Stage, build_stages
from mcore_parallel.rank_grid import build_grids
from mcore_train.batches.batch_ramp import (
    BatchRamp,
    build_ramp,
    build_step_schedule,
    piece_length,
)
from mcore_train.composition import TrainConfig, parts
from mcore_train.config import BatchConfig
from mcore_train.options.plan_conflicts import (
    find_adapter_conflicts,
    find_group_conflicts,
    find_stage_conflicts,
    idle_gradient_sums,
)
from mcore_train.pipeline_choice import choose_schedule
from mcore_train.updating.lr_schedule import LRSchedule, build_lr_schedule

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, slots=True)
class ExpertWgrads:
    """The planner's choice for ``--moe-wgrad-micro-batches auto``, and the reason."""

    num_together: int
    """Micro-batches whose weight gradients of experts one GEMM adds."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A config that can run on a world, and every number that follows from the two."""

    config: TrainConfig
    family: Family
    """Family of the model."""
    world_size: int
    data_parallel_size: int
    """Ranks that read different sequences."""
    global_batch_size: int
    """Sequences of one step, after --rampup-batch-size."""
    num_microbatches: int
    """Forward passes of one rank in a step of that batch."""
    train_iters: int
    vocab_size: int
    """Tokens, without padding."""
    padded_vocab_size: int
    """Rows of the embedding, a multiple of the divisor times the tensor ranks."""
    stages: tuple[Stage, ...]
    """Pipeline stages in model order."""
    ramp: BatchRamp
    """Sequences of a step, as a function of the sequences before it."""
    schedule: LRSchedule
    """Learning rate and weight decay."""
    dtype: Dtype
    """Format of parameters and activations."""
    expert_wgrads: ExpertWgrads | None = None
    """Choice for ``--moe-wgrad-micro-batches auto``, made by a run for its GPUs; None: none was
    made, and ``auto`` is 1."""

    def continue_after(self, phases: Sequence[BatchSizePhase], steps: int) -> "Plan":
        """Return the plan with lengths counted by the batch sizes of the steps done so far.

        Args:
            phases: batch sizes from the first step on.
            steps: number of steps done.

        Returns:
            This plan itself if the run had the batch sizes of the plan's ramp.

        Raises:
            ValueError: if the schedule's lengths do not fit each other any more.
        """
        ramp, batch = self.ramp.continue_after(phases, steps), self.config.batch
        if ramp == self.ramp:
            return self
        flags = self.config.optimizer, self.config.schedule, batch
        return replace(
            self,
            ramp=ramp,
            schedule=build_lr_schedule(*flags, ramp),
            train_iters=batch.train_iters or ramp.num_steps(batch.train_samples),
        )

    @property
    def train_samples(self) -> int:
        """Sequences that the run's steps use."""
        return self.ramp.samples_before(self.train_iters + 1)

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Micro-batches of one rank in the step after ``consumed_samples`` sequences."""
        micro = self.config.batch.micro_batch_size * self.data_parallel_size
        return self.ramp.size_at(consumed_samples) // micro

    @property
    def embedding_stages(self) -> tuple[int, ...]:
        """Pipeline ranks that hold the embedding; empty: the first and the last."""
        model, mtp_stage = self.config.model, self.stages[0].mtp_stage
        last = self.stages[-1].rank
        if mtp_stage < 0:
            return (0,) if self.config.pipeline.v_shaped else ()
        is_tied = not model.untie_embeddings_and_output_weights
        return tuple(sorted({0, self.stages[mtp_stage].rank} | ({last} if is_tied else set())))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks, after --rampup-batch-size."""
        return self.global_batch_size * self.config.batch.seq_length


class ConflictError(OptionsError):
    """Conflicts of options with each other or with the world size, one line each."""


def build_plan(config: TrainConfig, world_size: int, family: Family = GPT_FAMILY) -> Plan:
    """Return the plan of a config, with its tokenizer's vocabulary; loads no torch.

    Raises:
        OptionsError: (a ValueError) with every conflict found, and why the tokenizer cannot be
            loaded.
    """
    faults = FaultCollector()
    tokenizer_flags = ("--tokenizer-model", "--vocab-size", "--vocab-file")
    tokenizer = faults.attempt(load_tokenizer, config, unsettles=tokenizer_flags)
    vocab_size = tokenizer.vocab_size if tokenizer else 0
    plan = faults.attempt(
        partial(resolve, tokenizer_vocab_size=vocab_size, family=family), config, world_size
    )
    faults.raise_all()
    assert plan is not None
    return plan


def load_tokenizer(config: TrainConfig) -> Tokenizer | None:
    """Build the tokenizer of a config; None if the config names none."""
    options = config.tokenizer
    source = options.tokenizer_model or options.vocab_file
    if not source and options.tokenizer_type == "HuggingFaceTokenizer":
        return None
    return build_tokenizer(options)


def resolve(
    config: TrainConfig,
    world_size: int,
    *,
    tokenizer_vocab_size: int = 0,
    family: Family = GPT_FAMILY,
) -> Plan:
    """Return the plan of a config on ``world_size`` ranks, or raise all conflicts together.

    Args:
        config: all options.
        world_size: ranks of the job.
        tokenizer_vocab_size: tokens of the tokenizer; 0: no tokenizer.
        family: of the model.

    Raises:
        ConflictError: (a ValueError) with every conflict found.
    """
    micro = config.batch.micro_batch_size * _data_ranks(config, world_size)
    batch_size = _global_batch_size(config, world_size)
    vocab_size = _vocab_size(config, tokenizer_vocab_size)
    lines = [
        *_layout_conflicts(config, world_size),
        *_model_conflicts(config, family),
        *_batch_conflicts(config, world_size),
        *_vocabulary_conflicts(config, tokenizer_vocab_size),
        *find_faults(*parts(config)),
    ]
    ramp = _attempt(lines, _build_ramp, config.batch, batch_size)
    if config.pipeline.pipeline_schedule == "auto":
        config = _with_schedule(config, family, world_size, vocab_size, lines)
    pp = config.parallelism.pipeline_model_parallel_size
    stages = _attempt(lines, build_stages, config.pipeline, family.num_layers(config.model), pp)
    lines += find_stage_conflicts(config, stages or ())
    if not lines:  # these checks describe the model, which needs consistent options
        lines += stage_problems(config.model, [stage.layers for stage in stages or ()])
        lines += find_adapter_conflicts(config, family, vocab_size, stages or ())
        lines += find_group_conflicts(config, family, vocab_size)
    sizes = ramp.sizes() if ramp else (batch_size,)
    counts = [max(1, size // micro) for size in sizes]
    lines += _schedule_conflicts(config.pipeline, pp, counts)
    lines += idle_gradient_sums(config, counts)
    schedule = None
    if ramp and config.optimizer.lr and _train_samples(config, batch_size):
        flags = config.optimizer, config.schedule, config.batch
        schedule = _attempt(lines, build_lr_schedule, *flags, ramp)
    if lines:
        raise ConflictError(list(dict.fromkeys(lines)))
    assert stages is not None
    assert schedule is not None
    assert ramp is not None
    return Plan(
        config=config,
        family=family,
        world_size=world_size,
        data_parallel_size=_data_ranks(config, world_size),
        global_batch_size=batch_size,
        num_microbatches=batch_size // micro,
        train_iters=ramp.num_steps(_train_samples(config, batch_size)),
        vocab_size=vocab_size,
        padded_vocab_size=_round_up(
            vocab_size,
            config.model.make_vocab_size_divisible_by
            * config.parallelism.tensor_model_parallel_size,
        ),
        stages=tuple(stages),
        ramp=ramp,
        schedule=schedule,
        dtype=_dtype(config),
    )


def _dtype(config: TrainConfig) -> Dtype:
    if config.precision.fp16:
        return "float16"
    return "bfloat16" if config.precision.bf16 else "float32"


def _layout_conflicts(config: TrainConfig, world_size: int) -> Iterator[str]:
    parallel = config.parallelism
    try:
        build_grids(parallel, world_size)
    except ValueError as error:
        yield str(error)


def _model_conflicts(config: TrainConfig, family: Family) -> Iterator[str]:
    experts, parallel = config.experts, config.parallelism
    yield from family.layout_problems(
        config.model, parallel, experts, seq_length=config.batch.seq_length
    )
    tp = parallel.tensor_model_parallel_size
    if experts.num_experts == 0:
        return
    try:
        moe_layers(experts, config.model.num_layers)
    except ValueError as error:
        yield str(error)
    tokens = config.batch.micro_batch_size * config.batch.seq_length
    tokens //= parallel.context_parallel_size
    if tokens % tp:
        yield (
            f"a micro-batch of {tokens} tokens a rank cannot be shared by {tp} tensor ranks "
            f"before the experts: make --micro-batch-size x --seq-length a multiple of {tp}."
        )


def _with_schedule(
    config: TrainConfig, family: Family, world_size: int, vocab_size: int, lines: list[str]
) -> TrainConfig:
    """Replace the schedule ``auto`` in a config; raise if the config has other faults."""
    micro = config.batch.micro_batch_size * _data_ranks(config, world_size)
    num_microbatches = _global_batch_size(config, world_size) // micro
    if not lines:
        scheduled = _attempt(
            lines, choose_schedule, config, family, world_size, vocab_size, num_microbatches
        )
        if scheduled is not None:
            return scheduled
    raise ConflictError(list(dict.fromkeys(lines)))


def _schedule_conflicts(pipeline: PipelineConfig, pp: int, numbers: list[int]) -> list[str]:
    """Return the fault of the first number of micro-batches that the schedule rejects."""
    lines: list[str] = []
    for number in numbers:
        if not lines:
            _attempt(lines, check_schedule, pipeline, pp, number)
    return lines


def _batch_conflicts(config: TrainConfig, world_size: int) -> Iterator[str]:
    batch = config.batch
    micro = batch.micro_batch_size * _data_ranks(config, world_size)
    size = _global_batch_size(config, world_size)
    if size % micro:
        yield (
            f"--global-batch-size {size} is not a multiple of --micro-batch-size "
            f"{batch.micro_batch_size} x {_data_ranks(config, world_size)} data-parallel ranks "
            f"= {micro}: use {' or '.join(_multiples_around(size, micro))}."
        )
    if batch.rampup_batch_size and any(n % micro for n in batch.rampup_batch_size[:2]):
        start, increment, _ = batch.rampup_batch_size
        yield (
            f"--rampup-batch-size {start} {increment}: both must be multiples of "
            f"--micro-batch-size x data-parallel ranks = {micro}."
        )
    eval_samples = config.evaluation.eval_micro_batch_size * _data_ranks(config, world_size)
    if eval_samples and size % eval_samples:
        yield (
            f"--eval-micro-batch-size {config.evaluation.eval_micro_batch_size} x "
            f"{_data_ranks(config, world_size)} data-parallel ranks = {eval_samples} must "
            f"divide --global-batch-size {size}, the unit of --eval-iters."
        )
    if batch.step_batch_size_schedule:
        ramp = _attempt([], _build_ramp, batch, size)
        if ramp and any(each % micro for each in ramp.sizes()):
            yield (
                f"--step-batch-size-schedule {batch.step_batch_size_schedule}: every size must "
                f"be a multiple of --micro-batch-size x data-parallel ranks = {micro}."
            )
    try:
        piece_length(batch.seq_length_schedule, batch.seq_length, 0)
    except ValueError as error:
        yield str(error)
    if not batch.train_iters and not batch.train_samples:
        yield "how long to train? Give --train-iters or --train-samples."
    elif batch.train_samples and batch.train_samples < size:
        yield (
            f"--train-samples {batch.train_samples} is less than one step of "
            f"--global-batch-size {size}."
        )
    if not config.optimizer.lr:
        yield "how fast to learn? Give --lr, such as 3e-4."


def _vocabulary_conflicts(config: TrainConfig, tokenizer_vocab_size: int) -> Iterator[str]:
    vocab_size = _vocab_size_flag(config)
    if vocab_size and tokenizer_vocab_size > vocab_size:
        yield (
            f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer_vocab_size} "
            f"tokens: leave it out, or use at least {tokenizer_vocab_size}."
        )
    if not _vocab_size(config, tokenizer_vocab_size):
        yield "how many tokens are there? Give --tokenizer-model (or --vocab-size)."
    if config.samples.sample_interval and not tokenizer_vocab_size:
        yield "--sample-interval writes text: give --tokenizer-model."


def _build_ramp(batch: BatchConfig, batch_size: int) -> BatchRamp:
    if batch.step_batch_size_schedule:
        schedule = batch.step_batch_size_schedule
        return build_step_schedule(schedule, batch_size, batch.seq_length)
    return build_ramp(batch.rampup_batch_size, batch_size)


def _attempt(lines: list[str], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a check; on its ValueError add the message to the faults and return None."""
    try:
        return function(*arguments)
    except ValueError as error:
        lines.append(str(error))
        return None


def count_microbatches(config: TrainConfig, world_size: int) -> int:
    """Return the forward passes of one rank in a step of the full batch; at least 1."""
    micro = config.batch.micro_batch_size * _data_ranks(config, world_size)
    return max(1, _global_batch_size(config, world_size) // micro)


def _data_ranks(config: TrainConfig, world_size: int) -> int:
    parallel = config.parallelism
    model_ranks = (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    return max(1, world_size // model_ranks)


def _global_batch_size(config: TrainConfig, world_size: int) -> int:
    micro = config.batch.micro_batch_size * _data_ranks(config, world_size)
    return config.batch.global_batch_size or micro


def _train_samples(config: TrainConfig, global_batch_size: int) -> int:
    return config.batch.train_samples or config.batch.train_iters * global_batch_size


def _vocab_size_flag(config: TrainConfig) -> int:
    # A NullTokenizer of n ids has n + 1 tokens: its own size counts, not the flag.
    is_null = config.tokenizer.tokenizer_type == "NullTokenizer"
    return 0 if is_null else config.tokenizer.vocab_size


def _vocab_size(config: TrainConfig, tokenizer_vocab_size: int) -> int:
    mock = config.data.mock_vocab_size if config.data.mock_data else 0
    return _vocab_size_flag(config) or tokenizer_vocab_size or mock


def _multiples_around(number: int, multiple: int) -> list[str]:
    above = _round_up(number, multiple)
    return [str(n) for n in (above - multiple, above) if n > 0]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def layout_degrees(plan: Plan) -> dict[str, int]:
    """Return the degree of each axis by its name in the header."""
    parallel = plan.config.parallelism
    layout = {
        "tensor": parallel.tensor_model_parallel_size,
        "context": parallel.context_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "data": plan.data_parallel_size,
    }
    if plan.config.experts.num_experts:
        layout["expert"] = parallel.expert_model_parallel_size
    return layout
