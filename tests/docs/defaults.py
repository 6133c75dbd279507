"""The page of defaults that differ from Megatron's.

Made from the configs' docstrings and megatron_flags.toml of mcore-train.
`uv run python tests/docs/defaults.py` writes docs/defaults.md anew.
"""

import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.flags import config_classes, config_sources, fields
from house.sources import ROOT

from mcore_base.command_line import list_options
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.megatron_flags import megatron_default

PAGE = ROOT / "docs/defaults.md"
_HEAD = """# Defaults that differ from Megatron's

Written by `uv run python tests/docs/defaults.py` from the docstrings of the configs. Every
other default is Megatron's, or of an option that Megatron's command line does not have:
[all options](flags/mcore-train.md).

| flag | ours | Megatron's | what it is |
| --- | --- | --- | --- |
"""
_TAIL = """
## Options that mean something else

`--mup-output-mult` is multiplied by the base width over the model's; in Megatron-Core a number
other than 1 takes its place.

`--moe-aux-loss-coeff` is what a checkpoint of ours was trained with, or what `mcore-ckpt
convert` found in a config.json. For a Hugging Face folder given to `--load` it is 0, as in
transformers, unless its config.json has `output_router_logits`: only then does transformers
add the loss that `router_aux_loss_coef` weighs. A run that loads experts logs which balancing
loss is on and where it comes from.

`--moe-wgrad-micro-batches`, which Megatron-Core does not have, is `auto`
([when a number above 1 is chosen](experts.md)). The sum of weight gradients is rounded so:

- On CPUs every number gives the same bits. `mcore-train verify` therefore adds two
  micro-batches together in the small run of a layout for which `auto` may choose several.
- On GPUs in bf16 one GEMM over several micro-batches rounds differently from a sum of their
  gradients. Set the number to compare runs bit for bit on GPUs with different memory.

Tokenizer types that give other ids than Megatron-Core's, compared with its version 0.19:

- `Llama2Tokenizer` starts every text with BOS, as Llama 2 was trained; Megatron-Core's adds
  none, as our `SentencePieceTokenizer`.
- `NullTokenizer` of `--vocab-size N` has N + 1 ids and ends documents with N, as older versions
  of Megatron-Core's; that of 0.19 has N and ends them with N - 1.
- `BertWordPieceLowerCase` and `BertWordPieceCase` give the ids of the words alone, and the
  dataset adds [CLS] and [SEP]; Megatron-Core's add both to every text already.
"""
_SENTENCE = re.compile(r"\s*Megatron's default: (?P<value>[^.]+(?:\.\d+)?)\.")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a training command."""

    name: str
    default: object
    """Tuples as lists; "required" where there is none."""
    said: str
    """Its docstring, on one line."""


def training_options() -> Iterator[Option]:
    """Yield every option of the training commands once, by name; a GPT's where they differ."""
    said, defaults = {}, {}
    for source in (s for s in config_sources() if not s.name.startswith("mcore_infer/")):
        for field in (field for node in config_classes(source) for field in fields(node)):
            said.setdefault(field.name, field.docstring)
    for command in FAMILY_COMMANDS.values():
        for part in get_type_hints(command.verified).values():
            for field in dataclasses.fields(part):
                defaults.setdefault(field.name, field.default)
    for name, default in sorted(defaults.items()):
        value = list(default) if isinstance(default, tuple) else default
        value = "required" if default is dataclasses.MISSING else value
        yield Option(name, value, " ".join(said[name].split()))


@cache
def megatron_defaults() -> dict[str, object]:
    """Return Megatron's default of each option that both have; tuples as lists."""
    found: dict[str, object] = {}
    for command in FAMILY_COMMANDS.values():
        for option in list_options(command.verified):
            default = megatron_default(option)
            if default is not None:
                shown = list(default) if isinstance(default, tuple) else default
                found.setdefault(option.name, shown)
    return found


def render() -> str:
    """Return the text of the page."""
    differing = []
    for option in training_options():
        flag = f"`--{option.name.replace('_', '-')}` | `{option.default!r}`"
        theirs, what = _SENTENCE.search(option.said), _SENTENCE.sub("", option.said)
        what = what.replace("|", "\\|")
        if theirs:
            differing.append(f"| {flag} | {theirs['value']} | {what} |\n")
    return _HEAD + "".join(differing) + _TAIL


def unlike_their_docstring() -> list[str]:
    """Name options whose default is not Megatron's and does not say so, or the reverse."""
    theirs = megatron_defaults()
    return [
        option.name
        for option in training_options()
        if (option.default != theirs.get(option.name, option.default))
        != bool(_SENTENCE.search(option.said))
    ]


if __name__ == "__main__":
    PAGE.write_text(render())
