"""Implements ``mcore-train verify``: compares a layout's results with one rank's.

A small run trains under the layout and on one rank: in float64, where only the order of sums
may differ, and in the run's own format. Ranks are processes of this host with gloo, or the
ranks that a launcher started, on its devices.
"""

import logging
import tempfile
import time
import warnings
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from mcore_base.destinations import check_file
from mcore_base.options import flag
from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_models.config import RecomputeConfig
from mcore_models.families import Family
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.testing.layout_comparison import EXACT
from mcore_parallel.testing.ranks import run_ranks
from mcore_train.composition import FAMILY_COMMANDS, Command, TrainConfig, Verified, flat
from mcore_train.config import LoadConfig
from mcore_train.layout_check.certificate import (
    BANDS,
    Certificate,
    Line,
    compare_rounded,
    compare_trials,
    draw,
)
from mcore_train.layout_check.dropout_streams import noise_faults
from mcore_train.layout_check.relations import cuts_vectors, has_flat_shards
from mcore_train.layout_check.rows import AnyRows, build_rows
from mcore_train.layout_check.shard_borders import choose_bucket_size
from mcore_train.layout_check.small_layout import describe_layout, smallest_world
from mcore_train.layout_check.small_run import SmallRun, build_small_run
from mcore_train.layout_check.trial import (
    Trial,
    build_run,
    fingerprint,
    is_continued,
    load_folder,
    run_trial,
    save_start,
)
from mcore_train.planning.expert_wgrads import exclusion_reason, has_automatic_wgrads
from mcore_train.precision import torch_dtype, with_device_precision
from mcore_train.reporting.log import set_up
from mcore_train.resolution import ExpertWgrads, Plan, build_plan, resolve
from mcore_train.running import joined_world

log = logging.getLogger(__name__)

TIMEOUT_S = 600.0
"""Seconds after which the ranks of a verification are ended."""
NUM_NUDGED = 3
"""Number of runs of one rank with weights a last bit off, or 2**-16 in float32, which measure
the rounding error in few bits."""


def run_verification(config: Verified, command: Command = FAMILY_COMMANDS["gpt"]) -> int:
    """Verify the layout of a command line; print the table and write the certificate.

    Until the end the certificate file states that the comparison was stopped; after an error,
    it holds the message.

    Returns:
        0 if all comparisons pass, else 1.

    Raises:
        ValueError: with all conflicts of options, before any rank starts.
    """
    world = launcher.read_environment()
    is_first = world.rank == 0
    set_up(is_first)
    file = config.verification.certificate if is_first else ""
    if file:
        check_file("--certificate", file)
    _write(_stopped("it was ended"), file)
    try:
        certificate = _certify(config, command)
    except Exception as error:
        _write(_stopped(str(error) or type(error).__name__), file)
        raise
    if certificate is None:
        return 0
    return conclude(certificate, file, quiet=config.verification.quiet)


def _certify(config: Verified, command: Command) -> Certificate | None:
    """Verify on a launcher's ranks, or on ranks of this host; only rank 0 gets a result."""
    world, quiet = launcher.read_environment(), config.verification.quiet
    run = command.run
    run_config = run(**{f.name: getattr(config, f.name) for f in fields(run)})
    if world.is_launched:
        small = build_small_run(
            _plan(run_config, world.world_size, command.family), world.world_size
        )
        return verify_in_world(small, quiet=quiet)
    world_size = run_config.launch.nproc or smallest_world(run_config)
    try:
        plan = _plan(run_config, world_size, command.family)
    except ValueError as error:
        if run_config.launch.nproc:
            raise
        raise ValueError(
            f"{error}\nThis is for {world_size} ranks, the fewest of this layout: give the "
            "run's number of ranks by --nproc."
        ) from error
    return verify_on_host(build_small_run(plan, config.verification.max_ranks), quiet=quiet)


def check_verified(config: Verified, command: Command) -> None:
    """Raise every conflict in the options of a verification, before any rank starts."""
    world = launcher.read_environment()
    world_size = config.launch.nproc or smallest_world(config)
    _plan(config, world.world_size if world.is_launched else world_size, command.family)


def conclude(certificate: Certificate, file: str = "", *, quiet: bool = False) -> int:
    """Print a certificate, in full or only failures, and write it as JSON into a file.

    Returns:
        Exit code of the command: 0 if all comparisons pass, else 1.
    """
    _write(certificate, file)
    log.info("%s", draw(certificate, quiet=quiet))
    return 0 if certificate.passed else 1


def _write(certificate: Certificate, file: str) -> None:
    if file:
        Path(file).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(certificate.to_json())


def _stopped(why: str) -> Certificate:
    """Return the certificate of a comparison that did not finish."""
    return Certificate(
        layout="", dtype="", lines=(), unchecked=("everything",), seconds=0.0, stopped=why
    )


def _plan(config: TrainConfig, world_size: int, family: Family) -> Plan:
    """Resolve the real run, with defaults of one step and a learning rate of 1."""
    batch, optimizer = config.batch, config.optimizer
    if not batch.train_iters and not batch.train_samples:
        config = replace(config, batch=replace(batch, train_iters=1))
    if not optimizer.lr:
        config = replace(config, optimizer=replace(optimizer, lr=1.0))
    config = with_device_precision(config, launcher.read_environment().local_rank)
    return build_plan(config, world_size, family)


def verify_on_host(small: SmallRun, *, quiet: bool = False) -> Certificate:
    """Start the small run's ranks on this host's CPU and compare.

    Raises:
        RuntimeError: if a rank raises or dies, with its traceback.
    """
    if not quiet:
        log.info(
            "%s, on this host's processors",
            describe_layout(small.config.parallelism, small.world_size),
        )
    return run_ranks(verify_on_rank, small.world_size, small, quiet, timeout_s=TIMEOUT_S)[0]


def verify_in_world(small: SmallRun, *, quiet: bool = False) -> Certificate | None:
    """Compare on the ranks that a launcher started on this host; rank 0 returns a result."""
    world = launcher.read_environment()
    if world.world_size != small.world_size:
        raise ValueError(
            f"the small run has {small.world_size} ranks and the launcher started "
            f"{world.world_size}: start {small.world_size}, or raise --max-ranks."
        )
    set_up(world.rank == 0 and not quiet)
    log.info("%s, as launched", describe_layout(small.config.parallelism, small.world_size))
    plan = resolve(small.config, small.world_size, family=small.family)
    try:
        with joined_world(plan) as ctx:
            return _verify(small, plan, ctx)
    finally:
        set_up(world.rank == 0)


def verify_on_rank(small: SmallRun, quiet: bool = False) -> Certificate | None:
    """Compare on one rank of a gloo world; only rank 0 returns a certificate."""
    plan = resolve(small.config, small.world_size, family=small.family)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ctx = ParallelContext.build(
            small.config.parallelism,
            embedding_stages=plan.embedding_stages,
        )
        set_up(ctx.global_rank == 0 and not quiet)
        try:
            return _verify(small, plan, ctx)
        finally:
            ctx.destroy()


def alone(plan: Plan) -> Plan:
    """Return the plan of the same training on one rank, without optimized paths.

    Nothing is recomputed, offloaded, overlapped, recorded as a graph or split, so that faults
    of these features appear only in the layout's results. Micro-batches keep their size, since
    experts are balanced over each of them; ``shared_options`` lists the other options that are
    kept.
    """
    config = plan.config
    experts = config.experts
    if experts.num_experts:
        experts = replace(
            experts,
            moe_token_dispatcher_type="alltoall",
            moe_shared_expert_overlap=False,
            moe_split_batch_overlap=False,
            moe_wgrad_micro_batches=1,
            moe_expert_rows_limit=0.0,
            # Only the grouped GEMM multiplies rows in fp8.
            moe_grouped_gemm=bool(experts.moe_experts_dtype),
        )
    config = replace(
        config,
        parallelism=ParallelConfig(),
        pipeline=PipelineConfig(),
        data_parallelism=replace(
            config.data_parallelism,
            ddp_bucket_size=0,
            ddp_pad_buckets_for_high_nccl_busbw=False,
            data_parallel_sharding_strategy="",
            use_distributed_optimizer=False,
            use_torch_fsdp2=False,
            fp8_param_gather=False,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        ),
        recomputation=RecomputeConfig(),
        offloading=OffloadConfig(),
        kernels=replace(config.kernels, transformer_impl="local"),
        experts=experts,
        batch=replace(config.batch, global_batch_size=plan.global_batch_size),
        run=replace(config.run, cuda_graph_impl="none", cuda_graph_warmup_steps=3),
    )
    lone_plan = resolve(config, 1, tokenizer_vocab_size=plan.vocab_size, family=plan.family)
    return replace(lone_plan, train_iters=plan.train_iters)


def shared_options(plan: Plan, small: SmallRun) -> str:
    """Return a line of the options that the one rank shares with the layout."""
    config = alone(plan).config
    number, topk = config.experts.num_experts, config.experts.moe_router_topk
    # With one expert per token, a router is trained only if the softmax comes first.
    softmax_first = number > 0 and topk == 1
    experts = MoEConfig(
        num_experts=number,
        moe_router_topk=topk,
        moe_router_pre_softmax=softmax_first,
        moe_wgrad_micro_batches=1,
    )
    usual = flat(type(config)(model=config.model, experts=experts))
    options = [
        flag(name) if not isinstance(value, str) else f"{flag(name)} {value}"
        for name, value in flat(config).items()
        if value and value != usual[name] and name not in small.chosen
    ]
    return ", ".join(("the model and its code", "micro-batches", "rows", *options))


def _verify(small: SmallRun, plan: Plan, ctx: ParallelContext) -> Certificate | None:
    with tempfile.TemporaryDirectory(prefix="verify") as own_folder:
        return _compare(small, plan, ctx, Path(_of_first(own_folder, ctx)))


def _compare(
    small: SmallRun, plan: Plan, ctx: ParallelContext, folder: Path
) -> Certificate | None:
    started_s = time.monotonic()
    dtype = torch_dtype(plan.dtype)
    rows = build_rows(plan)
    if small.start == "run":
        plan = replace(plan, train_iters=plan.train_iters + 1)
        rows = build_rows(plan)
    saved_step = plan.train_iters - 1
    plan, whole = _with_cut_rows(plan, ctx, rows)
    plan = with_wgrads_together(plan)
    exact_plan = _in_float64(plan)
    plan = plan if ctx.device.type == "cuda" else _with_any_kernels(plan)
    trials, starts = [], []
    for each, kind, name in ((exact_plan, torch.float64, "exact"), (plan, dtype, "rounded")):
        starts.append(_save_start(small, each, ctx, rows, kind, folder / f"before {name}"))
        options = {"folder": folder / name, "saved_step": saved_step, "start": starts[-1]}
        trials.append(run_trial(each, ctx, rows, dtype=kind, **options))
    exact, rounded = trials
    noise = _try_noise(small, ctx, rows, folder / "noisy")
    noise += _try_fp8_gathers(plan, ctx, rows, dtype)
    is_first = ctx.global_rank == 0
    certificate = None
    if is_first:
        log.info("the layout is done after %.0f s; now one rank", time.monotonic() - started_s)
        oracle_plan, single = (
            _by_plain_torch(alone(exact_plan)),
            ParallelContext.single(ctx.device),
        )
        oracle = run_trial(oracle_plan, single, rows, saved_step=saved_step, start=starts[0])
        lines = [*compare_trials(exact, oracle, EXACT), *noise]
        lines.append(_reread(exact, oracle_plan, single, folder / "exact", torch.float64))
        few_bits = bool(plan.config.fp8.fp8_format or plan.config.experts.moe_dispatch_dtype)
        lone_plan = replace(alone(plan), train_iters=1 + (small.start == "run"))
        lone_trials = [run_trial(lone_plan, single, rows, dtype=dtype, start=starts[1])]
        # A single run of one rank may happen to have few numbers near a rounding border.
        for seed in range(1, 1 + NUM_NUDGED * few_bits):
            nudged = run_trial(
                lone_plan, single, rows, dtype=dtype, nudge_seed=seed, start=starts[1]
            )
            lone_trials.append(nudged)
        rounded_lines = compare_rounded(
            rounded, lone_trials, oracle, BANDS[dtype], few_bits=few_bits
        )
        rounded_lines.append(_reread(rounded, alone(plan), single, folder / "rounded", dtype))
        lines += [replace(line, what=f"{line.what} in {plan.dtype}") for line in rounded_lines]
        certificate = Certificate(
            layout=describe_layout(small.config.parallelism, small.world_size),
            dtype=f"float64 and {plan.dtype}",
            lines=tuple(lines),
            unchecked=(*small.notes, *whole, *_of_device(ctx.device)),
            seconds=time.monotonic() - started_s,
            shared=shared_options(plan, small),
        )
    _of_first("", ctx)  # wait: rank 0 still reads the folder
    return certificate


def _try_noise(
    small: SmallRun, ctx: ParallelContext, rows: AnyRows, folder: Path
) -> list[Line]:
    """Check which ranks share random numbers, and that a resumed run draws the same numbers."""
    if small.noisy is None:
        return []
    plan = _in_float64(resolve(small.noisy, small.world_size, family=small.family))
    run = build_run(plan, ctx, rows, dtype=torch.float64)
    faults = noise_faults(run)
    worst = faults[0] if faults else ""
    differs = not is_continued(run, rows, folder)
    return [
        _exact_line("random numbers of ranks", bool(faults), worst),
        _exact_line("continued run with dropout or noise", differs),
    ]


def _try_fp8_gathers(
    plan: Plan, ctx: ParallelContext, rows: AnyRows, dtype: torch.dtype
) -> list[Line]:
    """Check that gathering weights in fp8 changes no bit of a loss."""
    if not plan.config.data_parallelism.fp8_param_gather:
        return []
    wide = _with_wide_gathers(plan)
    narrow, expected = (run_trial(each, ctx, rows, dtype=dtype).losses for each in (plan, wide))
    return [
        _exact_line(f"losses by weights gathered in fp8 in {plan.dtype}", narrow != expected)
    ]


def _with_wide_gathers(plan: Plan) -> Plan:
    data_parallelism = replace(plan.config.data_parallelism, fp8_param_gather=False)
    return replace(plan, config=replace(plan.config, data_parallelism=data_parallelism))


def _exact_line(what: str, differs: bool, worst: str = "") -> Line:
    return Line(what=what, tensor="", worst=worst, error=float(differs), tolerance=0.0)


def _save_start(
    small: SmallRun,
    plan: Plan,
    ctx: ParallelContext,
    rows: AnyRows,
    dtype: torch.dtype,
    folder: Path,
) -> LoadConfig | None:
    """Save the initial checkpoint of a small run on one rank; None: it starts from its seed."""
    if not small.start:
        return None
    start = None
    if ctx.global_rank == 0:
        single = ParallelContext.single(ctx.device)
        start = asdict(save_start(alone(plan), single, rows, dtype, folder, small.start))
    loading, start = small.loading, LoadConfig(**gather_json(start, ctx.world)[0])
    if loading.pretrained_checkpoint and small.start == "weights":
        start = LoadConfig(pretrained_checkpoint=start.load)
    return replace(start, load_optim=loading.load_optim, load_rng=loading.load_rng)


def _with_cut_rows(
    plan: Plan, ctx: ParallelContext, rows: AnyRows
) -> tuple[Plan, tuple[str, ...]]:
    """Choose buckets whose shard borders cut rows; note tensors that no border cuts."""
    if not has_flat_shards(plan):
        is_whole = plan.config.data_parallelism.is_fully_sharded
        note = "shard borders inside a row: there are none, in the run neither (whole rows)"
        return plan, (note,) if is_whole else ()
    run = build_run(_in_float64(plan), ctx, rows, dtype=torch.float64)
    size, cuts = choose_bucket_size(run)
    data_parallelism = replace(plan.config.data_parallelism, ddp_bucket_size=size)
    plan = replace(plan, config=replace(plan.config, data_parallelism=data_parallelism))
    notes = []
    if whole := [name for name, is_cut in cuts["rows"].items() if not is_cut]:
        notes.append(f"shard borders inside rows of {', '.join(whole)}: none in the small run")
    if cuts_vectors(plan) and not any(cuts["vectors"].values()):
        notes.append("vectors cut by shard borders: none is in the small run")
    return plan, tuple(notes)


def with_wgrads_together(plan: Plan) -> Plan:
    """Return the plan with two micro-batches for each weight gradient of experts.

    The plan is unchanged if a run with ``--moe-wgrad-micro-batches auto`` never takes several.
    """
    config = plan.config
    if not has_automatic_wgrads(config) or exclusion_reason(config, plan.world_size):
        return plan
    return replace(plan, expert_wgrads=ExpertWgrads(2, "a run on GPUs may choose several"))


def _in_float64(plan: Plan) -> Plan:
    """Return the plan without fp8 and 16-bit formats, so that all parts compute in float64."""
    plan = _with_wide_gathers(_with_any_kernels(plan))
    experts = replace(plan.config.experts, moe_router_dtype="")
    return replace(plan, config=replace(plan.config, experts=experts))


def _by_plain_torch(plan: Plan) -> Plan:
    kernels = replace(plan.config.kernels, attention_backend="local")
    return replace(plan, config=replace(plan.config, kernels=kernels))


def _with_any_kernels(plan: Plan) -> Plan:
    """Return the plan with any attention backend: others lack float64 or the CPU."""
    kernels = replace(plan.config.kernels, attention_backend="auto")
    return replace(plan, config=replace(plan.config, kernels=kernels))


def _reread(
    trial: Trial, plan: Plan, single: ParallelContext, folder: Path, dtype: torch.dtype
) -> Line:
    """Compare the layout's checkpoint, loaded on one rank, with its saved state."""
    run = load_folder(build_run(plan, single, build_rows(plan), dtype=dtype), folder)
    return _exact_line(
        "checkpoint on one rank", fingerprint(run, with_loss_scale=False) != trial.saved
    )


def _of_device(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return ()
    return ("GPU kernels and nccl: run it with --device cuda, or under torchrun, for these",)


def _of_first(text: str, ctx: ParallelContext) -> str:
    """Return the first rank's text on every rank; all ranks wait for it."""
    return gather_json(text, ctx.world)[0]
