"""The command ``mcore-models``: what a model holds and costs, before anything is built.

``list`` shows the presets, ``count`` one model: a preset, flags, or a preset with flags laid
over it. Help and counting load no torch.
"""

import json
import sys
from collections.abc import Callable, Sequence

from mcore_models.counting import CountConfig, build_report, parse_count
from mcore_models.flops import num_active_parameters, num_parameters
from mcore_models.presets import load_preset, preset_names
from mcore_parallel.command_line import parse
from mcore_parallel.entry_point import run_program

ABOUT = """Parameters, FLOPs and bytes of language models, from their shapes alone.

examples:
  mcore-models count --preset llama-3-8b --bf16 --world-size 8 --use-distributed-optimizer \\
    --gpu h100
  mcore-models count --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
    --vocab-size 50257"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 2 for bad input."""
    return run_program("mcore-models", ABOUT, COMMANDS, argv, exit_code, _call)


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, 0 for a fault of the program."""
    return 2 if isinstance(error, ValueError | FileNotFoundError) else 0


def _call(function: Callable[..., int], program: str, words: list[str]) -> int:
    if function is count:
        return count(*parse_count(words))
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


def count(config: CountConfig, unused: Sequence[str]) -> int:
    """Print parameters, FLOPs and bytes of one model, and whether they fit a GPU.

    Args:
        config: the model and the run.
        unused: flags of training that count nothing, to be named.

    Raises:
        ValueError: for options that contradict.
    """
    report = build_report(config)
    if config.options.json:
        print(json.dumps(report))
        return 0
    if unused:
        print(f"mcore-models: counting does not need {', '.join(unused)}.", file=sys.stderr)
    width = max(map(len, report))
    for name, value in report.items():
        number = ",.2f" if isinstance(value, float) else ","
        shown = value if isinstance(value, str) else format(value, number)
        print(f"{name:<{width}}  {shown:>24}")
    return 0


COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "list": ("the presets, with their sizes", list_presets),
    "count": ("one model: --preset NAME, or the flags of mcore-train gpt", count),
}


if __name__ == "__main__":
    sys.exit(main())
