"""Options of a training run, one small frozen dataclass a concept.

A field is Megatron's flag with underscores and its docstring is the help text. Zero or an
empty string means off or "derive it"; derived numbers come from ``resolution.resolve``.
Options of the model, the experts, the layout, the data and the checkpoint live in their
own packages; ``composition.TrainConfig`` puts all of them together.
"""

from dataclasses import dataclass
from typing import Literal

from mcore_base.field_checks import check_at_least, flag

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]
ExitSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How many tokens a step sees, and how many steps there are."""

    micro_batch_size: int = 1
    """Sequences in one forward pass of one data-parallel rank. Megatron's default: none."""
    global_batch_size: int = 0
    """Sequences in one step over all ranks; 0: one micro-batch a data-parallel rank."""
    rampup_batch_size: tuple[int, ...] = ()
    """Grow the global batch: START INCREMENT SAMPLES, from the first size to
    --global-batch-size in equal increments over so many sequences. Needs --train-samples."""
    seq_length: int = 1024
    """Tokens in one sequence. Megatron's default: none."""
    train_iters: int = 0
    """Steps to train. Give this or --train-samples."""
    train_samples: int = 0
    """Sequences to train on. Give this or --train-iters."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "micro_batch_size", "seq_length")
        check_at_least(self, 0, "global_batch_size", "train_iters", "train_samples")
        if self.train_iters and self.train_samples:
            raise ValueError("--train-iters and --train-samples exclude each other: give one.")
        if self.rampup_batch_size and len(self.rampup_batch_size) != 3:
            raise ValueError(
                f"--rampup-batch-size takes three numbers, START INCREMENT SAMPLES, not "
                f"{len(self.rampup_batch_size)}."
            )
        if self.rampup_batch_size and self.train_iters:
            raise ValueError(
                "--rampup-batch-size counts in sequences: give --train-samples instead of "
                "--train-iters."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """What a step does with the gradient."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam: AdamW with bias correction and decoupled weight decay; sgd: gradient descent with
    momentum, weight decay added to the gradient."""
    lr: float = 0.0
    """Highest learning rate; required."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; biases and vectors never decay."""
    start_weight_decay: float = -1.0
    """Weight decay of the first step; -1: --weight-decay."""
    end_weight_decay: float = -1.0
    """Weight decay of the last step; -1: --weight-decay."""
    weight_decay_incr_style: IncreaseStyle = "constant"
    """How weight decay goes from --start-weight-decay to --end-weight-decay."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "lr", "min_lr", "weight_decay", "clip_grad")
        if self.lr and self.min_lr > self.lr:
            raise ValueError(f"--min-lr {self.min_lr} must not be above --lr {self.lr}.")
        ends = (self.start_weight_decay, self.end_weight_decay)
        if self.weight_decay_incr_style == "constant" and max(ends) >= 0:
            raise ValueError(
                "--start-weight-decay and --end-weight-decay have no effect with "
                "--weight-decay-incr-style constant: choose linear or cosine, or drop them."
            )
        if self.weight_decay_incr_style != "constant" and min(ends) < 0:
            raise ValueError(
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs both "
                "--start-weight-decay and --end-weight-decay."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the learning rate moves; everything is counted in samples inside."""

    lr_decay_style: DecayStyle = "linear"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: int = 0
    """Steps after which --min-lr is reached; 0: the whole run."""
    lr_decay_samples: int = 0
    """The same in sequences; 0: the whole run."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """The same in sequences."""
    lr_warmup_fraction: float = 0.0
    """The same as a share of the decay length."""
    lr_warmup_init: float = 0.0
    """Learning rate of the first step of a warm-up."""
    lr_wsd_decay_style: WsdDecayStyle = "exponential"
    """Shape of the last part of a WSD schedule."""
    lr_wsd_decay_iters: int = 0
    """Steps of the last part of a WSD schedule."""
    lr_wsd_decay_samples: int = 0
    """The same in sequences."""
    override_opt_param_scheduler: bool = False
    """On resume, take the schedule from the flags though the checkpoint has another."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, take the schedule from the checkpoint though the flags say another."""

    def __post_init__(self) -> None:
        check_at_least(
            self,
            0,
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_warmup_iters",
            "lr_warmup_samples",
            "lr_warmup_fraction",
            "lr_warmup_init",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
        )
        for names in (
            ("lr_decay_iters", "lr_decay_samples"),
            ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
            ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
            ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        ):
            given = [flag(name) for name in names if getattr(self, name)]
            if len(given) > 1:
                raise ValueError(f"{' and '.join(given)} exclude each other: give one.")
        if self.lr_warmup_fraction >= 1:
            raise ValueError(f"--lr-warmup-fraction {self.lr_warmup_fraction} must be below 1.")
        wsd_length = self.lr_wsd_decay_iters or self.lr_wsd_decay_samples
        if self.lr_decay_style == "WSD" and not wsd_length:
            raise ValueError(
                "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples."
            )
        if self.lr_decay_style != "WSD" and wsd_length:
            raise ValueError(
                f"--lr-wsd-decay-iters has no effect with --lr-decay-style "
                f"{self.lr_decay_style}: choose WSD or leave it out."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Validation during training."""

    eval_interval: int = 0
    """Steps between validations; 0: none. A run that validates is scored on its test data, if
    there are any, at its end."""
    eval_iters: int = 10
    """Global batches of one validation; 0: no validation. Megatron's default: 100."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "eval_interval", "eval_iters")

    @property
    def interval(self) -> int:
        """Steps between validations; 0: the run has none."""
        return self.eval_interval if self.eval_iters else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Texts that the model writes while it trains."""

    sample_interval: int = 0
    """Steps between texts; 0: none. Weights go to a serving layout in memory, without files."""
    sample_prompts: tuple[str, ...] = ("",)
    """Beginnings of the texts; an empty one begins a document."""
    sample_num_tokens: int = 64
    """Tokens to write after each prompt, at most."""
    sample_temperature: float = 0.8
    """Scores are divided by it; below 1 the likely gets likelier."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "sample_interval")
        check_at_least(self, 1, "sample_num_tokens")
        if not self.sample_temperature > 0:
            raise ValueError(f"--sample-temperature {self.sample_temperature} must be above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """Where and when checkpoints are written."""

    save: str = ""
    """Run folder for checkpoints, metrics and TensorBoard, or a URL such as s3://bucket/run
    for checkpoints alone; empty: nothing is written. A folder that holds an earlier run is
    refused, unless this run continues it or --overwrite is given."""
    overwrite: bool = False
    """Delete the checkpoints and numbers of an earlier run in --save, and begin anew."""
    save_interval: int = 0
    """Steps between checkpoints; 0: only at the end."""
    save_optim: bool = True
    """Keep optimizer state in checkpoints."""
    save_hf: bool = False
    """Make every saved step a Hugging Face folder as well: its weights stand once, as whole
    tensors in model-*.safetensors."""
    async_save: bool = False
    """Write checkpoints in the background: training goes on once the weights are on their way
    to host memory, of which each rank needs its share of a checkpoint, once."""
    async_save_timeout_minutes: float = 10.0
    """Minutes without progress after which a write in the background is given up."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "save_interval")
        if not self.save:
            for name in ("overwrite", "save_interval", "save_hf", "async_save"):
                if getattr(self, name):
                    raise ValueError(f"{flag(name)} has no effect without --save DIR.")
        if self.async_save_timeout_minutes <= 0:
            raise ValueError("--async-save-timeout-minutes must be above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """What a run starts from."""

    load: str = ""
    """Run folder or step folder to continue from; it brings the model's shape with it. A
    folder without a checkpoint starts from nothing."""
    pretrained_checkpoint: str = ""
    """Folder of the weights to begin from while --load holds none; with --peft, of the base."""
    auto_resume: bool = False
    """Continue from the newest step in --save if there is one, else as the other flags say."""
    ckpt_step: int = 0
    """Step to load from a run folder; 0: the latest."""
    finetune: bool = False
    """Take only the weights: count steps, samples and the schedule from zero."""
    load_optim: bool = True
    """Continue with the checkpoint's optimizer state."""
    load_rng: bool = True
    """Continue with the checkpoint's random streams."""
    load_checksums: bool = True
    """Check the bytes that are read against the checksums they were saved with."""
    exit_on_missing_checkpoint: bool = False
    """End with an error if the folder holds no checkpoint."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "ckpt_step")
        if not self.load:
            for name in ("ckpt_step", "finetune", "exit_on_missing_checkpoint"):
                if getattr(self, name):
                    raise ValueError(f"{flag(name)} has no effect without --load DIR.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is reported, where, and how often."""

    log_interval: int = 100
    """Steps between log lines; the first step always has one."""
    metrics_file: str = ""
    """JSON lines of the same numbers; empty: metrics.jsonl below --save."""
    tensorboard: bool = False
    """Write TensorBoard scalars to tensorboard/ below --save."""
    health_port: int = 0
    """Port on which the first rank of each host answers /health and /metrics over HTTP; 0: no
    such endpoint."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "log_interval")
        check_at_least(self, 0, "health_port")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The process: seed, device, when to stop early."""

    seed: int = 1234
    """Seed of weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: CUDA where present."""
    exit_interval: int = 0
    """Save and end after a step that this divides; 0: never."""
    exit_duration_in_mins: float | Literal["auto"] = 0.0
    """Save and end this many minutes after the program's start; 0: never; auto: before Slurm
    ends the job (SLURM_JOB_END_TIME), by 5 minutes or twice the longest save so far."""
    exit_signal: tuple[ExitSignal, ...] = ("SIGUSR1", "SIGUSR2")
    """Signals that save and end a run as SIGTERM and SIGINT always do: batch systems warn with
    them. Megatron's default: SIGTERM."""
    deterministic_mode: bool = False
    """Use only algorithms that give the same bits in every run with the same number of ranks;
    slower. On a CPU every run is repeatable anyway."""
    check_for_nan_in_loss_and_grad: bool = True
    """End the run, and save nothing more, when the gradient norm is nan or infinite."""
    check_weight_hash_across_dp_replicas_interval: int = 0
    """Steps after which the copies of weights on data-parallel ranks, and tied ones, are
    compared to the last bit, and a run whose copies differ ends; 0: in the first step only."""
    cuda_graph_impl: Literal["none", "full_iteration", "local"] = "none"
    """Launch forward and backward of a whole step as one CUDA graph (full_iteration): faster
    where kernels are shorter than their launches, as in small models. Or a graph for each layer
    and micro-batch in flight (local), for pipelines and recomputed norms too; not timed yet.
    The same bits. A recorded step waits for all gathers of --overlap-param-gather first."""
    cuda_graph_warmup_steps: int = 3
    """Steps before the graph is recorded, and again after the batch size changes."""
    manual_gc_interval: int = 100
    """Steps after which all ranks collect Python's garbage together, and never else; 0: each
    rank by Python's own thresholds. Megatron's default: 0."""

    def __post_init__(self) -> None:
        if self.seed >= 2**32:
            raise ValueError(f"--seed {self.seed} must be below 2^32 = {2**32}.")
        counts = ("seed", "exit_interval", "manual_gc_interval")
        check_at_least(self, 0, *counts, "check_weight_hash_across_dp_replicas_interval")
        if self.exit_duration_in_mins != "auto":
            check_at_least(self, 0, "exit_duration_in_mins")
        check_at_least(self, 1, "cuda_graph_warmup_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How this command itself is read and started."""

    model: str = ""
    """Begin from the shape of a published model, such as llama-3-8b: see mcore-models list."""
    recipe: tuple[str, ...] = ()
    """TOML files of options, laid over each other from left to right, then the flags."""
    megatron_defaults: bool = False
    """Take Megatron's defaults of the model where options are left out: LayerNorm, learned
    positions, biases, GELU without a gate, dropout of 0.1 (and of --multi-latent-attention and
    --fp8-format). A --load checkpoint's model wins over them."""
    nproc: int = 0
    """Ranks to start on this host; 0: this process alone, or what torchrun started."""
    find_micro_batch_size: bool = False
    """Take the fastest micro-batch that fits, which the planner proposes and one step, trained
    and forgotten, confirms; --micro-batch-size auto is the same."""
    dry_run: bool = False
    """Resolve the run of --world-size ranks on one CPU, print its groups, schedule, bytes,
    checkpoint and data, and train nothing."""
    world_size: int = 0
    """Ranks that --dry-run resolves; 0: --nproc, or one."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "nproc", "world_size")
        if self.world_size and not self.dry_run:
            raise ValueError(
                f"--world-size {self.world_size} has no effect without --dry-run: torchrun or "
                "--nproc start the ranks of a run."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig:
    """How ``mcore-train verify`` checks a layout."""

    certificate: str = ""
    """File for the result as JSON, also of a verification that stops early; empty: only the
    table is printed."""
    quiet: bool = False
    """Print only what failed and the verdict."""
    max_ranks: int = 8
    """Ranks of the small run; larger degrees are halved until it fits."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_ranks")
