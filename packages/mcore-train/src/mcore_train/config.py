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
from mcore_parallel.optimizers.config import OptimizerName

DecayStyle = Literal[
    "constant", "linear", "cosine", "inverse-square-root", "WSD", "power", "stages"
]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]
LoggerName = Literal["mlflow", "trackio", "prometheus", "opentelemetry"]
ExitSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig(Options):
    """Batch sizes, sequence length, and the length of the run."""

    micro_batch_size: int = option(1, minimum=1)
    """Sequences in one forward pass of one data-parallel rank. Megatron's default: none."""
    global_batch_size: int = option(0, minimum=0)
    """Sequences in one step over all ranks; 0: one micro-batch per data-parallel rank."""
    rampup_batch_size: tuple[int, ...] = ()
    """Grow the global batch: START INCREMENT SAMPLES begins with START sequences and adds
    INCREMENT at equal intervals over the first SAMPLES sequences, up to --global-batch-size.
    Needs --train-samples."""
    step_batch_size_schedule: str = option(
        "", excludes={"rampup_batch_size": Because("which sets the same sizes")}
    )
    """Change the global batch in steps: TOKENS:SIZE ..., such as "0:64 2B:128 10B:256", uses
    SIZE sequences once TOKENS tokens are trained (suffixes K, M, B, T: 10^3 to 10^12). The
    largest size is --global-batch-size."""
    batch_size_lr_scaling: Literal["none", "sqrt", "linear"] = option(
        "none",
        needs=(
            When(
                "has_batch_sizes",
                bool,
                "--step-batch-size-schedule or --rampup-batch-size",
                "as the batch size is constant otherwise",
            ),
        ),
    )
    """Scale the learning rate of steps smaller than --global-batch-size: sqrt, by the square
    root of their share of it; linear, by the share."""
    seq_length: int = option(1024, minimum=1)
    """Tokens in one sequence. Megatron's default: none."""
    seq_length_schedule: str = option(
        "", needs={"reset_position_ids": ON, "reset_attention_mask": ON}
    )
    """Begin with shorter texts: TOKENS:LENGTH ..., such as "0:512 2B:2048 6B:8192". Rows of
    --seq-length are cut into pieces of LENGTH tokens, without attention between pieces, so the
    tokens of a step stay the same. The last length is --seq-length."""
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
    """Batch sizes and sequence lengths of a T5."""

    decoder_seq_length: int = option(128, minimum=1)
    """Decoder tokens in one sequence; --seq-length counts the encoder's tokens. Megatron's
    default: none."""

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
_FIXED = {"loss_scale": Because("which fixes the scale")}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig(Options):
    """Number format of parameters and activations."""

    precision: Literal["", "auto"] = option("", excludes={"bf16": ON, "fp16": ON})
    """auto: the 16-bit format that the GPU multiplies in (bf16 from Ampere on, fp16 on Volta
    and Turing), float32 on a CPU. Empty: --bf16 or --fp16 as given."""
    bf16: bool = option(False, excludes={"fp16": ON})
    """Parameters and activations in bfloat16; main weights and optimizer in float32."""
    fp16: bool = False
    """Parameters and activations in float16, main weights and optimizer in float32; the loss
    is scaled, and a step whose gradients overflow is skipped."""
    loss_scale: float = option(0.0, minimum=0, needs=_SCALED)
    """Fixed loss scale under --fp16, best a power of two; gradients that overflow end the run,
    where Megatron would skip steps forever. 0: a dynamic loss scale."""
    initial_loss_scale: float = option(2.0**32, above=0, needs=_SCALED, idle_with=_FIXED)
    """Dynamic loss scale of the first step under --fp16."""
    min_loss_scale: float = option(1.0, above=0, needs=_SCALED, idle_with=_FIXED)
    """Smallest dynamic loss scale; gradients that overflow at this scale end the run."""
    loss_scale_window: int = option(1000, minimum=1, needs=_SCALED, idle_with=_FIXED)
    """Steps without overflow after which the loss scale is doubled."""
    hysteresis: int = option(2, minimum=1, needs=_SCALED, idle_with=_FIXED)
    """Number of the overflow within a window at which the loss scale is halved; each later
    overflow halves it again."""

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
            "--precision auto is resolved on the GPU that trains: give --bf16 or --fp16 here.",
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
    """Optimizer, learning rate, weight decay and gradient clipping."""

    optimizer: OptimizerName = "adam"
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
    """How weight decay changes from --start-weight-decay to --end-weight-decay."""
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
    """Learning rates, weight decay and update rules of single groups of parameters."""

    decoupled_lr: float = option(0.0, minimum=0, shrinks_to=2e-2)
    """Highest learning rate of embeddings and the output head; 0: --lr."""
    decoupled_min_lr: float = option(0.0, minimum=0, needs={"decoupled_lr": ON})
    """Learning rate of embeddings and the output head at the end of the decay."""
    apply_wd_to_qk_layernorm: bool = option(False, needs={"qk_layernorm": ON})
    """Apply weight decay to the norms of queries and keys too."""
    layer_lr_decay: float = option(1.0, above=0, maximum=1)
    """Ratio of the learning rate of each layer to that of the next layer, for fine-tuning;
    embeddings count as the layer before the first. 1: equal learning rates."""
    parameter_groups: tuple[str, ...] = ()
    """Entries PATTERN KEY=VALUE ..., each quoted. PATTERN is a kind (embedding, head, norm,
    bias, router, vector, matrix) or a pattern of logical names such as blocks.*.mlp.*. Keys are
    lr and min_lr (highest and last learning rate), lr_factor, decay_factor (of --weight-decay),
    beta1, beta2 (of AdamW) and optimizer=adam (of a matrix). Later entries win."""

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
    """Learning-rate schedule; steps are converted to sequences internally."""

    lr_decay_style: DecayStyle = "linear"
    """Shape of the decay after the warm-up. power: (steps / --lr-power-iters) to the power
    -(--lr-power); stages: the stages of --lr-stages, which include the warm-up."""
    lr_power: float = option(0.5, above=0, part_of={"lr_decay_style": "power"})
    """Exponent by which the learning rate falls; 0.5 is the inverse square root."""
    lr_power_iters: int = option(0, minimum=0, part_of={"lr_decay_style": "power"})
    """Steps at the highest learning rate, counted from the first step, before it falls; 0: the
    warm-up alone."""
    lr_stages: tuple[str, ...] = option((), part_of={"lr_decay_style": "stages"})
    """Consecutive stages STYLE:STEPS:FACTOR, such as linear:100:1 constant:900:1 cosine:500:0.1
    minus_sqrt:100:0. Each moves the learning rate from its current value, at first
    --lr-warmup-init, to FACTOR times --lr; styles are constant, linear, cosine, exponential and
    minus_sqrt. After the last stage the learning rate is constant."""
    lr_decay_iters: int = option(0, minimum=0)
    """Steps after which --min-lr is reached; 0: the whole run."""
    lr_decay_samples: int = option(0, minimum=0, excludes={"lr_decay_iters": ON})
    """Sequences after which --min-lr is reached; 0: the whole run."""
    lr_warmup_iters: int = option(0, minimum=0)
    """Steps of linear warm-up."""
    lr_warmup_samples: int = option(0, minimum=0, excludes={"lr_warmup_iters": ON})
    """Sequences of linear warm-up."""
    lr_warmup_fraction: float = option(
        0.0, minimum=0, below=1, excludes={"lr_warmup_iters": ON, "lr_warmup_samples": ON}
    )
    """Linear warm-up as a fraction of the decay's length."""
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
    """Sequences of the last part of a WSD schedule, or of a power schedule."""
    override_opt_param_scheduler: bool = False
    """On resume, use the schedule of the flags even if the checkpoint has a different one."""
    use_checkpoint_opt_param_scheduler: bool = option(
        False, excludes={"override_opt_param_scheduler": ON}
    )
    """On resume, use the schedule of the checkpoint even if the flags give a different one."""

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
            "out --lr-warmup-iters, --lr-warmup-samples and --lr-warmup-fraction.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig(Options):
    """Validation during training."""

    eval_interval: int = option(0, minimum=0)
    """Steps between validations; 0: none. A run that validates also scores its test data, if
    there are any, at the end."""
    eval_iters: int = option(10, minimum=0)
    """Global batches of one validation; 0: no validation. Megatron's default: 100."""
    eval_at_start: bool = option(False, needs={"eval_interval": ON})
    """Validate before the first step as well."""
    eval_only: bool = option(False, needs={"eval_interval": ON})
    """Validate the initial or loaded weights, score the test data if there are any, and end
    without a training step or a save."""
    eval_micro_batch_size: int = option(0, minimum=0, needs={"eval_interval": ON})
    """Sequences in one forward pass of a validation. It can be larger than in training, as no
    activations are kept; the samples are the same. 0: --micro-batch-size."""
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
                f"--eval-tasks {task} must be LAMBADA:FILE, WIKITEXT103:FILE or lm-eval:NAME."
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
    """Steps between sample texts; 0: none. Weights are copied to a serving layout in memory,
    without files."""
    sample_prompts: tuple[str, ...] = option(("",), part_of={"sample_interval": ON})
    """Prompts of the texts; an empty prompt starts a new document."""
    sample_num_tokens: int = option(64, minimum=1, part_of={"sample_interval": ON})
    """Largest number of tokens to write after each prompt."""
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
    """Folder, interval and form of checkpoints."""

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
    """Minutes without progress after which a background write is abandoned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig(Options):
    """Checkpoint that a run starts from."""

    load: str = ""
    """Run folder or step folder to continue from, which also holds the shape of the model. If
    the folder has no checkpoint, the run starts from random weights."""
    pretrained_checkpoint: str = ""
    """Folder of the initial weights, used while --load holds no checkpoint; with --peft, folder
    of the base model."""
    auto_resume: bool = option(False, part_of={"save": ON})
    """Continue from the newest step in --save; if there is none, start as the other flags
    specify."""
    ckpt_step: int = option(0, minimum=0, needs={"load": ON})
    """Step to load from a run folder; 0: the latest step."""
    finetune: bool = option(False, needs={"load": ON})
    """Take only the weights: count steps, samples and the schedule from zero."""
    load_optim: bool = True
    """Continue with the checkpoint's optimizer state."""
    load_rng: bool = True
    """Continue with the checkpoint's random streams."""
    load_checksums: bool = True
    """Compare the bytes that are read with the checksums of the checkpoint."""
    exit_on_missing_checkpoint: bool = option(False, needs={"load": ON})
    """End with an error if the folder holds no checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(Options):
    """Reports, loggers and measurements of a run."""

    log_interval: int = option(100, minimum=1)
    """Steps between log lines; the first step always has one."""
    metrics_file: str = ""
    """File of the logged numbers as JSON lines; empty: metrics.jsonl below --save."""
    tensorboard: bool = False
    """Write TensorBoard scalars."""
    tensorboard_dir: str = option("", part_of={"tensorboard": ON})
    """Folder of TensorBoard's files; giving it turns --tensorboard on. Empty: tensorboard/
    below --save."""
    tensorboard_queue_size: int = option(1000, minimum=1, part_of={"tensorboard": ON})
    """Numbers that are buffered before a write to TensorBoard's files."""
    loggers: tuple[LoggerName, ...] = ()
    """Further loggers of the numbers, each an extra of its name: mlflow, trackio and
    opentelemetry are configured by their own environment variables, prometheus writes
    metrics.prom in --save."""
    wandb_project: str = ""
    """Project of Weights & Biases to which the numbers are logged; empty: none.
    WANDB_MODE=offline keeps them on this host."""
    wandb_exp_name: str = option("", part_of={"wandb_project": ON})
    """Name of the run in Weights & Biases; empty: a generated name."""
    wandb_entity: str = option("", part_of={"wandb_project": ON})
    """User or team in Weights & Biases; empty: the user's default."""
    wandb_save_dir: str = option("", part_of={"wandb_project": ON})
    """Folder of Weights & Biases' files on this host; empty: wandb/ below --save."""
    waterfall_interval: int = option(100, minimum=0)
    """Steps between two measured steps, whose time is divided into compute, exposed
    communication by axis, bubble, data, host, optimizer and checkpoint, with alarms; 0:
    none."""
    layer_statistics_interval: int = option(0, minimum=0)
    """Steps between measurements of each layer: norms of weights, gradients, updates and
    activations, shares of zeros and the largest attention logit; 0: none."""
    health_port: int = option(0, minimum=0)
    """Port on which the first rank of each host answers /health and /metrics over HTTP; 0: no
    endpoint."""

    rules = (
        Rule(
            ("tensorboard", "tensorboard_dir", "save"),
            lambda v: v.tensorboard and not v.tensorboard_dir and not v.save,
            "--tensorboard needs a folder: give --save or --tensorboard-dir.",
        ),
        Rule(
            ("tensorboard", "tensorboard_dir", "save"),
            lambda v: v.tensorboard and "://" in (v.tensorboard_dir or v.save),
            "--tensorboard cannot write to a URL: give --tensorboard-dir a folder.",
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
            f"{name} cannot record an exchange of tokens whose sizes change at each step: "
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
    """File of the snapshot; each rank adds its number to the name, as in
    snapshot.rank3.pickle."""
    memory_snapshot_step: int = option(0, minimum=0, needs={"record_memory_history": ON})
    """Step after which each rank also writes a snapshot; 0: only when out of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig(Options):
    """Profile of a range of steps."""

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
    """Seed, device, early stops, CUDA graphs and checks of a process."""

    seed: int = option(1234, minimum=0, below=2**32)
    """Seed of weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: CUDA if present."""
    exit_interval: int = option(0, minimum=0)
    """Save and end after the first step that is a multiple of this; 0: never."""
    exit_duration_in_mins: float | Literal["auto"] = option(0.0, minimum=0)
    """Save and end this many minutes after the program's start; 0: never; auto: before Slurm
    ends the job (SLURM_JOB_END_TIME), by 5 minutes or twice the longest save so far."""
    exit_signal: tuple[ExitSignal, ...] = ("SIGUSR1", "SIGUSR2")
    """Further signals on which a run saves and ends, as it always does on SIGTERM and SIGINT;
    batch systems send such signals as a warning. Megatron's default: SIGTERM."""
    deterministic_mode: bool = option(
        False,
        excludes={
            "attention_backend": Because(
                "whose backward sums in a varying order",
                "fused",
                instead="use flash4, flash or unfused",
            )
        },
    )
    """Use only algorithms that give the same bits in every run with the same number of ranks;
    slower. On a CPU every run is repeatable without it."""
    check_for_nan_in_loss_and_grad: bool = True
    """End the run without a further save when the gradient norm is nan or infinite."""
    check_weight_hash_across_dp_replicas_interval: int = option(0, minimum=0)
    """Steps between bitwise comparisons of the copies of weights on data-parallel ranks and of
    tied weights; a difference ends the run. 0: in the first step only."""
    cuda_graph_impl: Literal["none", "full_iteration", "local"] = option(
        "none",
        excludes={
            "cpu_offloading": Because("whose copies the host schedules"),
            "moe_router_load_balancing_type": Because(
                "as no graph can record rounds that the host waits for", "sinkhorn"
            ),
        },
        selects_path="graphs.{cuda_graph_impl}",
    )
    """CUDA graphs of forward and backward, which compute the same bits. full_iteration: one
    graph of a whole step, faster if kernels are shorter than their launches, as in small
    models. local: a graph for each layer and micro-batch in flight, also for pipelines and
    recomputed norms; not timed yet. A recorded step first waits for all gathers of
    --overlap-param-gather."""
    cuda_graph_warmup_steps: int = option(
        3, minimum=1, part_of={"cuda_graph_impl": ("full_iteration", "local")}, shrinks_to=1
    )
    """Steps before the graph is recorded, and again after the batch size changes."""
    manual_gc_interval: int = option(100, minimum=0)
    """Steps between Python's garbage collections, which all ranks do in the same step; 0: each
    rank collects by Python's own thresholds. Megatron's default: 0."""

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
                f"{line} With --parallel-residual experts are always part of the graph."
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
                f"--cuda-graph-impl local is not tested on GPUs with {flag(name)} {{{name}}}, "
                "whose messages would be in the graphs: leave out one of the two.",
            )
            for name in ("tensor_model_parallel_size", "context_parallel_size")
        ),
        Rule(
            ("cuda_graph_impl", "is_causal"),
            lambda v: v.cuda_graph_impl == "local" and not v.is_causal,
            "--cuda-graph-impl local records only layers of mcore-train gpt: leave it out.",
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
    """Detection of hangs, slow ranks and wrong results."""

    end_on_hang: bool = False
    """End the run when a step takes longer than twice the longest step before it plus 5 s, so
    that a launcher restarts it; off: such a step is logged with the ranks that delay it, and
    the collectives' timeout (--distributed-timeout-minutes) ends the run."""
    log_straggler: bool = False
    """Score the speed of each rank against the others at an interval, and report ranks that
    stay slow with their hosts. Scored are matrix products, messages to a neighbour, waits for
    data, and on a CPU the rank's own part of a step."""
    straggler_interval: int = option(10, minimum=1, part_of={"log_straggler": ON})
    """Steps between two scores; it grows until scores cost less than 0.3 % of the time. A rank
    is reported after two slow scores."""
    straggler_threshold: float = option(0.7, above=0, below=1)
    """Speed, as a share of the median of the other ranks, below which a rank is slow; for the
    work in a step of --waterfall-interval, and for what --log-straggler scores."""
    rerun_on_mismatch: bool = option(
        False,
        excludes={
            "fp16": Because("whose scaled gradients overflow in healthy steps"),
            "num_experts": Because("whose routers would count tokens twice"),
            "cuda_graph_impl": Because(
                "which replays steps as graphs", "full_iteration", "local"
            ),
            "is_fully_sharded": Because("where no rank holds the gradients of its own batch"),
        },
    )
    """Compute a step again, on the same ranks and on all replicas of the model, if its gradient
    norm is not finite or a spike, or if replicas of weights differ. If a device computes wrong
    results, its rank is reported and the run ends; a transient error is corrected."""
    spike_factor: float = option(10.0, above=1, part_of={"rerun_on_mismatch": ON})
    """A gradient norm above so many times the largest of the last 128 steps is a spike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeConfig(Options):
    """Reaction to spikes of the loss or gradient norm."""

    spike_policy: Literal["none", "skip", "rewind", "stop"] = "none"
    """Reaction to a step whose loss or gradient norm is above the mean of the last
    --spike-window steps by --spike-sigmas standard deviations, or not finite. Such a step never
    changes weights or optimizer. skip: continue with the next batch, for single bad documents.
    rewind: load weights and optimizer from a checkpoint and continue with the next batch, if
    the loss does not recover or grew for some steps before. stop: save and end the run. Each
    spike is a line of spikes.jsonl in --save, which mcore-train explain reads."""
    spike_sigmas: float = option(
        6.0, above=0, part_of={"spike_policy": ("skip", "rewind", "stop")}
    )
    """Standard deviations above the mean from which on a step is a spike."""
    spike_window: int = option(
        128, minimum=16, part_of={"spike_policy": ("skip", "rewind", "stop")}, shrinks_to=16
    )
    """Number of last steps with which a step is compared; before so many steps, only numbers
    that are not finite are spikes. A spike enters the window with the limit that it
    exceeded."""
    spike_limit: int = option(10, minimum=1, part_of={"spike_policy": ("skip", "rewind")})
    """Spikes within --spike-window steps that end the run, since so many have another cause
    than single documents."""
    spike_rewind_steps: int = option(100, minimum=1, part_of={"spike_policy": "rewind"})
    """Least number of steps before a spike to which the weights return: the newest checkpoint
    that is old enough is used, or else the oldest. PaLM went back about 100 steps
    (arXiv:2204.02311)."""
    iterations_to_skip: tuple[int, ...] = ()
    """Steps whose batches are read but not trained on, numbered as in Megatron by the steps
    done before: 41 skips the step that is logged as iteration 42. Weights, optimizer and
    learning-rate schedule do not change. mcore-train explain prints the number of each
    spike."""

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
            "out --no-save-optim.",
        ),
        Rule(
            ("iterations_to_skip",),
            lambda v: any(step < 0 for step in v.iterations_to_skip),
            "--iterations-to-skip {iterations_to_skip}: give numbers of 0 or more.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig(Options):
    """Sources of options, local ranks and dry runs."""

    model: str = ""
    """Published model whose shape is the default of the model's options, such as llama-3-8b;
    mcore-models list prints all."""
    recipe: tuple[str, ...] = ()
    """TOML files of options. Later files override earlier files, and flags override all
    files."""
    megatron_defaults: bool = False
    """Use Megatron's defaults for options of the model that are left out: LayerNorm, learned
    positions, biases, GELU without a gate, dropout of 0.1 (also for --multi-latent-attention
    and --fp8-format). The model of a --load checkpoint overrides them."""
    nproc: int = option(0, minimum=0)
    """Ranks to start on this host; 0: only this process, or the ranks that torchrun started."""
    find_micro_batch_size: bool = False
    """Use the fastest micro-batch size that fits: the planner proposes a size, and one
    discarded training step confirms it. Equal to --micro-batch-size auto."""
    dry_run: bool = False
    """Resolve the run of --world-size ranks on one CPU, and print its groups, schedule, bytes,
    checkpoint and data without training."""
    world_size: int = option(0, minimum=0, needs={"dry_run": ON})
    """Ranks of the world that --dry-run resolves; 0: --nproc, or one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig(Options):
    """Output and size of ``mcore-train verify``."""

    certificate: str = ""
    """File for the result as JSON, also of a verification that stops early; empty: only the
    table is printed."""
    quiet: bool = False
    """Print only failed checks and the verdict."""
    max_ranks: int = option(8, minimum=1)
    """Ranks of the small run; larger degrees are halved until it fits."""
