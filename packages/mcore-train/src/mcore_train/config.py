"""Options of a training run: one frozen dataclass for each concept.

A field is Megatron's flag with underscores, and its docstring is the help text. Zero or an
empty string means off, or that ``resolution.resolve`` derives the number. Options of the model,
the experts, the layout and the data are in their own packages; ``composition.TrainConfig``
combines all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mcore_base.options import ON, Because, Options, Rule, When, flag, option
from mcore_models.config import expert_sizes

DecayStyle = Literal[
    "constant", "linear", "cosine", "inverse-square-root", "WSD", "power", "stages"
]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]
LoggerName = Literal["mlflow", "trackio", "prometheus", "opentelemetry"]
ExitSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig(Options):
    """How many tokens a step sees, and how many steps there are."""

    micro_batch_size: int = option(1, minimum=1)
    """Sequences in one forward pass of one data-parallel rank. Megatron's default: none."""
    global_batch_size: int = option(0, minimum=0)
    """Sequences in one step over all ranks; 0: one micro-batch a data-parallel rank."""
    rampup_batch_size: tuple[int, ...] = ()
    """Grow the global batch: START INCREMENT SAMPLES, from the first size to
    --global-batch-size in equal increments over so many sequences. Needs --train-samples."""
    step_batch_size_schedule: str = option(
        "", excludes={"rampup_batch_size": Because("which sets the same sizes")}
    )
    """Change the global batch in steps: TOKENS:SIZE ..., such as "0:64 2B:128 10B:256", each
    size from so many tokens on (K, M, B, T: thousands to billions of thousands). The largest
    is --global-batch-size."""
    batch_size_lr_scaling: Literal["none", "sqrt", "linear"] = option(
        "none",
        needs=(
            When(
                "has_batch_sizes",
                bool,
                "--step-batch-size-schedule or --rampup-batch-size",
                "as there is one size otherwise",
            ),
        ),
    )
    """Multiply the learning rate of a step with a smaller batch: sqrt, by the root of its share
    of --global-batch-size; linear, by the share."""
    seq_length: int = option(1024, minimum=1)
    """Tokens in one sequence. Megatron's default: none."""
    seq_length_schedule: str = option(
        "", needs={"reset_position_ids": ON, "reset_attention_mask": ON}
    )
    """Begin with shorter texts: TOKENS:LENGTH ..., such as "0:512 2B:2048 6B:8192". Rows of
    --seq-length are cut into pieces of LENGTH, which do not see each other, so that a step has
    as many tokens as later. The last length is --seq-length."""
    train_iters: int = option(
        0,
        minimum=0,
        excludes={
            "train_samples": ON,
            "rampup_batch_size": Because(
                "which counts in sequences", instead="give --train-samples"
            ),
            "step_batch_size_schedule": Because(
                "which counts in tokens", instead="give --train-samples"
            ),
        },
    )
    """Steps to train. Give this or --train-samples."""
    train_samples: int = option(0, minimum=0)
    """Sequences to train on. Give this or --train-iters."""

    rules = (
        Rule(
            ("rampup_batch_size",),
            lambda v: len(v.rampup_batch_size) not in (0, 3),
            "--rampup-batch-size takes three numbers, START INCREMENT SAMPLES, not those of "
            "{rampup_batch_size}.",
        ),
    )

    @property
    def has_batch_sizes(self) -> bool:
        """Whether the global batch changes over the run."""
        return bool(self.rampup_batch_size or self.step_batch_size_schedule)


def _uneven_cuts(values: Any) -> str:
    """Return why ranks cannot cut the decoder's sequences; empty: they can."""
    length, cp = values.decoder_seq_length, values.context_parallel_size
    cuts = cp * (2 if cp > 1 else 1)
    cuts *= values.tensor_model_parallel_size if values.sequence_parallel else 1
    if length % cuts == 0:
        return ""
    return (
        f"--decoder-seq-length {length} cannot be cut by context and tensor ranks: use a "
        f"multiple of {cuts}, such as {-(-length // cuts) * cuts}."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class T5BatchConfig(BatchConfig):
    """The batches of a T5, whose rows have two texts."""

    decoder_seq_length: int = option(128, minimum=1)
    """Tokens of the decoder in one sequence; --seq-length are the encoder's.
    Megatron's default: none."""

    rules = (
        Rule(
            ("decoder_seq_length", "context_parallel_size", "sequence_parallel"),
            _uneven_cuts,
        ),
        Rule(
            ("decoder_seq_length", "max_position_embeddings"),
            lambda v: 0 < v.max_position_embeddings < v.decoder_seq_length,
            "--decoder-seq-length {decoder_seq_length} is longer than "
            "--max-position-embeddings {max_position_embeddings}: use as many or fewer.",
        ),
    )


_SCALED = (When("is_scaled", bool, "--fp16"),)
_FIXED = {"loss_scale": Because("which stays")}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig(Options):
    """Number format of parameters and activations."""

    precision: Literal["", "auto"] = option("", excludes={"bf16": ON, "fp16": ON})
    """auto: --bf16 or --fp16 by what the GPU multiplies in (bf16 from Ampere on, fp16 on
    Volta and Turing), and neither on a CPU. Empty: --bf16 or --fp16 as given."""
    bf16: bool = option(False, excludes={"fp16": ON})
    """Parameters and activations in bfloat16; main weights and optimizer in float32."""
    fp16: bool = False
    """Parameters and activations in float16, main weights and optimizer in float32; the loss
    is scaled, and a step whose gradients overflow is skipped."""
    loss_scale: float = option(0.0, minimum=0, needs=_SCALED)
    """Fixed factor of the loss under --fp16, best a power of two: gradients that overflow end
    the run. Megatron skips such steps without end. 0: it moves."""
    initial_loss_scale: float = option(2.0**32, above=0, needs=_SCALED, idle_with=_FIXED)
    """Factor of the loss at the first step under --fp16."""
    min_loss_scale: float = option(1.0, above=0, needs=_SCALED, idle_with=_FIXED)
    """Least factor of the loss; gradients that overflow even so end the run."""
    loss_scale_window: int = option(1000, minimum=1, needs=_SCALED, idle_with=_FIXED)
    """Steps without overflow after which the factor is doubled."""
    hysteresis: int = option(2, minimum=1, needs=_SCALED, idle_with=_FIXED)
    """Overflows within a window from which on each halves the factor."""

    rules = (
        Rule(
            ("min_loss_scale", "initial_loss_scale"),
            lambda v: v.min_loss_scale > v.initial_loss_scale,
            "--min-loss-scale {min_loss_scale} must not be above --initial-loss-scale "
            "{initial_loss_scale}.",
        ),
        Rule(
            ("precision", "lr"),  # an option of a run: as part of one it has been chosen
            lambda v: v.precision == "auto",
            "--precision auto is chosen where a run trains: give --bf16 or --fp16 here.",
        ),
    )

    @property
    def has_16_bits(self) -> bool:
        """Whether the model computes in 16 bits."""
        return self.bf16 or self.fp16 or bool(self.precision)

    @property
    def is_scaled(self) -> bool:
        """Whether the loss may be scaled."""
        return self.fp16 or bool(self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Options):
    """What a step does with the gradient."""

    optimizer: Literal["adam", "sgd", "lion", "muon", "soap", "adafactor", "schedule_free"] = (
        "adam"
    )
    """adam: AdamW with bias correction and decoupled weight decay; sgd: gradient descent with
    momentum, weight decay added to the gradient; lion: the sign of an interpolated momentum;
    schedule_free: AdamW that averages its weights in place of a decay of the learning rate;
    muon: orthogonalized momentum of matrices; soap: Adam in the eigenbasis of Shampoo;
    adafactor: a second moment by rows and columns. With the last three, AdamW updates
    embeddings, head, norms, biases and routers."""
    lr: float = option(0.0, minimum=0, shrinks_to=1e-2)
    """Highest learning rate; required."""
    min_lr: float = option(0.0, minimum=0)
    """Learning rate at the end of the decay."""
    weight_decay: float = option(0.01, minimum=0, shrinks_to=0.1)
    """Decoupled decay of matrices; biases and vectors never decay."""
    start_weight_decay: float = option(
        -1.0, needs={"weight_decay_incr_style": ("linear", "cosine")}
    )
    """Weight decay of the first step; -1: --weight-decay."""
    end_weight_decay: float = option(
        -1.0, needs={"weight_decay_incr_style": ("linear", "cosine")}
    )
    """Weight decay of the last step; -1: --weight-decay."""
    weight_decay_incr_style: IncreaseStyle = "constant"
    """How weight decay goes from --start-weight-decay to --end-weight-decay."""
    clip_grad: float = option(1.0, minimum=0, shrinks_to=0.05)
    """Largest global gradient norm; 0: no clipping."""

    rules = (
        Rule(
            ("min_lr", "lr"),
            lambda v: v.lr and v.min_lr > v.lr,
            "--min-lr {min_lr} must not be above --lr {lr}.",
        ),
        Rule(
            ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
            lambda v: (
                v.weight_decay_incr_style != "constant"
                and min(v.start_weight_decay, v.end_weight_decay) < 0
            ),
            "--weight-decay-incr-style {weight_decay_incr_style} needs both "
            "--start-weight-decay and --end-weight-decay.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRatesConfig(Options):
    """Learning rates, decay and rules that single parameters have."""

    decoupled_lr: float = option(0.0, minimum=0, shrinks_to=2e-2)
    """Highest learning rate of embeddings and the output head; 0: --lr."""
    decoupled_min_lr: float = option(0.0, minimum=0, needs={"decoupled_lr": ON})
    """Their learning rate at the end of the decay."""
    apply_wd_to_qk_layernorm: bool = option(False, needs={"qk_layernorm": ON})
    """Decay the weights of the norms of queries and keys too."""
    layer_lr_decay: float = option(1.0, above=0, maximum=1)
    """Factor on the learning rate of each layer, against that of the layer after it; embeddings
    are before the first layer. For fine-tuning; 1: all alike."""
    parameter_groups: tuple[str, ...] = ()
    """Entries PATTERN KEY=VALUE ..., each quoted: a kind (embedding, head, norm, bias, router,
    vector, matrix) or a pattern of logical names such as blocks.*.mlp.*, and what is set for
    what matches: lr and min_lr (highest and last learning rate), lr_factor, decay_factor (of
    --weight-decay), beta1, beta2 (of AdamW), optimizer=adam (of a matrix). Later ones win."""

    rules = (
        Rule(
            ("decoupled_min_lr", "decoupled_lr"),
            lambda v: v.decoupled_min_lr > v.decoupled_lr,
            "--decoupled-min-lr {decoupled_min_lr} must not be above --decoupled-lr "
            "{decoupled_lr}.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig(Options):
    """How the learning rate moves; everything is counted in samples inside."""

    lr_decay_style: DecayStyle = "linear"
    """Shape of the decay after the warm-up. power: (steps / --lr-power-iters) to the power
    -(--lr-power); stages: those of --lr-stages, warm-up included."""
    lr_power: float = option(0.5, above=0, part_of={"lr_decay_style": "power"})
    """Exponent by which the learning rate falls; 0.5 is the inverse square root."""
    lr_power_iters: int = option(0, minimum=0, part_of={"lr_decay_style": "power"})
    """Steps at the highest learning rate, counted from the first step, before it falls; 0: the
    warm-up alone."""
    lr_stages: tuple[str, ...] = option((), part_of={"lr_decay_style": "stages"})
    """Stages one after the other, each STYLE:STEPS:FACTOR, such as linear:100:1 constant:900:1
    cosine:500:0.1 minus_sqrt:100:0: the learning rate goes from where it is, at first
    --lr-warmup-init, to FACTOR times --lr as linear, cosine, exponential or minus_sqrt; after
    the last stage it stays."""
    lr_decay_iters: int = option(0, minimum=0)
    """Steps after which --min-lr is reached; 0: the whole run."""
    lr_decay_samples: int = option(0, minimum=0, excludes={"lr_decay_iters": ON})
    """The same in sequences; 0: the whole run."""
    lr_warmup_iters: int = option(0, minimum=0)
    """Steps of linear warm-up."""
    lr_warmup_samples: int = option(0, minimum=0, excludes={"lr_warmup_iters": ON})
    """The same in sequences."""
    lr_warmup_fraction: float = option(
        0.0, minimum=0, below=1, excludes={"lr_warmup_iters": ON, "lr_warmup_samples": ON}
    )
    """The same as a share of the decay length."""
    lr_warmup_init: float = option(0.0, minimum=0)
    """Learning rate of the first step of a warm-up."""
    lr_wsd_decay_style: WsdDecayStyle = option(
        "exponential", part_of={"lr_decay_style": ("WSD", "power")}
    )
    """Shape of the last part of a WSD schedule, or of a power schedule."""
    lr_wsd_decay_iters: int = option(0, minimum=0, needs={"lr_decay_style": ("WSD", "power")})
    """Steps of the last part of a WSD schedule, or of a power schedule."""
    lr_wsd_decay_samples: int = option(
        0,
        minimum=0,
        needs={"lr_decay_style": ("WSD", "power")},
        excludes={"lr_wsd_decay_iters": ON},
    )
    """The same in sequences."""
    override_opt_param_scheduler: bool = False
    """On resume, take the schedule from the flags though the checkpoint has another."""
    use_checkpoint_opt_param_scheduler: bool = option(
        False, excludes={"override_opt_param_scheduler": ON}
    )
    """On resume, take the schedule from the checkpoint though the flags say another."""

    rules = (
        Rule(
            ("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
            lambda v: (
                v.lr_decay_style == "WSD"
                and not (v.lr_wsd_decay_iters or v.lr_wsd_decay_samples)
            ),
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples.",
        ),
        Rule(
            ("lr_decay_style", "lr_stages"),
            lambda v: v.lr_decay_style == "stages" and not v.lr_stages,
            "--lr-decay-style stages needs --lr-stages, such as linear:100:1 cosine:900:0.1.",
        ),
        Rule(
            ("lr_decay_style", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
            lambda v: (
                v.lr_decay_style == "stages"
                and (v.lr_warmup_iters or v.lr_warmup_samples or v.lr_warmup_fraction)
            ),
            "--lr-decay-style stages has its warm-up in --lr-stages, as in linear:100:1: leave "
            "the other options of a warm-up out.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig(Options):
    """Validation during training."""

    eval_interval: int = option(0, minimum=0)
    """Steps between validations; 0: none. A run that validates is scored on its test data, if
    there are any, at its end."""
    eval_iters: int = option(10, minimum=0)
    """Global batches of one validation; 0: no validation. Megatron's default: 100."""
    eval_at_start: bool = option(False, needs={"eval_interval": ON})
    """Validate before the first step as well."""
    eval_only: bool = option(False, needs={"eval_interval": ON})
    """Validate the initial or loaded weights, score the test data if there are any, and end
    without a training step or a save."""
    eval_micro_batch_size: int = option(0, minimum=0, needs={"eval_interval": ON})
    """Sequences in one forward pass of a validation, which keeps no activations and can take
    more of them; the samples stay the same. 0: --micro-batch-size."""
    eval_average_weights: bool = False
    """Validate, score tasks and write texts with the averaged weights of --ema-decay or
    --optimizer schedule_free. Training continues with its own weights, bit for bit."""
    eval_task_interval: int = option(0, minimum=0, needs={"eval_tasks": ON})
    """Steps between scorings of the zero-shot tasks; 0: none."""
    eval_tasks: tuple[str, ...] = option((), part_of={"eval_task_interval": ON})
    """Zero-shot tasks, as in mcore-infer eval: LAMBADA:FILE is the accuracy of the last word of
    passages in JSON lines, WIKITEXT103:FILE the perplexity of one text, and lm-eval:NAME a task
    of lm-evaluation-harness (extra mcore-infer[lm-eval])."""

    rules = (
        Rule(
            ("eval_average_weights", "ema_decay", "optimizer"),
            lambda v: (
                v.eval_average_weights and not v.ema_decay and v.optimizer != "schedule_free"
            ),
            "--eval-average-weights needs averaged weights: give --ema-decay, or --optimizer "
            "schedule_free.",
        ),
        Rule(
            ("eval_tasks",),
            lambda v: [
                f"--eval-tasks {task} is no LAMBADA:FILE, WIKITEXT103:FILE or lm-eval:NAME."
                for task in v.eval_tasks
                if task.partition(":")[0] not in ("LAMBADA", "WIKITEXT103", "lm-eval")
                or not task.partition(":")[2]
            ],
        ),
        Rule(
            ("eval_task_interval", "is_causal"),
            lambda v: v.eval_task_interval and not v.is_causal,
            "--eval-task-interval needs a model that predicts next tokens: leave it out.",
        ),
    )

    @property
    def interval(self) -> int:
        """Steps between validations; 0: the run has none."""
        return self.eval_interval if self.eval_iters else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig(Options):
    """Texts that the model writes while it trains."""

    sample_interval: int = option(0, minimum=0)
    """Steps between texts; 0: none. Weights are copied to a serving layout in memory, without
    files."""
    sample_prompts: tuple[str, ...] = option(("",), part_of={"sample_interval": ON})
    """Prompts of the texts; an empty prompt starts a new document."""
    sample_num_tokens: int = option(64, minimum=1, part_of={"sample_interval": ON})
    """Most tokens to write after each prompt."""
    sample_temperature: float = option(0.8, above=0, part_of={"sample_interval": ON})
    """Divisor of the logits when tokens are drawn; below 1 likely tokens become likelier."""

    rules = (
        Rule(
            ("sample_interval", "is_causal"),
            lambda v: v.sample_interval and not v.is_causal,
            "--sample-interval needs a model that predicts next tokens: leave it out.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig(Options):
    """Where and when checkpoints are written."""

    save: str = ""
    """Run folder for checkpoints, metrics and TensorBoard, or a URL such as s3://bucket/run
    for checkpoints alone; empty: nothing is written. A folder that holds an earlier run is
    refused, unless this run continues it or --overwrite is given."""
    overwrite: bool = option(False, needs={"save": ON})
    """Delete the checkpoints and numbers of an earlier run in --save, and begin anew."""
    save_interval: int = option(0, minimum=0, needs={"save": ON})
    """Steps between checkpoints; 0: only at the end."""
    save_optim: bool = True
    """Keep optimizer state in checkpoints."""
    save_hf: bool = option(False, needs={"save": ON})
    """Make every saved step a Hugging Face folder as well. Weights are then stored as complete
    tensors in model-*.safetensors, and not a second time."""
    async_save: bool = option(False, needs={"save": ON})
    """Write checkpoints in the background, from copies in host memory: training continues while
    the weights are copied and written. Each rank needs host memory for its share of one
    checkpoint."""
    async_save_timeout_minutes: float = option(10.0, above=0, part_of={"async_save": ON})
    """Minutes without progress after which a write in the background is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig(Options):
    """What a run starts from."""

    load: str = ""
    """Run folder or step folder to continue from, which also holds the shape of the model. If
    the folder has no checkpoint, the run starts from random weights."""
    pretrained_checkpoint: str = ""
    """Folder of the initial weights, used while --load holds no checkpoint; with --peft, folder
    of the base model."""
    auto_resume: bool = option(False, part_of={"save": ON})
    """Continue from the newest step in --save; if there is none, start by the other flags."""
    ckpt_step: int = option(0, minimum=0, needs={"load": ON})
    """Step to load from a run folder; 0: the latest."""
    finetune: bool = option(False, needs={"load": ON})
    """Take only the weights: count steps, samples and the schedule from zero."""
    load_optim: bool = True
    """Continue with the checkpoint's optimizer state."""
    load_rng: bool = True
    """Continue with the checkpoint's random streams."""
    load_checksums: bool = True
    """Check the bytes that are read against the checksums they were saved with."""
    exit_on_missing_checkpoint: bool = option(False, needs={"load": ON})
    """End with an error if the folder holds no checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(Options):
    """What is reported, where, and how often."""

    log_interval: int = option(100, minimum=1)
    """Steps between log lines; the first step always has one."""
    metrics_file: str = ""
    """JSON lines of the same numbers; empty: metrics.jsonl below --save."""
    tensorboard: bool = False
    """Write TensorBoard scalars."""
    tensorboard_dir: str = option("", part_of={"tensorboard": ON})
    """Folder of TensorBoard's files, which turns --tensorboard on; empty: tensorboard/ below
    --save."""
    tensorboard_queue_size: int = option(1000, minimum=1, part_of={"tensorboard": ON})
    """Numbers that wait for one write to TensorBoard's files."""
    loggers: tuple[LoggerName, ...] = ()
    """Services that get the numbers too, each by an extra of its name: mlflow, trackio and
    opentelemetry by their own environment variables, prometheus as metrics.prom in --save."""
    wandb_project: str = ""
    """Project of Weights & Biases that gets the numbers; empty: none. WANDB_MODE=offline keeps
    them on this host."""
    wandb_exp_name: str = option("", part_of={"wandb_project": ON})
    """Name of the run there; empty: one is made up."""
    wandb_entity: str = option("", part_of={"wandb_project": ON})
    """User or team there; empty: the user's own."""
    wandb_save_dir: str = option("", part_of={"wandb_project": ON})
    """Folder of its files on this host; empty: wandb/ below --save."""
    waterfall_interval: int = option(100, minimum=0)
    """Steps between two whose time is divided into compute, exposed communication by axis,
    bubble, data, host, optimizer and checkpoint, with alarms; 0: none."""
    layer_statistics_interval: int = option(0, minimum=0)
    """Steps between two of which norms of weights, gradients, updates and activations, shares
    of zeros and the largest attention logit are measured by layer; 0: none."""
    health_port: int = option(0, minimum=0)
    """Port on which the first rank of each host answers /health and /metrics over HTTP; 0: no
    such endpoint."""

    rules = (
        Rule(
            ("tensorboard", "tensorboard_dir", "save"),
            lambda v: v.tensorboard and not v.tensorboard_dir and not v.save,
            "--tensorboard needs a folder: give --save or --tensorboard-dir.",
        ),
        Rule(
            ("tensorboard", "tensorboard_dir", "save"),
            lambda v: v.tensorboard and "://" in (v.tensorboard_dir or v.save),
            "--tensorboard writes to a folder only: give --tensorboard-dir one.",
        ),
        Rule(
            ("loggers", "save"),
            lambda v: "prometheus" in v.loggers and (not v.save or "://" in v.save),
            "--loggers prometheus writes metrics.prom below --save: give --save a folder.",
        ),
    )


def unrecordable_experts(values: Any) -> Iterator[str]:
    """Yield the faults of expert options for a CUDA graph, in which the host cannot wait.

    Args:
        values: options of a run with experts, as ``Values``.
    """
    name = f"--cuda-graph-impl {values.cuda_graph_impl}"
    ranks, kind = values.expert_model_parallel_size, values.moe_token_dispatcher_type
    limit = values.moe_expert_rows_limit
    is_one_part = limit >= ranks or (kind == "symmetric" and not limit)
    is_spread = ranks > 1 or values.expert_tensor_size > 1
    if is_spread and not (kind in ("allgather", "symmetric") and is_one_part):
        yield (
            f"{name} cannot record experts that exchange tokens in other numbers each step: "
            "leave it out, or use --moe-token-dispatcher-type allgather or symmetric and "
            f"--moe-expert-rows-limit {ranks}."
        )
    is_grouped = values.moe_grouped_gemm and values.bf16
    if not is_grouped or any(size % 8 for size in expert_sizes(values)):
        yield (
            f"{name} can record experts only as grouped GEMMs: use --bf16, leave out "
            "--no-moe-grouped-gemm, and make their sizes multiples of 8; or leave it out."
        )


_DRAW_NOTHING = ("layernorm", "mlp_act", "moe_act")
"""Values of ``--recompute-modules`` that recompute elementwise operations alone."""


def _draws_while_recorded(values: Any) -> Iterator[str]:
    """Yield the options whose random numbers a recorded recomputation would draw again."""
    is_recorded = values.cuda_graph_impl != "none" and values.recompute_granularity
    modules = set(values.recompute_modules)
    is_drawn = values.recompute_granularity == "full" or not modules <= set(_DRAW_NOTHING)
    names = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps")
    for name in names if is_recorded and is_drawn else ():
        if getattr(values, name):
            yield (
                f"--cuda-graph-impl {values.cuda_graph_impl} cannot record recomputation that "
                f"draws {flag(name)} {getattr(values, name)} again, for which the host reads a "
                "random state: use 0, or --recompute-granularity selective with "
                f"--recompute-modules {', '.join(_DRAW_NOTHING)}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig(Options):
    """Snapshots of GPU memory."""

    record_memory_history: bool = False
    """Record which line allocated each tensor, and write torch's snapshot of a rank that runs
    out of GPU memory; mcore-train memory prints it by class of tensors."""
    memory_snapshot_path: str = "snapshot.pickle"
    """File of the snapshot; each rank adds its number, as in snapshot.rank3.pickle."""
    memory_snapshot_step: int = option(0, minimum=0, needs={"record_memory_history": ON})
    """Step after which each rank writes its snapshot too; 0: only out of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig(Options):
    """Profiles of some steps."""

    profile: bool = option(False, needs={"save": ON})
    """Profile some steps with torch's profiler, into profiles/ below --save; under nsys, mark
    them for its --capture-range cudaProfilerApi instead."""
    profile_step_start: int = option(10, minimum=0, part_of={"profile": ON})
    """Step after which the profile begins."""
    profile_step_end: int = option(12, minimum=1, part_of={"profile": ON})
    """Last step of the profile."""
    profile_ranks: tuple[int, ...] = option((0,), part_of={"profile": ON})
    """Global ranks that are profiled. Megatron's default: none, which is rank 0."""

    rules = (
        Rule(
            ("profile_step_start", "profile_step_end"),
            lambda v: v.profile and v.profile_step_end <= v.profile_step_start,
            "--profile-step-end {profile_step_end} must be above --profile-step-start "
            "{profile_step_start}.",
        ),
        Rule(
            ("profile", "save"),
            lambda v: v.profile and "://" in v.save,
            "--profile cannot write to {save}: give --save a folder.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Options):
    """The process: seed, device, when to stop early."""

    seed: int = option(1234, minimum=0, below=2**32)
    """Seed of weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: CUDA where present."""
    exit_interval: int = option(0, minimum=0)
    """Save and end after a step that this divides; 0: never."""
    exit_duration_in_mins: float | Literal["auto"] = option(0.0, minimum=0)
    """Save and end this many minutes after the program's start; 0: never; auto: before Slurm
    ends the job (SLURM_JOB_END_TIME), by 5 minutes or twice the longest save so far."""
    exit_signal: tuple[ExitSignal, ...] = ("SIGUSR1", "SIGUSR2")
    """Signals that save and end a run as SIGTERM and SIGINT always do: batch systems warn with
    them. Megatron's default: SIGTERM."""
    deterministic_mode: bool = option(
        False,
        excludes={
            "attention_backend": Because(
                "whose backward adds in any order",
                "fused",
                instead="use flash4, flash or unfused",
            )
        },
    )
    """Use only algorithms that give the same bits in every run with the same number of ranks;
    slower. On a CPU every run is repeatable anyway."""
    check_for_nan_in_loss_and_grad: bool = True
    """End the run, and save nothing more, when the gradient norm is nan or infinite."""
    check_weight_hash_across_dp_replicas_interval: int = option(0, minimum=0)
    """Steps after which the copies of weights on data-parallel ranks, and tied ones, are
    compared to the last bit, and a run whose copies differ ends; 0: in the first step only."""
    cuda_graph_impl: Literal["none", "full_iteration", "local"] = option(
        "none",
        excludes={
            "cpu_offloading": Because("whose copies the host orders"),
            "moe_router_load_balancing_type": Because(
                "as no graph can record rounds that the host waits for", "sinkhorn"
            ),
        },
        selects_path="graphs.{cuda_graph_impl}",
    )
    """Launch forward and backward of a whole step as one CUDA graph (full_iteration): faster
    where kernels are shorter than their launches, as in small models. Or a graph for each layer
    and micro-batch in flight (local), for pipelines and recomputed norms too; not timed yet.
    The same bits. A recorded step waits for all gathers of --overlap-param-gather first."""
    cuda_graph_warmup_steps: int = option(
        3, minimum=1, part_of={"cuda_graph_impl": ("full_iteration", "local")}, shrinks_to=1
    )
    """Steps before the graph is recorded, and again after the batch size changes."""
    manual_gc_interval: int = option(100, minimum=0)
    """Steps after which all ranks collect Python's garbage together, and never else; 0: each
    rank by Python's own thresholds. Megatron's default: 0."""

    rules = (
        Rule(
            ("cuda_graph_impl", "is_fully_sharded", "sharding"),
            lambda v: v.cuda_graph_impl != "none" and v.is_fully_sharded,
            "--cuda-graph-impl {cuda_graph_impl} cannot record "
            "--data-parallel-sharding-strategy {sharding}, whose weights move in memory: leave "
            "out one of the two.",
        ),
        Rule(
            ("cuda_graph_impl", "num_experts"),
            lambda v: (
                v.num_experts
                and v.cuda_graph_impl == "full_iteration"
                and unrecordable_experts(v)
            ),
        ),
        Rule(
            ("cuda_graph_impl", "num_experts", "parallel_residual"),
            lambda v: [
                f"{line} Beside attention (--parallel-residual) they cannot be left out."
                for line in unrecordable_experts(v)
                if v.num_experts
                and v.cuda_graph_impl == "local"
                and v.parallel_residual != "off"
            ],
        ),
        Rule(
            ("cuda_graph_impl", "pipeline_model_parallel_size"),
            lambda v: (
                v.cuda_graph_impl == "full_iteration" and v.pipeline_model_parallel_size > 1
            ),
            "--cuda-graph-impl full_iteration cannot record pipeline stages, whose hosts wait "
            "for messages: use local, or --pipeline-model-parallel-size 1.",
        ),
        *(
            Rule(
                ("cuda_graph_impl", name),
                lambda v, name=name: v.cuda_graph_impl == "local" and getattr(v, name) > 1,
                f"--cuda-graph-impl local was not tried on GPUs with {flag(name)} {{{name}}}, "
                "whose messages would be in the graphs: leave out one of the two.",
            )
            for name in ("tensor_model_parallel_size", "context_parallel_size")
        ),
        Rule(
            ("cuda_graph_impl", "is_causal"),
            lambda v: v.cuda_graph_impl == "local" and not v.is_causal,
            "--cuda-graph-impl local records layers of mcore-train gpt alone: leave it out.",
        ),
        Rule(
            ("cuda_graph_impl", "splits_backward", "overlap_moe_expert_parallel_comm"),
            lambda v: (
                v.cuda_graph_impl == "local"
                and (v.splits_backward or v.overlap_moe_expert_parallel_comm)
            ),
            "--cuda-graph-impl local cannot cut a layer's backward: use --pipeline-schedule "
            "1f1b or interleaved, without --overlap-moe-expert-parallel-comm.",
        ),
        Rule(
            ("cuda_graph_impl", "recompute_method", "recompute_num_layers"),
            lambda v: (
                v.cuda_graph_impl == "local"
                and v.recompute_method != "block"
                and v.recompute_num_layers > 1
            ),
            "--cuda-graph-impl local recomputes layers one by one: use --recompute-num-layers "
            "1, or --recompute-method block.",
        ),
        Rule(
            ("cuda_graph_impl", "recompute_granularity", "recompute_modules"),
            _draws_while_recorded,
        ),
        Rule(
            ("cuda_graph_impl", "reset_attention_mask", "dataloader_inter_document_masking"),
            lambda v: (
                v.cuda_graph_impl != "none"
                and (v.reset_attention_mask or v.dataloader_inter_document_masking)
            ),
            "--cuda-graph-impl {cuda_graph_impl} cannot record packed documents, whose borders "
            "change from step to step: leave it out.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig(Options):
    """What is watched while a run trains: hangs, slow ranks, wrong results."""

    end_on_hang: bool = False
    """End the run when a step takes twice the longest step before it and 5 s, so that a
    launcher starts it again; off: such a step is logged with the ranks that hold it up, and
    the collectives' timeout (--distributed-timeout-minutes) ends the run."""
    log_straggler: bool = False
    """Score each rank against the others at an interval, and name ranks that stay slow with
    their hosts: matrix products, messages to a neighbour, waits for data, and on a CPU the
    rank's own part of a step."""
    straggler_interval: int = option(10, minimum=1, part_of={"log_straggler": ON})
    """Steps between two scores; it grows until scores cost less than 0.3 % of the time. A slow
    rank is named after two."""
    straggler_threshold: float = option(0.7, above=0, below=1)
    """Rate, as a share of the median of other ranks, below which a rank is slow; of the work in
    a step of --waterfall-interval, and of what --log-straggler scores."""
    rerun_on_mismatch: bool = option(
        False,
        excludes={
            "fp16": Because("whose scaled gradients overflow in sound steps"),
            "num_experts": Because("whose routers would count tokens twice"),
            "cuda_graph_impl": Because(
                "which does not launch a step singly", "full_iteration", "local"
            ),
            "is_fully_sharded": Because("where no rank holds the gradients of its own batch"),
        },
    )
    """Compute a step again, by the same ranks and by all replicas of the model, if its gradient
    norm is not finite or a spike, or if replicas of weights differ. A rank whose device
    computes wrongly is named, and the run ends; an error that happened once is mended."""
    spike_factor: float = option(10.0, above=1, part_of={"rerun_on_mismatch": ON})
    """A gradient norm above so many times the largest of the last 128 steps is a spike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeConfig(Options):
    """What is done with steps that would spoil a run: spikes of loss or gradient norm."""

    spike_policy: Literal["none", "skip", "rewind", "stop"] = "none"
    """What is done with a step whose loss or gradient norm is above the mean of the last
    --spike-window steps by --spike-sigmas standard deviations, or not finite. Such a step never
    changes weights or optimizer. skip: go on with the next batch; for single bad documents.
    rewind: take weights and optimizer from a checkpoint and go on with the next batch; where
    the loss does not recover, or has grown for some steps before. stop: save and end the run.
    Each spike is a line of spikes.jsonl in --save, which mcore-train explain reads."""
    spike_sigmas: float = option(
        6.0, above=0, part_of={"spike_policy": ("skip", "rewind", "stop")}
    )
    """Standard deviations above the mean from which on a step is a spike."""
    spike_window: int = option(
        128, minimum=16, part_of={"spike_policy": ("skip", "rewind", "stop")}, shrinks_to=16
    )
    """Last steps that a step is compared with. Until so many are known, only numbers that are
    not finite are spikes. A spike counts among them as the limit that it was above."""
    spike_limit: int = option(10, minimum=1, part_of={"spike_policy": ("skip", "rewind")})
    """Spikes within --spike-window steps after which the run ends, since it has another cause
    than single documents."""
    spike_rewind_steps: int = option(100, minimum=1, part_of={"spike_policy": "rewind"})
    """Steps before a spike that the weights go back, at least: to the newest checkpoint that is
    so old, or to the oldest there is. PaLM went back about 100 steps (arXiv:2204.02311)."""
    iterations_to_skip: tuple[int, ...] = ()
    """Steps whose batches are read and left out, as in Megatron by the steps done before: 41
    leaves out the step that the log calls iteration 42. Weights, optimizer and learning-rate
    schedule stay. mcore-train explain prints the number of each spike."""

    rules = (
        Rule(
            ("spike_policy", "save", "save_interval"),
            lambda v: v.spike_policy == "rewind" and not (v.save and v.save_interval),
            "--spike-policy rewind goes back to checkpoints of this run: give --save and "
            "--save-interval, or use skip.",
        ),
        Rule(
            ("spike_policy", "save_optim"),
            lambda v: v.spike_policy == "rewind" and not v.save_optim,
            "--spike-policy rewind goes back to the optimizer of a checkpoint too: leave "
            "--no-save-optim out.",
        ),
        Rule(
            ("iterations_to_skip",),
            lambda v: any(step < 0 for step in v.iterations_to_skip),
            "--iterations-to-skip {iterations_to_skip}: give numbers of 0 or more.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig(Options):
    """How this command itself is read and started."""

    model: str = ""
    """Begin from the shape of a published model, such as llama-3-8b: see mcore-models list."""
    recipe: tuple[str, ...] = ()
    """TOML files of options, laid over each other from left to right, then the flags."""
    megatron_defaults: bool = False
    """Take Megatron's defaults of the model where options are left out: LayerNorm, learned
    positions, biases, GELU without a gate, dropout of 0.1 (and of --multi-latent-attention and
    --fp8-format). A --load checkpoint's model wins over them."""
    nproc: int = option(0, minimum=0)
    """Ranks to start on this host; 0: this process alone, or what torchrun started."""
    find_micro_batch_size: bool = False
    """Take the fastest micro-batch that fits, which the planner proposes and one step, trained
    and forgotten, confirms; --micro-batch-size auto is the same."""
    dry_run: bool = False
    """Resolve the run of --world-size ranks on one CPU, print its groups, schedule, bytes,
    checkpoint and data, and train nothing."""
    world_size: int = option(0, minimum=0, needs={"dry_run": ON})
    """Ranks that --dry-run resolves; 0: --nproc, or one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig(Options):
    """How ``mcore-train verify`` checks a layout."""

    certificate: str = ""
    """File for the result as JSON, also of a verification that stops early; empty: only the
    table is printed."""
    quiet: bool = False
    """Print only what failed and the verdict."""
    max_ranks: int = option(8, minimum=1)
    """Ranks of the small run; larger degrees are halved until it fits."""
