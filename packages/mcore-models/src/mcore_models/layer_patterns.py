"""Parsing of strings that describe each layer of a model: letters, or a list of numbers.

The standard library only, so that config files may import it.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

PATTERN_MIXERS: Mapping[str, str] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "G": "delta_net",
    "C": "short_conv",
    "L": "lightning",
    "K": "kda",
}
"""Mixer of each letter of ``--hybrid-override-pattern``."""

MOST_LAYERS = 100_000
"""Largest number of entries of a repetition; more would be a mistake that fills memory."""
_LAYERS = re.compile(r"\[([^\[\]]+)\]|([^\[\]])")


def pattern_layers(pattern: str) -> tuple[str, ...]:
    """Return the letters of each layer of a hybrid pattern, without stage marks.

    A letter is a layer with one mixer; letters in brackets are one layer with several mixers.
    The letters after a / are parsed by ``further_letters``.
    """
    pattern = pattern.partition("/")[0]
    text = without_stage_marks(pattern)
    layers = tuple(in_brackets or letter for in_brackets, letter in _LAYERS.findall(text))
    letters = "".join(layers)
    problem = ""
    if unknown := sorted(set(letters) - PATTERN_MIXERS.keys()):
        problem = f"unknown {' '.join(unknown)}"
    elif pattern and not letters:
        problem = "the pattern has no layer"
    elif text != join_layers(layers):
        problem = "brackets must enclose the letters, two or more, of one layer"
    elif any(len(set(layer)) < len(layer) for layer in layers) or any(
        "|" in inside for inside, _ in _LAYERS.findall(pattern)
    ):
        problem = "a layer in brackets cannot contain | or a letter twice"
    if problem:
        mixers = ", ".join(f"{letter} ({name})" for letter, name in PATTERN_MIXERS.items())
        raise ValueError(
            f"--hybrid-override-pattern {pattern}: {problem}. Use {mixers}, [ and ] around the "
            "letters of one layer, | between pipeline stages, and / before the letters of each "
            "layer of multi-token prediction."
        )
    return layers


def without_stage_marks(pattern: str) -> str:
    """Return a hybrid pattern without |: the same model without pipeline stages."""
    layers, slash, further = pattern.partition("/")
    return layers.replace("|", "") + slash + further


def further_letters(pattern: str) -> str:
    """Return the letters of one layer of multi-token prediction; empty without such layers."""
    sections = [section.removeprefix("[").removesuffix("]") for section in pattern.split("/")]
    letters = {*sections[1:]}
    for section in letters:
        has_mixers = section and set(section) <= PATTERN_MIXERS.keys()
        if not has_mixers or len(set(section)) < len(section) or len(letters) > 1:
            raise ValueError(
                f"--hybrid-override-pattern {pattern}: after each / there must be the same "
                "letters, each once, of one layer of multi-token prediction, such as /*-/*-."
            )
    return sections[1] if letters else ""


def join_layers(layers: Iterable[str]) -> str:
    """Return layers as a hybrid pattern; inverse of ``pattern_layers``."""
    return "".join(layer if len(layer) == 1 else f"[{layer}]" for layer in layers)


def is_local(config: Any, layer: int) -> bool:
    """Whether a layer (counted from 0) attends within a window or a chunk.

    Args:
        config: any object with the fields of ``TransformerConfig``.
        layer: number of the layer.
    """
    if config.window_size[0] < 0 and not config.attention_chunk_size:
        return False
    text = config.window_attn_skip_freq
    return not layers_skip(text, config.num_layers, "window_attn_skip_freq", ones=False)[layer]


def keys_layer(config: Any, layer: int) -> int:
    """Return the layer whose keys and values a layer's attention reads.

    That is the layer itself, except for the last ``num_kv_shared_layers`` layers: each reads
    those of the last earlier layer that computes keys and has the same kind, with or without a
    window.

    Args:
        config: any object with the fields of ``TransformerConfig``.
        layer: number of the layer.
    """
    num_own = config.num_layers - config.num_kv_shared_layers
    if layer < num_own:
        return layer
    kind = is_local(config, layer)
    return max(other for other in range(num_own) if is_local(config, other) == kind)


def layers_skip(text: str, num_layers: int, name: str, ones: bool = True) -> tuple[bool, ...]:
    """Return for each layer whether it skips a feature.

    Args:
        text: "N" for every N-th layer, "0" for none, or a list with 0 or 1 for each layer.
        num_layers: number of layers.
        name: of the field, for errors.
        ones: whether 1 in a list means that the layer skips; False: 0 does.
    """
    pattern = read_pattern(text, _flag(name))
    if isinstance(pattern, int):
        if pattern < 0:
            raise ValueError(f"{_flag(name)} {pattern} must be 0 or more.")
        return tuple(pattern > 0 and (i + 1) % pattern == 0 for i in range(num_layers))
    if len(pattern) != num_layers or not set(pattern) <= {0, 1}:
        raise ValueError(
            f"{_flag(name)} {text} must hold one 0 or 1 for each of --num-layers {num_layers}; "
            f"it holds {len(pattern)} entries."
        )
    return tuple((entry == 1) == ones for entry in pattern)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_pattern(text: str, flag: str) -> int | list[int]:
    """Return the number, or the list of numbers that may be written with + and *, in text."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{flag} {text!r}: use a number, or a list such as [0]*3+[1]*58."
        ) from error


def _evaluate(node: ast.expr) -> int | list[int]:
    """Evaluate numbers, lists of numbers, + and *; raise TypeError for other syntax."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=elements):
            return [_number(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(a, list) and isinstance(b, list):
                return a + b
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            a, b = _evaluate(left), _evaluate(right)
            is_short = isinstance(a, int) or (isinstance(b, int) and len(a) * b <= MOST_LAYERS)
            if isinstance(b, int) and is_short:
                return a * b
    raise TypeError(f"{ast.unparse(node)} is neither a list nor a number")


def _number(node: ast.expr) -> int:
    value = _evaluate(node)
    if isinstance(value, int):
        return value
    raise TypeError(f"{ast.unparse(node)} is not a number")
