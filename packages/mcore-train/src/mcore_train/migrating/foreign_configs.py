"""Tables that translate configs of NeMo, Megatron-Bridge, torchtitan and DeepSpeed to flags.

The row of a key is a text, or a function that returns the text, given the value and the
complete flat table. A text is flags (``--lr {}``, with the value in place of the braces), a
refusal that begins with ``refused:``, or a note. A flag without braces is written if the value
is true.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

Table = Mapping[str, Any]
Row = str | Callable[[Any, Table], str]

SWITCHED_OFF = "it is off there"
_LOOP = "it belongs to that program's loop and has no counterpart"
_MEMORY = "buffers of gathered weights need no tuning"


def flat(table: Table, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{name}.")
        else:
            leaves[name] = value
    return leaves


def answer(row: Row, value: Any, table: Table) -> str:
    """Return the translation of a key: flags, a note, or a text after ``refused:``."""
    if not isinstance(row, str):
        return row(value, table)
    text = row
    if not text.startswith("--"):
        return text
    if "{}" not in text:
        return text if value else SWITCHED_OFF
    words = value if isinstance(value, list) else [value]
    return text.replace("{}", " ".join(shlex.quote(str(word)) for word in words))


def megatron_flag(key: str, value: Any) -> str:
    """Return the flag with the name of a Megatron field, and its value."""
    flag = "--" + key.rpartition(".")[2].replace("_", "-")
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return answer(flag + " {}", value, {})


def _precision(value: Any, _: Table) -> str:
    name = str(value).lower()
    if "bf16" in name or "bfloat16" in name:
        return "--bf16"
    if name in ("32", "fp32", "float32", "32-true"):
        return "float32 is the default"
    return "--fp16" if "16" in name else f"refused: use --bf16, --fp16 or float32 for {value}."


def _mixed(value: Any, table: Table) -> str:
    name = str(value).lower()
    if "fp8" not in name:
        return _precision(value, table)
    recipes = {"delayed": "delayed", "current": "tensorwise", "subchannel": "blockwise"}
    recipe_name = next((recipe for word, recipe in recipes.items() if word in name), "")
    if not recipe_name:
        return f"refused: use --fp8-format and --fp8-recipe for {value}."
    fp8_format = "e4m3" if recipe_name == "blockwise" else "hybrid"
    return f"--bf16 --fp8-format {fp8_format} --fp8-recipe {recipe_name}"


def _norm(value: Any, _: Table) -> str:
    kinds = {"rmsnorm": "--normalization RMSNorm", "layernorm": "--normalization LayerNorm"}
    kinds["layernorm1p"] = "--normalization LayerNorm --apply-layernorm-1p"
    return kinds.get(str(value).lower(), f"refused: use --normalization for {value}.")


def _activation(value: Any, table: Table) -> str:
    name = str(value).lower().rpartition(".")[2].removeprefix("fast-").strip("<>' ")
    is_gated = bool(table.get("model.gated_linear_unit"))
    if name == "swiglu" or (name in ("silu", "swish") and is_gated):
        return "--swiglu"
    if name == "gelu" and not is_gated:
        return "--no-swiglu"
    known = {"squared-relu": "--squared-relu", "squared_relu": "--squared-relu"}
    return known.get(name, f"refused: activation {value} is not supported; see --swiglu.")


def _blend(value: Any, _: Table) -> str:
    paths = value
    if isinstance(value, list) and value and isinstance(value[0], list):
        names, weights = value[0], value[1] if len(value) > 1 else None
        paths = (
            names
            if not weights
            else [w for pair in zip(weights, names, strict=True) for w in pair]
        )
    return answer("--data-path {}", paths, {})


def _betas(value: Any, _: Table) -> str:
    return f"--adam-beta1 {value[0]} --adam-beta2 {value[1]}"


def _optimizer(value: Any, _: Table) -> str:
    name = str(value).lower()
    if "adam" in name:
        return "--optimizer adam"
    return (
        f"--optimizer {name}"
        if name in ("sgd", "lion", "muon")
        else (
            f"refused: optimizer {value} is not supported; use --optimizer adam, sgd, lion, "
            "muon, soap or adafactor."
        )
    )


def _nemo_schedule(value: Any, _: Table) -> str:
    styles = {"cosineannealing": "cosine", "warmupannealing": "linear", "constant": "constant"}
    style = styles.get(str(value).lower())
    return (
        f"--lr-decay-style {style}"
        if style
        else (f"refused: schedule {value} is not supported; use --lr-decay-style.")
    )


NEMO: Mapping[str, Row] = {
    "trainer.devices": "counted in the world of the dry run; torchrun starts the ranks",
    "trainer.num_nodes": "counted in the world of the dry run; torchrun starts the ranks",
    "trainer.accelerator": "GPUs are used if present (--device auto)",
    "trainer.precision": _precision,
    "trainer.max_steps": "--train-iters {}",
    "trainer.val_check_interval": "--eval-interval {}",
    "trainer.limit_val_batches": "--eval-iters {}",
    "trainer.log_every_n_steps": "--log-interval {}",
    "trainer.gradient_clip_val": "--clip-grad {}",
    "trainer.*": _LOOP,
    "exp_manager.*": "runs log to --save, --tensorboard and --loggers",
    "model.encoder_seq_length": "--seq-length {}",
    "model.normalization": _norm,
    "model.activation": _activation,
    "model.activation_func": _activation,
    "model.gated_linear_unit": "read with the activation",
    "model.bias": "--add-bias-linear",
    "model.share_embeddings_and_output_weights": lambda value, _: (
        "tied embeddings are the default" if value else "--untie-embeddings-and-output-weights"
    ),
    "model.layernorm_epsilon": "--norm-epsilon {}",
    "model.layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "model.num_moe_experts": "--num-experts {}",
    "model.rotary_percentage": "--rotary-percent {}",
    "model.activations_checkpoint_granularity": "--recompute-granularity {}",
    "model.activations_checkpoint_method": "--recompute-method {}",
    "model.activations_checkpoint_num_layers": "--recompute-num-layers {}",
    "model.virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank {}",
    "model.megatron_amp_O2": "main weights are always in float32",
    "model.fp8": lambda value, _: (
        "--fp8-format hybrid"
        if value is True or value == "hybrid"
        else f"--fp8-format {value}"
        if value
        else SWITCHED_OFF
    ),
    "model.fp8_e4m3": "--fp8-format e4m3",
    "model.fp8_hybrid": "--fp8-format hybrid",
    "model.transformer_engine": "--transformer-impl transformer_engine",
    "model.params_dtype": "it follows from --bf16 or --fp16",
    "model.pipeline_dtype": "it follows from --bf16 or --fp16",
    "model.autocast_dtype": "it follows from --bf16 or --fp16",
    "model.make_vocab_size_divisible_by": "--make-vocab-size-divisible-by {}",
    "model.optim.name": _optimizer,
    "model.optim.betas": _betas,
    "model.optim.sched.name": _nemo_schedule,
    "model.optim.sched.warmup_steps": "--lr-warmup-iters {}",
    "model.optim.sched.max_steps": "--lr-decay-iters {}",
    "model.optim.sched.constant_steps": lambda value, _: (
        "refused: use --lr-decay-style WSD, which keeps the rate and then lowers it."
        if value
        else SWITCHED_OFF
    ),
    "model.data.data_prefix": _blend,
    "model.data.splits_string": "--split {}",
    "model.data.data_impl": "the .bin and .idx files are Megatron's",
    "model.data.seq_length": "--seq-length {}",
    "model.tokenizer.library": lambda value, _: (
        "--tokenizer-type HuggingFaceTokenizer"
        if value == "huggingface"
        else "--tokenizer-type SentencePieceTokenizer"
        if value == "sentencepiece"
        else f"refused: use --tokenizer-type for the library {value}."
    ),
    "model.tokenizer.type": "--tokenizer-model {}",
    "model.tokenizer.model": "--tokenizer-model {}",
    "model.tokenizer.vocab_file": "--vocab-file {}",
    "model.tokenizer.merge_file": "--merge-file {}",
    "mixed_precision": _mixed,
    "dataset.sequence_length": "--seq-length {}",
    "dataset.seq_length": "--seq-length {}",
    "dataset.blend": _blend,
    "dataset.random_seed": "data are shuffled by --seed",
    "ddp.grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "ddp.average_in_collective": "losses are divided, so gradients are summed",
    "ddp.data_parallel_sharding_strategy": lambda value, _: (
        "nothing is sharded there"
        if value == "no_shard"
        else f"--data-parallel-sharding-strategy {value}"
    ),
    "ddp.check_for_nan_in_grad": "gradients are always checked",
    "logger.wandb_*": "refused: use --wandb-project, with --loggers for other services.",
    "*._target_": "a class of that program; only options are translated",
}
"""Rows of NeMo 1 and 2 and Megatron-Bridge; keys without a row become the flag of that name."""


def _titan_preset(value: Any, table: Table) -> str:
    name = f"{table.get('model.name', '')}-{value}".lower().replace("llama3", "llama-3")
    return f"--model {name}"


def _titan_min_lr(value: Any, table: Table) -> str:
    return f"--min-lr {float(value) * float(table.get('optimizer.lr', 8e-4)):.10g}"


def _titan_schedule(value: Any, _: Table) -> str:
    kinds = {
        "1f1b": "",
        "interleaved1f1b": "",
        "zbvzerobubble": "zb-v",
        "interleavedzerobubble": "",
    }
    kind = kinds.get(str(value).lower())
    if kind is None or str(value).lower() == "interleavedzerobubble":
        return f"refused: use --pipeline-schedule for {value}: 1f1b, zb-h1 or zb-v."
    return (
        f"--pipeline-schedule {kind}"
        if kind
        else ("1F1B is the default; --num-virtual-stages-per-pipeline-rank interleaves it")
    )


TORCHTITAN: Mapping[str, Row] = {
    "job.dump_folder": "the folder of a run is --save",
    "job.*": _LOOP,
    "model.name": "read with the flavor",
    "model.flavor": _titan_preset,
    "model.hf_assets_path": "--tokenizer-model {}",
    "model.tokenizer_path": "--tokenizer-model {}",
    "model.converters": lambda value, _: (
        "--fp8-format hybrid --fp8-recipe tensorwise"
        if any("float8" in str(name) for name in value or ())
        else SWITCHED_OFF
    ),
    "model.print_after_conversion": _LOOP,
    "optimizer.name": _optimizer,
    "optimizer.lr": "--lr {}",
    "optimizer.beta1": "--adam-beta1 {}",
    "optimizer.beta2": "--adam-beta2 {}",
    "optimizer.eps": "--adam-eps {}",
    "optimizer.weight_decay": "--weight-decay {}",
    "optimizer.implementation": "kernels are chosen by what is installed",
    "lr_scheduler.warmup_steps": "--lr-warmup-iters {}",
    "lr_scheduler.decay_type": lambda value, _: (
        f"--lr-decay-style {value}"
        if value in ("linear", "cosine")
        else f"refused: use --lr-decay-style for {value}."
    ),
    "lr_scheduler.decay_ratio": (
        "refused: use --lr-decay-style WSD with --lr-wsd-decay-iters for a rate that stays and "
        "then falls."
    ),
    "lr_scheduler.min_lr_factor": _titan_min_lr,
    "lr_scheduler.lr_min": _titan_min_lr,
    "training.local_batch_size": "--micro-batch-size {}",
    "training.batch_size": "--micro-batch-size {}",
    "training.global_batch_size": lambda value, _: (
        f"--global-batch-size {value}"
        if value > 0
        else "one micro-batch of each data rank, which is the default here too"
    ),
    "training.seq_len": "--seq-length {}",
    "training.max_norm": "--clip-grad {}",
    "training.steps": "--train-iters {}",
    "training.seed": "--seed {}",
    "training.deterministic": "--deterministic-mode",
    "training.gc_freq": "--manual-gc-interval {}",
    "training.compile": "the compiler is used where it gains",
    "compile.*": "the compiler is used where it gains",
    "training.mixed_precision_param": _precision,
    "training.mixed_precision_reduce": lambda value, _: (
        "--accumulate-allreduce-grads-in-fp32" if value == "float32" else SWITCHED_OFF
    ),
    "training.enable_cpu_offload": lambda value, _: (
        "--optimizer-cpu-offload" if value else SWITCHED_OFF
    ),
    "training.dataset": "refused: prepare it with mcore-data preprocess; use --data-path.",
    "training.dataset_path": "refused: prepare it with mcore-data preprocess; use --data-path.",
    "parallelism.data_parallel_shard_degree": lambda value, _: (
        "--data-parallel-sharding-strategy optim_grads_params" if value != 1 else SWITCHED_OFF
    ),
    "parallelism.data_parallel_replicate_degree": lambda value, _: (
        f"--num-distributed-optimizer-instances {value}" if value > 1 else SWITCHED_OFF
    ),
    "parallelism.tensor_parallel_degree": "--tensor-model-parallel-size {} --sequence-parallel",
    "parallelism.pipeline_parallel_degree": "--pipeline-model-parallel-size {}",
    "parallelism.context_parallel_degree": "--context-parallel-size {}",
    "parallelism.expert_parallel_degree": "--expert-model-parallel-size {}",
    "parallelism.expert_tensor_parallel_degree": "--expert-tensor-parallel-size {}",
    "parallelism.context_parallel_rotate_method": lambda value, _: (
        "--cp-comm-type all_gather" if value == "allgather" else "--cp-comm-type p2p"
    ),
    "parallelism.pipeline_parallel_schedule": _titan_schedule,
    "parallelism.pipeline_parallel_microbatch_size": "it is --micro-batch-size here",
    "parallelism.enable_async_tensor_parallel": "exchanges are not cut into pieces",
    "parallelism.enable_compiled_autograd": "the compiler is used where it gains",
    "parallelism.disable_loss_parallel": "each tensor rank computes its share of the loss",
    "parallelism.fsdp_reshard_after_forward": _MEMORY,
    "checkpoint.enable": "saving is turned on by --save and --save-interval",
    "checkpoint.enable_checkpoint": "saving is turned on by --save and --save-interval",
    "checkpoint.folder": "--save {}",
    "checkpoint.interval": "--save-interval {}",
    "checkpoint.interval_type": "intervals count steps",
    "checkpoint.async_mode": lambda value, _: (
        SWITCHED_OFF if value == "disabled" else "--async-save"
    ),
    "checkpoint.keep_latest_k": lambda value, _: (
        f"--save-retain-last {value}" if value else "all checkpoints are kept by default"
    ),
    "checkpoint.initial_load_path": "--load {}",
    "checkpoint.load_step": lambda value, _: (
        f"--ckpt-step {value}" if value > 0 else "the newest step is the default"
    ),
    "checkpoint.*": "mcore-ckpt convert makes other formats of a checkpoint",
    "activation_checkpoint.mode": lambda value, _: (
        SWITCHED_OFF
        if value == "none"
        else "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        if value == "full"
        else "--recompute-granularity selective"
    ),
    "activation_checkpoint.*": "what is computed again is --recompute-modules",
    "float8.enable_fsdp_float8_all_gather": "--fp8-param-gather",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "--fp8-param-gather",
    "float8.*": "how numbers are scaled is --fp8-recipe",
    "quantize.linear.float8.*": "how numbers are scaled is --fp8-recipe",
    "metrics.log_freq": "--log-interval {}",
    "metrics.enable_tensorboard": "--tensorboard",
    "metrics.enable_wandb": lambda value, _: (
        "refused: use --wandb-project NAME." if value else SWITCHED_OFF
    ),
    "metrics.*": "metrics.jsonl has every reported number",
    "profiling.enable_profiling": "--profile",
    "profiling.*": "the steps are --profile-step-start and --profile-step-end",
    "validation.enable": "validation is turned on by --eval-interval",
    "validation.freq": "--eval-interval {}",
    "validation.steps": "--eval-iters {}",
    "validation.*": "refused: prepare validation data with mcore-data; use --valid-data-path.",
    "comm.init_timeout_seconds": lambda value, _: f"--distributed-timeout-minutes {value / 60}",
    "comm.*": "torch's own variables set it",
    "memory_estimation.*": "memory is estimated by --dry-run and mcore-train plan",
    "fault_tolerance.*": "refused: mcore-train launch restarts jobs; use --inprocess-restart.",
    "experimental.*": _LOOP,
}
"""Rows of torchtitan's sections and keys."""


def _is_on(table: Table, section: str) -> bool:
    return table.get(f"{section}.enabled", True) not in (False, "false")


def _scale(flag: str, power: bool = False) -> Callable[[Any, Table], str]:
    def row(value: Any, table: Table) -> str:
        if not _is_on(table, "fp16"):
            return SWITCHED_OFF
        if flag == "--loss-scale" and not value:
            return "the scale is dynamic by default"
        return f"{flag} {2.0**value if power else value}"

    return row


def _accumulation(value: Any, table: Table) -> str:
    micro = table.get("train_micro_batch_size_per_gpu")
    if "train_batch_size" in table:
        return "it follows from --global-batch-size, --micro-batch-size and the data ranks"
    return f"refused: use --global-batch-size: {value} x {micro} sequences x the data ranks."


def _stage(value: Any, _: Table) -> str:
    return {
        0: "gradients are all-reduced, which is the default here too",
        1: "--use-distributed-optimizer",
        2: "--data-parallel-sharding-strategy optim_grads",
        3: "--data-parallel-sharding-strategy optim_grads_params",
    }.get(value, f"refused: ZeRO stage {value} does not exist.")


def _offload(flag: str) -> Callable[[Any, Table], str]:
    def row(value: Any, _: Table) -> str:
        if value == "none":
            return SWITCHED_OFF
        return flag if value == "cpu" else "refused: states are kept on GPUs or in host memory."

    return row


DEEPSPEED: Mapping[str, Row] = {
    "train_batch_size": "--global-batch-size {}",
    "train_micro_batch_size_per_gpu": "--micro-batch-size {}",
    "gradient_accumulation_steps": _accumulation,
    "gradient_clipping": "--clip-grad {}",
    "steps_per_print": "--log-interval {}",
    "bf16.enabled": "--bf16",
    "bfloat16.enabled": "--bf16",
    "fp16.enabled": "--fp16",
    "fp16.loss_scale": _scale("--loss-scale"),
    "fp16.initial_scale_power": _scale("--initial-loss-scale", power=True),
    "fp16.loss_scale_window": _scale("--loss-scale-window"),
    "fp16.hysteresis": _scale("--hysteresis"),
    "fp16.min_loss_scale": _scale("--min-loss-scale"),
    "fp16.*": _LOOP,
    "zero_optimization.stage": _stage,
    "zero_optimization.overlap_comm": lambda value, table: (
        "--overlap-grad-reduce"
        if value and table.get("zero_optimization.stage", 0) < 2
        else "sharded gradients are always reduced during the backward pass"
    ),
    "zero_optimization.reduce_bucket_size": lambda value, _: f"--ddp-bucket-size {int(value)}",
    "zero_optimization.offload_optimizer.device": _offload("--optimizer-cpu-offload"),
    "zero_optimization.offload_param.device": _offload(
        "refused: weights stay on GPUs; use --data-parallel-sharding-strategy."
    ),
    "zero_optimization.zero_hpz_partition_size": (
        "refused: use --num-distributed-optimizer-instances for sharding inside groups."
    ),
    "zero_optimization.*": _MEMORY,
    "optimizer.type": _optimizer,
    "optimizer.params.lr": "--lr {}",
    "optimizer.params.betas": _betas,
    "optimizer.params.eps": "--adam-eps {}",
    "optimizer.params.weight_decay": "--weight-decay {}",
    "optimizer.params.*": _LOOP,
    "scheduler.type": lambda value, _: {
        "WarmupLR": "--lr-decay-style constant",
        "WarmupDecayLR": "--lr-decay-style linear",
        "WarmupCosineLR": "--lr-decay-style cosine",
    }.get(value, f"refused: schedule {value} is not supported; use --lr-decay-style."),
    "scheduler.params.warmup_max_lr": "--lr {}",
    "scheduler.params.warmup_min_lr": "--lr-warmup-init {}",
    "scheduler.params.warmup_num_steps": "--lr-warmup-iters {}",
    "scheduler.params.total_num_steps": "--train-iters {}",
    "scheduler.params.warmup_type": "the rate rises linearly",
    "activation_checkpointing.*": "use --recompute-granularity of the model",
    "flops_profiler.*": "throughput is always reported",
    "wall_clock_breakdown": "the time of a step is divided by --waterfall-interval",
    "tensorboard.enabled": "--tensorboard",
    "tensorboard.*": "scalars go to tensorboard/ below --save",
    "wandb.*": "refused: use --wandb-project.",
    "zero_allow_untested_optimizer": _LOOP,
    "zero_force_ds_cpu_optimizer": _LOOP,
    "communication_data_type": "it is chosen by --accumulate-allreduce-grads-in-fp32",
    "prescale_gradients": "gradients are summed, and losses divided",
    "gradient_predivide_factor": "gradients are summed, and losses divided",
    "dump_state": _LOOP,
    "elasticity.*": "refused: use mcore-train launch --min-nodes.",
    "aio.*": "refused: states are kept on GPUs or in host memory.",
    "compression_training.*": "refused: use mcore-infer quantize for a trained model.",
    "data_efficiency.*": "refused: use --seq-length-schedule or --step-batch-size-schedule.",
}
"""Rows of DeepSpeed's JSON."""

HF_FIELDS: Mapping[str, str] = {
    "num_hidden_layers": "num_layers",
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "num_key_value_heads": "num_query_groups",
    "intermediate_size": "ffn_hidden_size",
    "head_dim": "kv_channels",
    "rms_norm_eps": "norm_epsilon",
    "layer_norm_epsilon": "norm_epsilon",
    "rope_theta": "rotary_base",
    "tie_word_embeddings": "untie_embeddings_and_output_weights",
    "initializer_range": "init_method_std",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
    "hidden_act": "swiglu",
    "attention_bias": "add_qkv_bias",
    "sliding_window": "window_size",
}
"""Option of each field of a Hugging Face config.json that has another name."""


def render(value: Any) -> str:
    """Return a value of a config as text, as the config file has it."""
    return value if isinstance(value, str) else json.dumps(value)
