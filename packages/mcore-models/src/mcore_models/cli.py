"""The command ``mcore-models``: what a model holds and costs, before anything is built.

``list`` shows the presets, ``count`` one model: a preset, flags, or a preset with flags laid
over it. Help and counting load no torch.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mcore_models.config import RecomputeConfig, TransformerConfig
from mcore_models.description import ModelDescription
from mcore_models.flops import (
    flops_per_token,
    num_active_parameters,
    num_parameters,
    rank_bytes,
)
from mcore_models.layout_checks import check_layout
from mcore_models.presets import load_preset, preset_names
from mcore_moe.config import MoEConfig
from mcore_parallel.command_line import (
    HELP_FLAGS,
    options_of,
    parse,
    read_words,
)
from mcore_parallel.config import ParallelConfig
from mcore_parallel.entry_point import run_program
from mcore_parallel.layout import build_grids

ABOUT = """Parameters, FLOPs and bytes of language models, from their shapes alone.

examples:
  mcore-models count --preset llama-3-8b
  mcore-models count --preset llama-3-8b --num-layers 8 --world-size 4 --seq-length 8192
  mcore-models count --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
    --vocab-size 50257"""

USUAL = (
    *("preset", "vocab_size", "seq_length", "micro_batch_size", "world_size", "json"),
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"),
    *("ffn_hidden_size", "max_position_embeddings", "num_experts", "moe_router_topk"),
    *("moe_ffn_hidden_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "recompute_granularity"),
)
"""What count --help shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountOptions:
    """What is counted, and for which run."""

    preset: str = ""
    """Begin from this preset; flags change it."""

    vocab_size: int = 0
    """Token ids of the model."""

    seq_length: int = 0
    """Tokens in a sequence; 0: 4096, or the model's positions if those are fewer."""

    micro_batch_size: int = 1
    """Sequences in one forward pass."""

    world_size: int = 1
    """Ranks that train it."""

    weight_bytes: int = 2
    """Bytes of a weight: 2 for bf16, 4 for float32."""

    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountConfig:
    """What a model of this shape costs: parameters, FLOPs and the bytes of a rank."""

    model: TransformerConfig
    options: CountOptions = field(default_factory=CountOptions)
    experts: MoEConfig = field(default_factory=MoEConfig)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
    recomputing: RecomputeConfig = field(default_factory=RecomputeConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 2 for bad input."""
    return run_program("mcore-models", ABOUT, COMMANDS, argv, exit_code, _call)


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, 0 for a fault of the program."""
    return 2 if isinstance(error, ValueError) else 0


def _call(function: Callable[..., int], program: str, words: list[str]) -> int:
    if function is count:
        return count(parse_count(words))
    return parse(function, program, words)


def list_presets() -> int:
    """Print every preset with its size."""
    print(f"{'preset':<16} {'parameters':>16} {'active':>16} {'layers':>7} {'hidden':>7}")
    for name in preset_names():
        model = load_preset(name)
        arguments = (model.config, model.vocab_size, model.moe)
        print(
            f"{name:<16} {num_parameters(*arguments):>16,} "
            f"{num_active_parameters(*arguments):>16,} "
            f"{model.config.num_layers:>7} {model.config.hidden_size:>7}"
        )
    return 0


def count(config: CountConfig) -> int:
    """Print parameters, FLOPs and bytes of one model.

    Raises:
        ValueError: for options that contradict.
    """
    report = build_report(config)
    if config.options.json:
        print(json.dumps(report))
        return 0
    width = max(map(len, report))
    for name, value in report.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
        print(f"{name:<{width}}  {shown:>24}")
    return 0


def parse_count(words: Sequence[str]) -> CountConfig:
    """Read the flags of ``count``, laid over its preset if it names one."""
    options = options_of(CountConfig)
    name = "" if set(words) & set(HELP_FLAGS) else read_words(options, words).get("preset", "")
    defaults: dict[str, Any] = {}
    if name:
        preset = load_preset(name)
        defaults = {**asdict(preset.config), **asdict(preset.moe)}
        defaults["vocab_size"] = preset.vocab_size
    return parse(CountConfig, "mcore-models count", words, usual=USUAL, defaults=defaults)


def build_report(config: CountConfig) -> dict[str, int | float]:
    """Compute every number that ``count`` prints.

    Raises:
        ValueError: if the model does not fit the layout.
    """
    options, parallel = config.options, config.parallelism
    model = ModelDescription(
        config=config.model, vocab_size=options.vocab_size, moe=config.experts
    )
    if model.vocab_size < 1:
        raise ValueError("--vocab-size is needed: the number of token ids.")
    if options.world_size < 1 or options.micro_batch_size < 1:
        raise ValueError("--world-size and --micro-batch-size must be 1 or more.")
    limit = config.model.max_position_embeddings
    seq_length = options.seq_length or min(4096, limit or 4096)
    check_layout(model.config, parallel, model.moe, seq_length)
    build_grids(parallel, options.world_size)
    divisor = model.config.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
    padded = -(-model.vocab_size // divisor) * divisor
    memory = rank_bytes(
        model.config,
        model.vocab_size,
        parallel,
        world_size=options.world_size,
        seq_length=seq_length,
        micro_batch_size=options.micro_batch_size,
        moe=model.moe,
        recomputing=config.recomputing,
        weight_bytes=options.weight_bytes,
    )
    return {
        "parameters": num_parameters(model.config, model.vocab_size, model.moe),
        "active_parameters": num_active_parameters(model.config, model.vocab_size, model.moe),
        "seq_length_tokens": seq_length,
        "gflop_per_token": flops_per_token(model.config, padded, seq_length, model.moe) / 1e9,
        **{f"rank_{name}_gib": value / 2**30 for name, value in asdict(memory).items()},
        "rank_total_gib": memory.total / 2**30,
    }


COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "list": ("the presets, with their sizes", list_presets),
    "count": ("one model: --preset NAME, flags, or a preset with flags over it", count),
}


if __name__ == "__main__":
    sys.exit(main())
