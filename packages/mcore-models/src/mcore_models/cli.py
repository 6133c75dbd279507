"""The command ``mcore-models``: sizes and costs of a model, from its flags.

``list`` prints the presets, ``show`` the architecture of a preset, ``count`` sizes and costs
of a model: a preset, flags, or a preset with flags that override it. No command loads torch.
"""

import json
import sys
from collections.abc import Callable, Sequence

from mcore_base.command_line import HELP_FLAGS, is_flag, parse
from mcore_base.entry_point import run_program
from mcore_models.architecture import tree
from mcore_models.counting import CountConfig, build_report, described_model, parse_count
from mcore_models.families import FAMILIES
from mcore_models.flops import num_active_parameters, num_parameters
from mcore_models.presets import find_preset, presets

ABOUT = """Parameters, FLOPs and bytes of language models, computed from their shapes.

examples:
  mcore-models list
  mcore-models show gemma-2-9b --bf16 --world-size 8 --tensor-model-parallel-size 8
  mcore-models count --preset llama-3-8b --bf16 --world-size 8 --use-distributed-optimizer \\
    --gpu h100
  mcore-models count t5 --preset t5-11b --num-layers 12
  mcore-models count --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
    --vocab-size 50257

pages:
  packages/mcore-models/README.md   list show count
  docs/planning.md                  count"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 2 for bad input."""
    return run_program("mcore-models", ABOUT, COMMANDS, argv, exit_code, _call)


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, 0 for a fault of the program."""
    return 2 if isinstance(error, ValueError | FileNotFoundError) else 0


def _call(function: Callable[..., int], program: str, words: list[str]) -> int:
    if function is count:
        return count(*parse_count(words))
    if function is show and words and not is_flag(words[0]):
        return show(words[0], *parse_count(["--preset", *words]))
    if function is show and not set(words) & set(HELP_FLAGS):
        raise ValueError(
            "mcore-models show needs the name of a preset: mcore-models list prints the names."
        )
    if function is show:
        print("mcore-models show PRESET has the options of mcore-models count.\n")
        return count(*parse_count(words))
    return parse(function, program, words)


def list_presets() -> int:
    """Print every preset with its size and source."""
    table = presets()
    width = max(map(len, table))
    sizes = f"{'parameters':>17} {'active':>15} {'layers':>6} {'hidden':>6}"
    print(f"{'preset':<{width}} {sizes}  source")
    for preset in table.values():
        model = preset.model
        family = FAMILIES[model.family]
        arguments = (model.config, model.vocab_size, model.moe, family.tensor_shapes)
        depth = family.num_layers(model.config)
        print(
            f"{preset.name:<{width}} {num_parameters(*arguments):>17,} "
            f"{num_active_parameters(*arguments):>15,} {depth:>6} "
            f"{model.config.hidden_size:>6}  {preset.source}"
        )
    return 0


def show(name: str, config: CountConfig, unused: Sequence[str]) -> int:
    """Print the architecture of a preset as a tree, and its sizes and costs.

    Args:
        name: of the preset.
        config: the model and the run, as for ``count``.
        unused: training flags without effect on the report; printed as a note.

    Raises:
        ValueError: for contradicting options.
    """
    if not config.options.json:
        print(
            f"{name}: {find_preset(name).source}", *tree(described_model(config)), "", sep="\n"
        )
    return count(config, unused)


def count(config: CountConfig, unused: Sequence[str]) -> int:
    """Print parameters, FLOPs and bytes of one model, and whether they fit a GPU.

    Args:
        config: the model and the run.
        unused: training flags without effect on the report; printed as a note.

    Raises:
        ValueError: for contradicting options.
    """
    report = build_report(config)
    if config.options.json:
        print(json.dumps(report))
        return 0
    if unused:
        print(
            f"mcore-models: ignored, as without effect: {', '.join(unused)}.", file=sys.stderr
        )
    width = max(map(len, report))
    for name, value in report.items():
        number = ","
        if isinstance(value, float):
            number = ",.2f" if value >= 1 else ".3g"
        text = value if isinstance(value, str) else format(value, number)
        print(f"{name:<{width}}  {text:>24}")
    return 0


COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "list": ("the presets, with their sizes and sources", list_presets),
    "show": ("the architecture of a preset, its sizes and its costs: show NAME", show),
    "count": ("sizes and costs: --preset NAME, or flags of mcore-train [gpt, bert, t5]", count),
}


if __name__ == "__main__":
    sys.exit(main())
