"""Calls of tools: as families write them, in any pieces; forced; and in a client's loop."""

import json

import pytest
import tokenizers

from mcore_data.tokenizers.hf import HFTokenizer, set_byte_level
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import NewToken
from mcore_infer.server.schemas import Function
from mcore_infer.server.tool_calls import (
    HARMONY,
    PLAIN,
    AnswerReader,
    ChannelReader,
    answer_after_thinking,
    calls_structure,
    kept_tokens,
    marks_of,
    tool_format,
)
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.structured import Grammars
from mcore_infer.writing.token_text import Answer, TokenTexts


def deepseek(text):
    return text.replace("|", "\uff5c").replace("_", "\u2581")


BEGIN, SEP, END = (deepseek(f"<|tool_{name}|>") for name in ("call_begin", "sep", "call_end"))
ALL = deepseek("<|tool_calls_begin|>"), deepseek("<|tool_calls_end|>")
V3 = f"{BEGIN}function{SEP}f\n```json\n%s\n```{END}"
V31 = f"{BEGIN}f{SEP}%s{END}"
CALL = '{"name": "f", "arguments": %s}'
FORMATS = {
    "hermes": ("<tool_call>", f"<tool_call>\n{CALL}\n</tool_call>", "\n", "", ""),
    "mistral": ("[TOOL_CALLS]", CALL, ", ", "[TOOL_CALLS] [", "]"),
    "mistral with names": ("[TOOL_CALLS] [ARGS]", "[TOOL_CALLS]f[ARGS]%s", "", "", ""),
    "llama": ("<|python_tag|>", '{"name": "f", "parameters": %s}', "; ", "", ""),
    "deepseek v3": (f"{ALL[0]} ```json", V3, "\n", *ALL),
    "deepseek v3.1": (ALL[0], V31, "", *ALL),
    "lists": ("<|tool_call|>", CALL, ", ", "<|tool_call|>[", "]"),
}
"""What a template holds, a call, between two, before and behind all."""
BY_PARAMETER = {
    "qwen xml": (
        "<tool_call> <function=",
        """<tool_call>
<function=f>
<parameter=a>
%s
</parameter>
<parameter=b>
%s
</parameter>
</function>
</tool_call>""",
    ),
    "glm": (
        "<tool_call> <arg_key>",
        """<tool_call>f
<arg_key>a</arg_key>
<arg_value>%s</arg_value>
<arg_key>b</arg_key>
<arg_value>%s</arg_value>
</tool_call>""",
    ),
    "minimax": (
        "<minimax:tool_call>",
        """<minimax:tool_call>
<invoke name="f">
<parameter name="a">%s</parameter>
<parameter name="b">%s</parameter>
</invoke>
</minimax:tool_call>""",
    ),
}
"""What a template holds, and a call whose arguments are written one by one."""
CHANNELS = (
    "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I look.\n<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    '<|message|>{"a": "}<b>"}<|call|>'
)
ARGUMENTS = ['{"a": "}]\\n</tool_call>"}', '{"b": [1, {}]}']


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_from_text_in_any_pieces(name):
    template, call, between, begin, end = FORMATS[name]
    form = tool_format(template)
    written = begin + between.join(call % one for one in ARGUMENTS) + end
    before = "" if name == "llama" else "I look.\n"
    for size in (1, 2, 7, 1000):
        reader = AnswerReader(form)
        text = before + written
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        deltas = [reader.add(part) for part in parts] + [reader.add("", is_last=True)]
        assert "".join(delta.content for delta in deltas) == before
        calls = [found for delta in deltas for found in delta.calls]
        assert [name for name, _ in calls] == ["f", "f"]
        assert [json.loads(one) for _, one in calls] == [json.loads(one) for one in ARGUMENTS]
    for broken in (written[: len(written) // 3], "no call", "{", "", '{"a": 1}'):
        reader = AnswerReader(form)
        deltas = [reader.add(broken), reader.add("", is_last=True)]
        assert "".join(delta.content for delta in deltas) == broken
        assert not reader.num_calls


@pytest.mark.parametrize("name", BY_PARAMETER)
def test_arguments_that_are_written_one_by_one_are_read_by_their_schema(name):
    template, call = BY_PARAMETER[name]
    text_or_null = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties = {"a": text_or_null, "b": {"type": "array"}}
    parameters = {"type": "object", "properties": properties}
    functions = [Function(name="f", parameters=parameters)]
    form = tool_format(template)
    text = "I look.\n" + "\n".join(
        call % each for each in (("5 <\n}", "[1, {}]"), ("null", "x"))
    )
    for size in (1, 7, 1000):
        reader = AnswerReader(form, functions)
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        deltas = [reader.add(part) for part in parts] + [reader.add("", is_last=True)]
        assert "".join(delta.content for delta in deltas) == "I look.\n"
        calls = [(name, json.loads(one)) for delta in deltas for name, one in delta.calls]
        assert calls == [("f", {"a": "5 <\n}", "b": [1, {}]}), ("f", {"a": None, "b": "x"})]
    broken = (call % ("a", "b")).rpartition("</")[0].replace("</parameter>", "")
    reader = AnswerReader(form, functions)
    parts = [reader.add(broken[:9]), reader.add(broken[9:]), reader.add("", is_last=True)]
    if name != "glm":  # whose parameters have another end
        assert "".join(delta.content for delta in parts) == broken
    assert not reader.num_calls


def test_channels_are_reasoning_content_and_calls_in_any_pieces():
    for size in (1, 3, 1000):
        reader = ChannelReader()
        text = CHANNELS + "<|start|>assistant<|channel|>final<|message|>yes"
        *parts, last = [text[i : i + size] for i in range(0, len(text), size)]
        deltas = [reader.add(part) for part in parts] + [reader.add(last, is_last=True)]
        assert "".join(delta.reasoning for delta in deltas) == "so"
        assert "".join(delta.content for delta in deltas) == "I look.\nyes"
        assert [call for delta in deltas for call in delta.calls] == [("f", '{"a": "}<b>"}')]
    for text in ('{"a": 1}', "plain <|chan", "<|chan", ""):
        reader = ChannelReader()
        deltas = [reader.add(text), reader.add("", is_last=True)]
        assert "".join(delta.content for delta in deltas) == text


def test_reasoning_is_apart_in_any_pieces():
    marks = ("<think>", "</think>")
    for size in (1, 3, 100):
        for begins, text in (
            (False, "\n<think>\nso</think>\n\nyes"),
            (True, "\nso</think>yes"),
        ):
            reader = AnswerReader(None, reasoning=marks, begins_in_reasoning=begins)
            parts = [text[i : i + size] for i in range(0, len(text), size)]
            deltas = [reader.add(part) for part in parts] + [reader.add("", is_last=True)]
            assert "".join(delta.reasoning for delta in deltas) == "\nso"
            assert "".join(delta.content for delta in deltas) == "yes"
    reader = AnswerReader(None, reasoning=marks)
    deltas = [reader.add("<thin"), reader.add("g> I", is_last=True)]
    assert [delta.content for delta in deltas] == ["", "<thing> I"]


def marked_bpe():
    """A byte-level tokenizer whose marks of calls are special tokens, which texts leave out."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    set_byte_level(core)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + 40,
        special_tokens=[
            *("<|endoftext|>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>"),
            *("<arg_key>", "</arg_value>", "<|channel|>", "<|message|>"),
        ],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([CALL % '{"a": 1}'] * 9, trainer)
    return HFTokenizer(core)


@pytest.mark.parametrize("name", [*FORMATS, *BY_PARAMETER, "channels", "plain"])
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), marked_bpe()], ids=["bytes", "bpe"])
def test_a_grammar_forces_the_calls_that_the_reader_reads(name, tokenizer):
    templates = {key: value[0] for key, value in (FORMATS | BY_PARAMETER).items()}
    templates["channels"] = "<|channel|> <|message|>"
    form = PLAIN if name == "plain" else tool_format(templates[name])
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"x": {"enum": [1, 22]}},
        "x-guidance": {"whitespace_flexible": False},
    }
    functions = [Function(name=name, parameters=parameters) for name in ("f", "g.h")]
    structure = calls_structure(form, functions, tokenizer, is_parallel=False)
    texts = TokenTexts(tokenizer)
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(structure)
    answer = Answer(texts, kept=kept_tokens(marks_of(form), tokenizer))
    reader = ChannelReader() if form is HARMONY else AnswerReader(form, is_forced=True)
    text = ""
    while not matcher.is_over:
        words = matcher.allowed().tolist()
        allowed = [i for i in range(tokenizer.vocab_size) if words[i // 32] >> i % 32 & 1]
        token = max(
            set(allowed) - {tokenizer.eod}, default=None, key=lambda i: (texts.of(i), i)
        )
        if token is None:
            break
        assert matcher.take(token)
        text += answer.add(NewToken(0, token, None)).text
    delta = reader.add(text, is_last=True)
    assert (delta.content, reader.num_calls) == ("", 1), text
    assert delta.calls[0] == ("g.h", '{"a": 22}')


def test_a_forced_call_has_an_object_of_arguments_whatever_its_schema_allows():
    texts = TokenTexts(ByteTokenizer())
    either = {"anyOf": [True, {"type": "integer"}]}
    for parameters in ({}, {"type": ["null", "object"]}, either):
        functions = [Function(name="f", parameters=parameters)]
        structure = calls_structure(PLAIN, functions, ByteTokenizer(), is_parallel=False)
        matcher = Grammars(ByteTokenizer(), 257).matcher(structure)
        for byte in b'[{"name": "f", "arguments": ':
            assert matcher.take(byte)
        words = matcher.allowed().tolist()
        begins = {texts.of(i) for i in range(256) if words[i // 32] >> i % 32 & 1}
        assert begins - {b" ", b"\n", b"\t", b"\r"} == {b"{"}, parameters
    with pytest.raises(ValueError, match="must be object"):
        Function(name="f", parameters={"type": "string"})


def test_the_end_mark_of_a_call_is_not_content_if_the_next_call_is_incomplete():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    reader = AnswerReader(tool_format("<tool_call>"), is_forced=True)
    rest = '<tool_call>\n{"na'
    assert reader.add(f"{call}\n{rest}", is_last=True).content == rest


@pytest.mark.parametrize("name", BY_PARAMETER)
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), marked_bpe()], ids=["bytes", "bpe"])
def test_a_forced_argument_that_is_a_text_is_written_without_quotes(name, tokenizer):
    template, call = BY_PARAMETER[name]
    form = tool_format(template)
    properties = {"a": {"type": "string"}, "x": {"type": "boolean"}, "b": {"enum": [[1]]}}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    functions = [Function(name="f", parameters=parameters)]
    structure = calls_structure(form, functions, tokenizer, is_parallel=False)
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(structure)
    text = call % ('a "b" <\n', "[1]")
    assert all(matcher.take(token) for token in [*tokenizer.encode(text), tokenizer.eod])
    delta = AnswerReader(form, functions, is_forced=True).add(text, is_last=True)
    assert [json.loads(one) for _, one in delta.calls] == [{"a": 'a "b" <\n', "b": [1]}]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"enum": [1, 2]}},
                "required": ["n"],
                "additionalProperties": False,
                "x-guidance": {"whitespace_flexible": False},
            },
        },
    }
    for name in ("add", "look")
]
TEMPLATE = (
    "{% if tools %}{{ tools | length }} <tool_call> {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments.n }}{% endfor %}\n{% endfor %}"
    "a:"
)


@pytest.fixture(scope="module")
def hermes_client(long_model, serving):
    client, end = serving(long_model, template=TEMPLATE)
    yield client
    client.wait_until_idle()
    end()


def joined(parts):
    """What a streaming client makes of the deltas of one message."""
    message, reason = {"role": "assistant", "content": "", "tool_calls": []}, None
    for part in parts:
        (choice,) = part.choices
        reason = choice.finish_reason or reason
        message["content"] += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.index == len(message["tool_calls"])
            message["tool_calls"].append(call.model_dump(exclude={"index"}))
    return message, reason


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_agent_loop_of_the_official_client_works_unchanged(hermes_client, is_stream):
    import openai  # only here, for it takes long to load

    api = openai.OpenAI(base_url=f"http://127.0.0.1:{hermes_client.port}/v1", api_key="any")
    with api:
        messages = [{"role": "user", "content": "1"}]
        named = {"type": "function", "function": {"name": "look"}}
        for choice in ("required", named, "none"):
            fields = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 150}
            fields |= {"tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
            if is_stream:
                parts = api.chat.completions.create(stream=True, **fields)
                message, reason = joined(parts)
            else:
                (found,) = api.chat.completions.create(**fields).choices
                message, reason = found.message.model_dump(), found.finish_reason
                messages.append(found.message)
            if choice == "none":
                assert message["content"]
                assert not message["tool_calls"]
                break
            assert reason == "tool_calls", message
            assert not message["content"]
            (call,) = message["tool_calls"]
            assert call["function"]["name"] in (
                ("look",) if choice == named else ("add", "look")
            )
            assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
            if is_stream:
                messages.append(message)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})


def test_tools_may_be_answered_in_a_format_or_called(hermes_client):
    number = {"type": "regex", "pattern": "[0-9]{3}"}
    fields = {"messages": [{"role": "user", "content": "1"}], "response_format": number}
    ends = {}
    for bias in ("5", "<"):
        fields |= {"tools": TOOLS, "logit_bias": {str(ord(bias)): 100}, "max_tokens": 90}
        fields["parallel_tool_calls"] = False
        (choice,) = hermes_client.post("/v1/chat/completions", **fields)[1]["choices"]
        ends[choice["finish_reason"]] = choice["message"]
    assert ends["stop"]["content"] == "555"
    assert ends["tool_calls"]["content"] is None
    assert ends["tool_calls"]["tool_calls"][0]["type"] == "function"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), marked_bpe()], ids=["bytes", "bpe"])
@pytest.mark.parametrize(
    "answer", [Structure("regex", "5/[0-9]"), Structure("json_schema", "{}")]
)
def test_a_structure_begins_behind_the_reasoning_that_a_prompt_began(tokenizer, answer):
    structure = answer_after_thinking(answer, "</tool_call>", tokenizer)
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(structure)
    text = "5/x {</tool_call>\n\n" + ("5/5" if answer.kind == "regex" else '{"a": 5}')
    assert all(matcher.take(token) for token in tokenizer.encode(text))
    assert not matcher.take(tokenizer.encode("x")[0])
