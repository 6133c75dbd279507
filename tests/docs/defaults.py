"""The page of defaults that differ from Megatron's, made from the configs' docstrings.

`uv run python tests/docs/defaults.py` writes docs/defaults.md anew.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.flags import config_classes, config_sources, fields
from house.sources import ROOT

PAGE = ROOT / "docs/defaults.md"
_HEAD = """# Defaults that differ from Megatron's

Written by `uv run python tests/docs/defaults.py` from the docstrings of the configs. Every
other default is Megatron's.

| flag | ours | Megatron's | what it is |
| --- | --- | --- | --- |
"""
_TAIL = """
Tokenizer types that give other ids than Megatron-Core's, run beside its version 0.19:

- `Llama2Tokenizer` starts every text with BOS, as Llama 2 was trained; Megatron-Core's adds
  none, as our `SentencePieceTokenizer`.
- `NullTokenizer` of `--vocab-size N` has N + 1 ids and ends documents with N, as older versions
  of Megatron-Core's; that of 0.19 has N and ends them with N - 1.
- `BertWordPieceLowerCase` and `BertWordPieceCase` give the ids of the words alone, and the
  dataset adds [CLS] and [SEP]; Megatron-Core's add both to every text already.
"""
_SENTENCE = re.compile(r"\s*Megatron's default: (?P<value>[^.]+(?:\.\d+)?)\.")


def render() -> str:
    """Return the text of the page."""
    lines = []
    for source in config_sources():
        for node in config_classes(source):
            for field in fields(node):
                said = _SENTENCE.search(field.docstring)
                if said:
                    what = " ".join(_SENTENCE.sub("", field.docstring).split())
                    flag = "--" + field.name.replace("_", "-")
                    lines.append(
                        f"| `{flag}` | `{field.default}` | {said['value']} | {what} |\n"
                    )
    return _HEAD + "".join(sorted(lines)) + _TAIL


if __name__ == "__main__":
    PAGE.write_text(render())
