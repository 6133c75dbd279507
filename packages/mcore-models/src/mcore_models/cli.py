"""The command ``mcore-models``: what a model holds and costs, before anything is built.

``list`` shows the presets, ``count`` one model: a preset, flags, or a preset with flags laid
over it. Help and counting load no torch.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro

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
from mcore_parallel.config import ParallelConfig
from mcore_parallel.layout import build_grids

USAGE = """usage: mcore-models COMMAND ...

Parameters, FLOPs and bytes of language models, from their shapes alone.

commands:
  list   the presets, with their sizes
  count  one model: --preset NAME, flags, or a preset with flags over it

examples:
  mcore-models count --preset llama-3-8b
  mcore-models count --preset llama-3-8b --num-layers 8 --world-size 4 --seq-length 8192
  mcore-models count --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
    --vocab-size 50257

mcore-models count --help tells its options."""


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
    """All options of ``count``."""

    model: TransformerConfig
    options: CountOptions = field(default_factory=CountOptions)
    experts: MoEConfig = field(default_factory=MoEConfig)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
    recomputing: RecomputeConfig = field(default_factory=RecomputeConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    command, *rest = words
    try:
        if command == "list":
            return list_presets()
        if command == "count":
            return count(rest)
        raise ValueError(f"unknown command {command}: use list or count.")
    except ValueError as error:
        print(f"mcore-models: {error}", file=sys.stderr)
        return 2


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


def count(words: Sequence[str]) -> int:
    """Print parameters, FLOPs and bytes of one model.

    Raises:
        ValueError: for an unknown preset, or options that contradict.
    """
    config = parse_count(words)
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
    name = _value_of("--preset", words)
    flat = Annotated[CountConfig, tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes]
    arguments: dict = {"prog": "mcore-models count", "args": list(words)}
    if name:
        preset = load_preset(name)
        arguments["default"] = CountConfig(
            model=preset.config,
            experts=preset.moe,
            options=CountOptions(preset=name, vocab_size=preset.vocab_size),
        )
    return tyro.cli(flat, **arguments)


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


def _value_of(flag: str, words: Sequence[str]) -> str:
    """Return what follows a flag, or what stands behind its equals sign."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            return following
        if word.startswith(flag + "="):
            return word.removeprefix(flag + "=")
    return ""


if __name__ == "__main__":
    sys.exit(main())
