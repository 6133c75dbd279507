"""Options and results of ``mcore-models count``: a model and a run, in the flags of training.

A command line of ``mcore-train gpt`` can be passed unchanged, including recipes. Flags without
effect on sizes, such as ``--lr``, are reported and ignored. Loads no torch.
"""

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mcore_base.command_line import HELP_FLAGS, canonical, is_flag, list_options, parse
from mcore_models.config import (
    RecomputeConfig,
    TransformerConfig,
    sizes_of_pattern,
    stages_of_pattern,
)
from mcore_models.description import ModelDescription
from mcore_models.encoder_config import BertConfig, T5Config
from mcore_models.families import FAMILIES
from mcore_models.flops import RankBytes, num_active_parameters, num_parameters
from mcore_models.memory_changes import OptimizerChoice
from mcore_models.peft.config import PeftConfig, adapter_shapes
from mcore_models.peft.memory import run_bytes
from mcore_models.presets import find_preset
from mcore_moe.config import MoEConfig
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.optimizers.config import (
    AdamConfig,
    MainWeightsConfig,
    MuonConfig,
    OptimizerName,
    SGDConfig,
    SoapConfig,
)
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.rank_grid import build_grids

GPU_GIB = {
    "a100": 79,
    "a100-40gb": 39,
    "b200": 178,
    "h100": 79,
    "h200": 139,
    "l4": 22,
    "l40s": 44,
    "rtx-3090": 23,
    "rtx-4090": 23,
}
"""Memory visible to a program, rounded down."""
USABLE = 0.9
"""Share of a GPU's memory that the estimate may use. The estimate does not include temporary
buffers (up to 6 % of it, as measured, see ``rank_bytes``), CUDA, NCCL and fragmentation."""
PATTERN = "--hybrid-override-pattern"
_SAME = {
    "--model": ("--preset",),
    "--nproc": ("--world-size",),
    "--recompute-activations": ("--recompute-granularity", "selective"),
}
"""Flags of training that are replaced by other words here."""


USUAL = (
    *(
        "preset",
        "vocab_size",
        "seq_length",
        "micro_batch_size",
        "bf16",
        "world_size",
        "gpu",
        "json",
    ),
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"),
    *("ffn_hidden_size", "max_position_embeddings", "num_experts", "moe_router_topk"),
    *("moe_ffn_hidden_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "recompute_granularity"),
    *("use_distributed_optimizer", "data_parallel_sharding_strategy"),
)
"""Options that count --help prints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountOptions:
    """Model and run to count."""

    preset: str = ""
    """Start from this preset; flags override its values. --model is the same."""

    vocab_size: int = 0
    """Token ids of the model."""

    seq_length: int = 0
    """Tokens in a sequence; 0: 4096, or --max-position-embeddings if it is smaller."""

    decoder_seq_length: int = 0
    """Tokens of a T5's decoder; 0: --seq-length."""

    micro_batch_size: int = 1
    """Sequences in one forward pass."""

    global_batch_size: int = 0
    """Sequences in one step over all ranks; 0: enough to fill the pipeline."""

    world_size: int = 1
    """Ranks of the run; --nproc is the same."""

    bf16: bool = False
    """Weights and activations in bfloat16; main weights and optimizer in float32."""

    optimizer: OptimizerName = "adam"
    """Optimizer whose state is counted."""

    gpu: str = ""
    """GPU by name, such as h100, or by memory in GiB: report whether the run fits on it."""

    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountConfig:
    """Sizes and costs of a model, in the flags of mcore-train gpt (--recipe FILE too)."""

    model: TransformerConfig
    options: CountOptions = field(default_factory=CountOptions)
    experts: MoEConfig = field(default_factory=MoEConfig)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
    data_parallelism: DataParallelConfig = field(default_factory=DataParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    sgd: SGDConfig = field(default_factory=SGDConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    soap: SoapConfig = field(default_factory=SoapConfig)
    main_weights: MainWeightsConfig = field(default_factory=MainWeightsConfig)
    offloading: OffloadConfig = field(default_factory=OffloadConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    recomputation: RecomputeConfig = field(default_factory=RecomputeConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class BertCountConfig(CountConfig):
    """Sizes and costs of a BERT, in the flags of mcore-train bert (--recipe FILE too)."""

    model: BertConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class T5CountConfig(CountConfig):
    """Sizes and costs of a T5, in the flags of mcore-train t5 (--recipe FILE too)."""

    model: T5Config


_KINDS: dict[str, type[CountConfig]] = {
    "gpt": CountConfig,
    "mamba": CountConfig,
    "bert": BertCountConfig,
    "t5": T5CountConfig,
}
"""Options by the command of ``mcore-train``."""


def parse_count(words: Sequence[str]) -> tuple[CountConfig, list[str]]:
    """Parse a command line; flags override recipes, and recipes override a preset.

    Args:
        words: after the command, optionally beginning with the model kind of ``mcore-train``.

    Returns:
        The options, and the training flags without effect on them.

    Raises:
        ValueError: for an unknown preset, or an unknown flag that resembles an option.
        FileNotFoundError: if a recipe does not exist.
        SystemExit: after help.
    """
    command, program = "", "mcore-models count"
    if words and words[0] in _KINDS:
        command, *words = words
        program = f"{program} {command}"
    groups = list(_groups(words))
    recipes = [file for name, *files in groups if name == "--recipe" for file in files]
    groups = [*_recipe_groups(recipes), *groups]
    named = [values[0] for name, *values in groups if name == "--preset" and values]
    preset = find_preset(named[-1]) if named else None
    kind = _KINDS[command or (preset.family if preset else "gpt")]
    if preset and _KINDS[preset.family] is not kind:
        raise ValueError(
            f"--preset {preset.name} is a {preset.family} model, not {command}: use "
            f"mcore-models count {preset.family}."
        )
    options = list_options(kind)
    if set(words) & set(HELP_FLAGS):
        parse(kind, program, words, usual=USUAL)
    known = {option.flag for option in options}
    known |= {f"--no-{option.flag[2:]}" for option in options if option.kind is bool}
    used, unused = [], []
    for name, *values in groups:
        if name in known:
            used += [name, *values]
        elif near := difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85):
            raise ValueError(f"unknown option {name}: did you mean {near[0]}?")
        elif name != "--recipe":
            unused.append(name)
    defaults: dict[str, Any] = {}
    if preset:
        model = preset.model
        defaults = {**asdict(model.config), **asdict(model.moe)}
        defaults["vocab_size"] = model.vocab_size
    pattern = _last_value(groups, PATTERN)
    if pattern:
        defaults |= sizes_of_pattern(pattern)
        if _last_value(groups, "--pipeline-model-parallel-size") not in ("", "1"):
            defaults |= stages_of_pattern(pattern)
    config = parse(kind, program, used, usual=USUAL, defaults=defaults)
    return config, list(dict.fromkeys(unused))


def _last_value(groups: Sequence[list[str]], flag: str) -> str:
    """Return the last value of a flag; empty if it is not given."""
    values_of_flag = [values[0] for name, *values in groups if name == flag and values]
    return values_of_flag[-1] if values_of_flag else ""


def described_model(config: CountConfig) -> ModelDescription:
    """Return the description of the model to count."""
    kind = type(config.model)
    return ModelDescription(
        config=config.model,
        vocab_size=config.options.vocab_size,
        moe=config.experts,
        family=next(name for name, family in FAMILIES.items() if family.config is kind),
    )


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield a list for each flag of a command line: the flag with dashes, then its values."""
    group: list[str] = []
    for word in words:
        if not is_flag(word):
            group.append(word)
            continue
        if group:
            yield group
        name, equals, value = word.partition("=")
        name = canonical(name)
        group = [*_SAME.get(name, (name,)), *([value] if equals else [])]
    if group:
        yield group


def _recipe_groups(files: Sequence[str]) -> Iterator[list[str]]:
    """Yield a list for each field of TOML recipes: the flag, then its values."""
    for file in files:
        tables: Any = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        for name, value in _leaves(tables):
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                yield [f"--{flag}" if value else f"--no-{flag}"]
                continue
            values = map(str, value if isinstance(value, list) else [value])
            yield [*_SAME.get(f"--{flag}", (f"--{flag}",)), *values]


def _leaves(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value


def build_report(config: CountConfig) -> dict[str, int | float | str]:
    """Compute every number that ``count`` prints.

    Raises:
        ValueError: if the model does not fit the layout, or the GPU is unknown.
    """
    options, parallel = config.options, config.parallelism
    model = described_model(config)
    family, arguments = FAMILIES[model.family], (model.config, model.vocab_size, model.moe)
    if model.vocab_size < 1:
        raise ValueError("--vocab-size is required: give the number of token ids.")
    if options.world_size < 1 or options.micro_batch_size < 1:
        raise ValueError("--world-size and --micro-batch-size must be 1 or more.")
    gpu_gib = _gpu_gib(options.gpu)
    limit = config.model.max_position_embeddings
    seq_length = options.seq_length or min(4096, limit or 4096)
    if problems := family.layout_problems(model.config, parallel, model.moe, seq_length):
        raise ValueError("\n".join(problems))
    build_grids(parallel, options.world_size)
    divisor = model.config.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
    padded = -(-model.vocab_size // divisor) * divisor
    adapters = adapter_shapes(config.peft, family.tensor_shapes(*arguments))
    memory = _memory(config, model, seq_length)
    trained = {"trainable_parameters": sum(map(prod, adapters.values()))} if adapters else {}
    report: dict[str, int | float | str] = {
        "parameters": num_parameters(*arguments, family.tensor_shapes),
        "active_parameters": num_active_parameters(*arguments, family.tensor_shapes),
        **trained,
        "seq_length_tokens": seq_length,
        "gflop_per_token": family.flops_per_token(model.config, padded, seq_length, model.moe)
        / 1e9,
        **{f"rank_{name}_gib": value / 2**30 for name, value in asdict(memory).items()},
        "rank_total_gib": memory.total / 2**30,
    }
    if gpu_gib:
        report |= {"gpu_gib": gpu_gib, "fits": _verdict(memory.total / 2**30, gpu_gib)}
    return report


def _memory(config: CountConfig, model: ModelDescription, seq_length: int) -> RankBytes:
    """Estimate the memory of the rank that needs most."""
    options, parallel = config.options, config.parallelism
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    ranks *= parallel.pipeline_model_parallel_size
    sequences = options.micro_batch_size * (options.world_size // ranks)

    return run_bytes(
        config,
        FAMILIES[model.family].tensor_shapes(model.config, model.vocab_size, model.moe),
        optimizer=OptimizerChoice(
            name=options.optimizer,
            adam=config.adam,
            sgd=config.sgd,
            muon=config.muon,
            soap=config.soap,
        ),
        layers=-(-model.config.num_layers // parallel.pipeline_model_parallel_size),
        vocab_size=model.vocab_size,
        world_size=options.world_size,
        seq_length=seq_length,
        decoder_seq_length=options.decoder_seq_length,
        micro_batch_size=options.micro_batch_size,
        num_microbatches=options.global_batch_size // sequences,
        weight_bytes=2 if options.bf16 else 4,
    )


def _gpu_gib(name: str) -> float:
    """Return the memory in GiB of a GPU, given by name or as a number; 0.0 for no name."""
    gib = GPU_GIB.get(name.lower().replace("_", "-"))
    try:
        return float(gib or name or 0)
    except ValueError:
        raise ValueError(
            f"--gpu {name}: unknown GPU. Use {', '.join(GPU_GIB)}, or a GPU's memory in GiB."
        ) from None


def _verdict(total_gib: float, gpu_gib: float) -> str:
    if total_gib > gpu_gib:
        return "no"
    return "yes" if total_gib <= USABLE * gpu_gib else "barely"
