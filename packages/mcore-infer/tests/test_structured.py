"""Texts that are held to a schema or an expression, beside others that are not."""

import json
import re
import time

import pytest
import tokenizers

from mcore_data.tokenizers.hf import HFTokenizer, set_byte_level
from mcore_data.tokenizers.plain import ByteTokenizer, NullTokenizer
from mcore_infer import Engine, EngineConfig, SamplingConfig, generate
from mcore_infer.writing.grammars import finite
from mcore_infer.writing.structured import Grammars, Structure

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DRAWN = SamplingConfig(num_tokens=39)


def bpe():
    """A byte-level tokenizer whose tokens cross the borders of JSON."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    set_byte_level(core)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:150],  # ASCII
        show_progress=False,
    )
    core.train_from_iterator(['{"name":"bob","n":1,"tags":[true,false]}'] * 20, trainer)
    return HFTokenizer(core)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), bpe()], ids=["bytes", "bpe"])
def test_texts_keep_to_their_structure_and_leave_their_neighbours(model, tokenizer):
    engine = Engine(model, EngineConfig(max_sequence_tokens=40, num_pages=64, page_tokens=4))
    engine.grammars = Grammars(tokenizer, model.vocab_size)
    schema = Structure("json_schema", json.dumps(SCHEMA))
    kinds = [None, schema, Structure("regex", "[a-c]{2}-[0-9]+"), None, schema]
    samplings = [DRAWN, DRAWN, DRAWN, SamplingConfig(num_tokens=9, top_k=1), DRAWN]
    for runs_ahead in (False, True):
        engine.runs_ahead = runs_ahead
        numbers = [
            engine.add([1], sampling, seed=i, structure=kind, eod=tokenizer.eod)
            for i, (kind, sampling) in enumerate(zip(kinds, samplings, strict=True))
        ]
        results = dict(event for event in engine.run() if isinstance(event, tuple))
        texts = []
        for i, number in enumerate(numbers):
            ids = list(results[number].ids)
            texts.append(tokenizer.decode([t for t in ids if t != tokenizer.eod]))
            if kinds[i] is None:
                alone = generate(model, [[1]], samplings[i], seed=i, eod=tokenizer.eod)
                assert ids == list(alone[0].ids)
        for i in (1, 4):
            found = json.loads(texts[i])
            assert list(found) == ["name", "n", "tags"]
            assert found["name"] in ("ann", "bob")
            assert found["n"] in range(10)
            assert results[numbers[i]].finish_reason == "stop"
        assert re.fullmatch("[a-c]{2}-[0-9]+", texts[2])


def test_json_is_not_held_up_by_blanks():
    """A model that likes blanks writes 32 of them between two parts, and then goes on."""
    tokenizer = ByteTokenizer()
    matcher = Grammars(tokenizer, 257).matcher(Structure("json_schema", "{}"))
    assert all(matcher.take(token) for token in b"{\n" + b" " * 31)
    words = matcher.allowed()
    assert not words[1] >> (ord(" ") - 32) & 1
    assert words[1] >> (ord('"') - 32) & 1


def test_a_text_that_its_vocabulary_cannot_go_on_with_never_stops_as_if_it_were_whole(
    model, caplog
):
    engine = Engine(model, EngineConfig(max_sequence_tokens=40))
    engine.grammars = Grammars(bpe(), model.vocab_size)
    number = engine.add([1], DRAWN, structure=Structure("regex", "ab\u20ac"))
    result = dict(event for event in engine.run() if isinstance(event, tuple))[number]
    assert engine.grammars.tokenizer.decode(list(result.ids)) == "ab"
    assert result.finish_reason == "error"
    assert "cannot satisfy its structure" in caplog.text


ENDLESS = [
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {
        "$defs": {
            "x": {"anyOf": [{"$ref": "#/$defs/y"}, {"allOf": [{"$ref": "#/$defs/x"}]}]},
            "y": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/x"}},
        },
        "$ref": "#/$defs/x",
    },
    {"type": "string", "pattern": "^a$", "minLength": 2},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
    {"type": "object", "allOf": [{"properties": {"a": {"$ref": "#"}}}, {"required": ["a"]}]},
    {"$anchor": "x", "type": "array", "minItems": 1, "items": {"$ref": "#x"}},
    {
        "$id": "https://e.x/s",
        "type": "array",
        "minItems": 1,
        "items": {"$ref": "https://e.x/s"},
    },
    {
        "$defs": {"a b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a%20b"}}},
        "$ref": "#/$defs/a%20b",
    },
    {"type": "object", "patternProperties": {"^a$": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "patternProperties": {"b.*": {"$ref": "#"}}, "required": ["abc"]},
    {"type": "object", "patternProperties": {"": {"$ref": "#"}}, "minProperties": 1},
    {
        "type": "object",
        "patternProperties": {"^[a]{1}$": {"$ref": "#"}},
        "additionalProperties": False,
        "required": ["a"],
    },
]
FINITE = [
    (
        {"type": "object", "patternProperties": {"^a$": {"$ref": "#"}}, "required": ["b"]},
        '{"b":1}',
        '{"a":1',
    ),
    ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "{}", '{"a"'),
    ({"type": "array", "items": {"$ref": "#/items"}}, "[]", "[1"),
    (
        {
            "type": "object",
            "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["n"],
        },
        '{"n":{"n":null}}',
        '{"n":1',
    ),
    ({"$defs": {"a~/b": {"type": "integer"}}, "$ref": "#/$defs/a~0~1b"}, "1", '"'),
    ({"parts": {"a": {"type": "integer"}}, "$ref": "#/parts/a"}, "1", '"'),
    ({"allOf": [{"required": ["a"]}], "type": "object", "minProperties": 1}, '{"a":1}', "{}"),
]


@pytest.fixture(scope="module")
def grammars():
    return Grammars(ByteTokenizer(), 257)


@pytest.mark.parametrize("schema", ENDLESS, ids=json.dumps)
def test_a_schema_without_a_finite_value_is_refused(grammars, schema):
    with pytest.raises(ValueError, match="cannot be enforced"):
        grammars.matcher(Structure("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(("schema", "value", "other"), FINITE, ids=str)
def test_parts_without_a_finite_value_are_left_out(grammars, schema, value, other):
    structure = Structure("json_schema", json.dumps(schema))
    matcher = grammars.prepare(structure).result().matcher.deep_copy()
    assert matcher.consume_tokens(list(value.encode()))
    assert matcher.is_accepting()
    matcher = grammars.matcher(structure)
    assert not all(matcher.take(token) for token in other.encode())


def test_a_long_chain_of_references_takes_no_quadratic_time():
    chain = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(4000)}
    schema = {"$ref": "#/$defs/n0", "$defs": chain | {"n4000": {"type": "integer"}}}
    begin = time.process_time()
    assert finite(schema) is schema
    assert finite(schema | {"$defs": chain | {"n4000": {"$ref": "#/$defs/n0"}}}) is False
    assert time.process_time() - begin < 3  # one pass over all parts for each part took 70


def test_a_structure_is_tried_and_compiled_once_beside_its_texts():
    grammars = Grammars(ByteTokenizer(), 257)
    number = Structure("regex", "[0-9]{2}")
    first = grammars.prepare(number)
    assert grammars.prepare(number) is first
    assert first.result() is grammars.prepare(number).result()
    one, two = grammars.matcher(number), grammars.matcher(number)
    assert one.take(ord("1"))
    assert two.take(ord("2"))  # each text has a matcher of its own
    slow = Structure("json_schema", '{"type": "integer", "multipleOf": 9999991}')
    with pytest.raises(ValueError, match="more than 2 seconds"):
        grammars.prepare(slow).result()
    with pytest.raises(ValueError, match="longer than 256 KiB"):
        grammars.prepare(Structure("regex", "a" * 300_000)).result()
    with pytest.raises(ValueError, match="no text satisfies it"):
        grammars.prepare(Structure("regex", r"[^\s\S]")).result()
    assert grammars.prepare(Structure("regex", "b")).result()  # goes on behind all of them


def test_what_no_grammar_holds_is_refused(model):
    engine = Engine(model, EngineConfig(max_sequence_tokens=40))
    any_json = Structure("json_schema", "{}")
    with pytest.raises(ValueError, match="an engine with a tokenizer"):
        engine.add([1], DRAWN, structure=any_json)
    engine.grammars = Grammars(ByteTokenizer(), model.vocab_size)
    with pytest.raises(ValueError, match=r"(?s)regular expression cannot be enforced: .*\[0-9"):
        engine.add([1], DRAWN, structure=Structure("regex", "[0-9"))
    with pytest.raises(ValueError, match="JSON schema cannot be enforced: Invalid type: frog"):
        engine.add([1], DRAWN, structure=Structure("json_schema", '{"type": "frog"}'))
    with pytest.raises(ValueError, match="the schema is not valid JSON: "):
        engine.add([1], DRAWN, structure=Structure("json_schema", "{"))
    engine.grammars = Grammars(NullTokenizer(20), model.vocab_size)
    with pytest.raises(ValueError, match="the bytes of tokens, which NullTokenizer"):
        engine.add([1], DRAWN, structure=any_json)
    assert not engine.has_work
