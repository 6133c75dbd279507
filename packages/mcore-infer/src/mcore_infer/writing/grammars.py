"""Grammars of structures, and tokenizers in llguidance's form; imports no torch.

``grammar_trial`` imports this module in a separate process, which must start quickly.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from mcore_data.tokenizers.hf import HFTokenizer
from mcore_data.tokenizers.protocol import Tokenizer

MAX_BYTES = 1 << 18
"""Most bytes of a schema, an expression or a grammar."""
_BLANK = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between the parts of JSON: enough to indent, but limited, so that a model cannot
write white space forever. ``x-guidance`` in a schema takes precedence."""
_MISSING = "structured output needs llguidance: pip install 'mcore-infer[structured]'."
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that a text must have."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """The schema as JSON (``{}``: any JSON), an expression for the whole text, or a grammar in
    llguidance's dialect of Lark."""


def build_grammar(structure: Structure) -> str:
    """Return the grammar of a structure in llguidance's form.

    Raises:
        ValueError: if llguidance is missing, the schema is no JSON, or the structure is longer
            than ``MAX_BYTES``.
    """
    matcher = llguidance().LLMatcher
    if len(structure.text.encode()) > MAX_BYTES:
        name = _NAMES[structure.kind]
        raise ValueError(f"this {name} is longer than {MAX_BYTES >> 10} KiB: shorten it.")
    if structure.kind == "regex":
        return matcher.grammar_from_regex(structure.text)
    if structure.kind == "lark":
        return matcher.grammar_from_lark(structure.text)
    try:
        schema = json.loads(structure.text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is no JSON: {error}.") from None
    return matcher.grammar_from_json_schema(json_rule(schema).removeprefix("%json "))


def json_rule(schema: Any) -> str:
    """Return a Lark rule for the JSON values of a schema.

    Raises:
        ValueError: if no value satisfies the schema.
    """
    schema = finite(schema)
    if schema is False:
        raise ValueError("this JSON schema cannot be enforced: no finite value satisfies it.")
    if isinstance(schema, dict) or schema is True:
        schema = {} if schema is True else schema
        schema = {"x-guidance": {"whitespace_pattern": _BLANK}, **schema}
    return f"%json {json.dumps(schema)}"


def finite(schema: Any) -> Any:
    """Return a schema in which parts that no finite value satisfies are ``false``.

    Such a part refers to or requires itself. With ``false`` in its place, llguidance refuses a
    schema that requires the part, and leaves out an optional part; otherwise texts would start
    an endless value.
    """
    nodes = list(_subschemas(schema))
    has_value: set[int] = set()
    num_known = -1
    while num_known < len(has_value):  # least fixed point, starting from finite parts
        num_known = len(has_value)
        has_value |= {id(node) for node in nodes if _has_value(node, schema, has_value)}
    if num_known == len({id(node) for node in nodes}):
        return schema
    return _replaced(schema, has_value)


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    pending = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name in _SCHEMAS_BY_NAME:
            if isinstance(parts := node.get(name), dict):
                pending += parts.values()
        for name in _SCHEMA_LISTS:
            if isinstance(parts := node.get(name), list):
                pending += parts
        pending += [node[name] for name in _SCHEMAS if name in node]


def _has_value(node: dict[str, Any], root: Any, known: set[int]) -> bool:
    """Whether a value satisfies a schema, given the subschemas ``known`` to have values."""

    def holds(part: Any) -> bool:
        return part is not False and (not isinstance(part, dict) or id(part) in known)

    if isinstance(reference := node.get("$ref"), str) and not holds(_target(reference, root)):
        return False
    if isinstance(parts := node.get("allOf"), list) and not all(map(holds, parts)):
        return False
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := node.get(name), list) and not any(map(holds, parts)):
            return False
    if "enum" in node or "const" in node or "type" not in node:
        return True  # a value of another type than object and array satisfies it
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    return any(_KINDS.get(kind, lambda *_: True)(node, holds) for kind in kinds)


def _object_has_value(node: dict[str, Any], holds: Any) -> bool:
    parts, required = node.get("properties"), node.get("required")
    if not isinstance(parts, dict) or not isinstance(required, list):
        return True
    return all(holds(parts.get(name, True)) for name in required if isinstance(name, str))


def _array_has_value(node: dict[str, Any], holds: Any) -> bool:
    min_items, first = node.get("minItems", 0), node.get("prefixItems")
    first = first if isinstance(first, list) else []
    if not isinstance(min_items, int) or not all(map(holds, first[:min_items])):
        return not isinstance(min_items, int)
    return min_items <= len(first) or holds(node.get("items", True))


_KINDS = {"object": _object_has_value, "array": _array_has_value}


def _target(reference: str, root: Any) -> Any:
    """Return the target of a local reference; True for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    node = root
    for part in reference[2:].split("/") if len(reference) > 1 else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return True
    return node


def _replaced(node: Any, has_value: set[int]) -> Any:
    if not isinstance(node, dict):
        return node
    if id(node) not in has_value:
        return False
    replaced = dict(node)
    for name in _SCHEMAS_BY_NAME:
        if isinstance(parts := node.get(name), dict):
            replaced[name] = {key: _replaced(part, has_value) for key, part in parts.items()}
    for name in _SCHEMA_LISTS:
        if isinstance(parts := node.get(name), list):
            replaced[name] = [_replaced(part, has_value) for part in parts]
    for name in _SCHEMAS:
        if name in node:
            replaced[name] = _replaced(node[name], has_value)
    return replaced


class Vocabulary:
    """A tokenizer in llguidance's form."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def compile(self, grammar: str, kind: str) -> Any:
        """Return a matcher whose first mask is computed.

        Raises:
            ValueError: if llguidance rejects the grammar, or no text matches it.
        """
        library = llguidance()
        limits = library.LLParserLimits(precompute_large_lexemes=False)
        matcher = library.LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"this {_NAMES[kind]} cannot be enforced: {error_of(matcher)}")
        return matcher


def error_of(matcher: Any) -> str:
    """Return the error of a matcher in one line."""
    error = " ".join(matcher.get_error().partition("<state>")[0].split())
    return "no text satisfies it." if error.startswith("NoExtension") else error


def open_vocabulary(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> Vocabulary:
    """Convert a tokenizer to llguidance's form.

    Raises:
        ValueError: if llguidance is missing, no token ends a text, or the tokenizer does not
            give the bytes of its tokens.
    """
    library = llguidance()
    if not ends:
        raise ValueError("structured output needs a tokenizer with an end of document.")
    sizes = {"n_vocab": vocab_size, "eos_token": list(ends)}
    if isinstance(tokenizer, HFTokenizer):
        return Vocabulary(library.LLTokenizer(tokenizer.text, **sizes))
    if not isinstance(tokenizer, _HasTokenBytes):
        raise ValueError(
            f"structured output needs the bytes of tokens, which {type(tokenizer).__name__} "
            "does not return: use a Hugging Face or SentencePiece tokenizer."
        )
    view = _TokenizerView(tokenizer, vocab_size, ends[0])
    return Vocabulary(library.LLTokenizer(library.TokenizerWrapper(view), **sizes))


@runtime_checkable
class _HasTokenBytes(Protocol):
    """A tokenizer that returns the bytes of each id; None: the id has no text."""

    def token_bytes(self) -> list[bytes | None]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class _TokenizerView:
    """A tokenizer with the attributes and the call that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: _HasTokenBytes, vocab_size: int, end: int) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, end
        texts = tokenizer.token_bytes()
        texts += [None] * (vocab_size - len(texts))
        self.tokens = [
            f"<{i}>".encode() if text is None else text for i, text in enumerate(texts)
        ]
        self.special_token_ids = [i for i, text in enumerate(texts) if text is None]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def llguidance() -> Any:
    """Import llguidance."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(_MISSING) from None
    return llguidance
