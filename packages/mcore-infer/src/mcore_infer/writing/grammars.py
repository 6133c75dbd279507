"""Converts structures and tokenizers to llguidance's form.

Imports no torch, because ``grammar_trial`` imports this module in a process that must start
quickly.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable
from urllib.parse import unquote

from mcore_data.tokenizers.hf import HFTokenizer
from mcore_data.tokenizers.protocol import Tokenizer

MAX_BYTES = 1 << 18
"""Largest size of a schema, an expression or a grammar."""
_BLANK = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between the parts of JSON: enough for indentation, but limited, so that a model
cannot write white space forever. ``x-guidance`` in a schema takes precedence."""
_MISSING = "structured output needs llguidance: pip install 'mcore-infer[structured]'."
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NUM_INCLUDED = 16
"""Largest number of subschemas of one conjunction that are combined."""
_MOST_LETTERS = 256
"""Largest total length of a pattern and a property's name that are compared."""
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
        ValueError: if llguidance is missing, the schema is not JSON, or the structure is longer
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
        raise ValueError(f"the schema is not valid JSON: {error}.") from None
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
    """Replace subschemas that no finite value satisfies by ``false``; return the schema.

    Such a subschema refers to or requires itself. With ``false`` in its place, llguidance
    refuses a schema that requires it, and leaves out an optional property; otherwise a text
    could start an endless value. The time is linear in the size of the schema.
    """
    has_value, num_parts = _parts_with_values(schema)
    return schema if num_parts == len(has_value) else _replaced(schema, has_value)


def _parts_with_values(schema: Any) -> tuple[set[int], int]:
    """Return the ids of subschemas that a finite value satisfies, and the number of all.

    A least fixed point: each subschema is a gate, true once all or any of its inputs are true,
    and each input is counted once (Dowling and Gallier 1984).
    """
    open_inputs: list[int] = []  # of each gate: inputs that must still become true
    users: list[list[int]] = []  # of each gate: gates that have it as an input
    gates: dict[int, int] = {}  # id of a subschema -> gate
    pending: list[dict[str, Any]] = []
    anchors = {f"#{n['$anchor']}": n for n in _subschemas(schema) if "$anchor" in n}

    def gate() -> int:
        open_inputs.append(0)
        users.append([])
        return len(users) - 1

    def gate_of(part: Any) -> int | None:
        """Return the gate of a subschema; None: a finite value satisfies the subschema."""
        if part is False:
            return never
        if not isinstance(part, dict):
            return None
        if id(part) not in gates:
            gates[id(part)] = gate()
            pending.append(part)
        return gates[id(part)]

    def require(number: int, *inputs: int | None) -> None:
        for each in inputs:
            if each is not None:
                users[each].append(number)
                open_inputs[number] += 1

    def any_of(inputs: Sequence[int | None]) -> int | None:
        if None in inputs:
            return None
        number = gate()
        open_inputs[number] = 1
        for each in inputs:
            users[cast("int", each)].append(number)
        return number

    def kind_gate(kind: Any, parts: Sequence[dict[str, Any]]) -> int | None:
        """Return a gate: some object (or array) satisfies all parts; None: other types do."""
        number = gate()
        if kind == "object":
            required = {name for part in parts for name in _required(part)}
            for part in parts:
                require(number, *(any_of([*map(gate_of, _of_name(part, n))]) for n in required))
                if _count(part, "minProperties") > len(required):
                    require(number, any_of([*map(gate_of, _of_any_name(part))]))
            return number
        for part in parts if kind == "array" else ():
            first, count = _values(part, "prefixItems"), _count(part, "minItems")
            rest = [part.get("items", True)] if count > len(first) else []
            require(number, *map(gate_of, [*first[:count], *rest]))
        return number if kind == "array" else None

    never = gate()
    open_inputs[never] = 1
    nodes = list(_subschemas(schema))
    for node in nodes:
        gate_of(node)
    while pending:
        node = pending.pop()
        number = gates[id(node)]
        require(number, *map(gate_of, _values(node, "allOf")))
        if isinstance(reference := node.get("$ref"), str):
            require(number, gate_of(_target(reference, schema, anchors)))
        for name in ("anyOf", "oneOf"):
            if isinstance(node.get(name), list):
                require(number, any_of([*map(gate_of, node[name])]))
        if node.keys() == {"$ref"}:
            continue
        parts = _conjunction(node, schema, anchors)
        kinds = next((part["type"] for part in parts if "type" in part), None)
        if kinds is None or any("enum" in part or "const" in part for part in parts):
            continue  # a number, a string or a listed value satisfies the subschema
        kinds = kinds if isinstance(kinds, list) else [kinds]
        require(number, any_of([kind_gate(kind, parts) for kind in kinds]))
    ready = [number for number, count in enumerate(open_inputs) if not count]
    while ready:
        for user in users[ready.pop()]:
            open_inputs[user] -= 1
            # Further inputs of an any_of gate make its count negative: it fires once, at 0.
            if not open_inputs[user]:
                ready.append(user)
    return {part for part, number in gates.items() if open_inputs[number] <= 0}, len(gates)


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


def _conjunction(node: dict[str, Any], root: Any, anchors: Any) -> list[dict[str, Any]]:
    """Return a subschema and those it includes by ``allOf`` and ``$ref``, up to a limit."""
    parts, seen = [node], {id(node)}
    for part in parts:
        included = list(_values(part, "allOf"))
        if isinstance(reference := part.get("$ref"), str):
            included.append(_target(reference, root, anchors))
        for each in included:
            if isinstance(each, dict) and id(each) not in seen and len(parts) < _NUM_INCLUDED:
                seen.add(id(each))
                parts.append(each)
    return parts


def _required(part: dict[str, Any]) -> list[str]:
    return [name for name in _values(part, "required") if isinstance(name, str)]


def _values(part: dict[str, Any], name: str) -> list[Any]:
    return part[name] if isinstance(part.get(name), list) else []


def _count(part: dict[str, Any], name: str) -> int:
    return part[name] if isinstance(part.get(name), int) else 0


def _of_name(part: dict[str, Any], name: str) -> list[Any]:
    """Return the candidates for the subschema of one property; at least one applies."""
    properties = part.get("properties")
    if isinstance(properties, dict) and name in properties:
        return [properties[name]]
    matches = [(_matches(pattern, name), each) for pattern, each in _patterns(part)]
    for is_match, subschema in matches:
        if is_match:
            return [subschema]
    undecided = [subschema for is_match, subschema in matches if is_match is None]
    return [*undecided, part.get("additionalProperties", True)]


def _of_any_name(part: dict[str, Any]) -> list[Any]:
    """Return the candidates for the subschema of a property with any free name."""
    properties = part.get("properties")
    named = list(properties.values()) if isinstance(properties, dict) else []
    patterns = _patterns(part)
    for pattern, subschema in patterns:
        if pattern.strip("^$") in ("", ".*") and pattern != "^$":
            return [*named, subschema]
    others = [subschema for _, subschema in patterns]
    return [*named, *others, part.get("additionalProperties", True)]


def _patterns(part: dict[str, Any]) -> list[tuple[str, Any]]:
    patterns = part.get("patternProperties")
    return list(patterns.items()) if isinstance(patterns, dict) else []


def _matches(pattern: str, name: str) -> bool | None:
    """Whether a pattern matches a property's name; None: undecided.

    Only patterns of letters, digits, dots and at most one repetition at their end are compared:
    such patterns mean the same in every dialect of expressions and take little time.
    """
    is_plain = re.fullmatch(r"\^?([\w .-]*[\w .-][*+?]?)?\$?", pattern, re.ASCII)
    if not is_plain or len(pattern) + len(name) > _MOST_LETTERS or not name.isprintable():
        return None
    return re.search(pattern, name) is not None


def _target(reference: str, root: Any, anchors: Any) -> Any:
    """Return the target of a local reference; True for other references."""
    # A reference may repeat the schema's own URL ($id) before the fragment.
    if isinstance(root, dict) and isinstance(base := root.get("$id"), str) and base:
        reference = reference.removeprefix(base.removesuffix("#")) or "#"
    if reference in anchors:
        return anchors[reference]
    if reference != "#" and not reference.startswith("#/"):
        return True
    node = root
    for part in unquote(reference[2:]).split("/") if len(reference) > 1 else ():
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
        """Compile a grammar to a matcher, and compute its first mask.

        Raises:
            ValueError: if llguidance rejects the grammar, or no text matches the grammar.
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
            return the bytes of its tokens.
    """
    library = llguidance()
    if not ends:
        raise ValueError("structured output needs a tokenizer with an end-of-document token.")
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
    """Adapter of a tokenizer with the attributes and the call that llguidance expects."""

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
    """Import llguidance; raise ValueError with the name of the extra if it is missing."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(_MISSING) from None
    return llguidance
