"""OpenAI's interfaces against the engine alone, whole and as streams."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mcore_data.datasets.chat import CHATML
from mcore_infer import NewToken, SamplingConfig, generate, generate_text
from mcore_infer.server.chat import read_chat
from mcore_infer.server.completions import read_completion
from mcore_infer.server.schemas import ChatBody, CompletionBody, RequestError
from mcore_infer.writing.chat_format import load_chat_format

GREEDY = {"temperature": 0, "max_tokens": 8}

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def expected_text(long_model, prompt, num_tokens=8, **fields):
    sampling = SamplingConfig(num_tokens=num_tokens, **({"top_k": 1} | fields))
    return generate_text(long_model.model, long_model.tokenizer, [prompt], sampling)[0]


def joined(events, index=0):
    """The text of a stream, and how it ended."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    reasons = [c["finish_reason"] for c in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
    return "".join(texts), reasons[-1]


def test_a_completion_is_what_the_model_writes_alone(client, long_model):
    status, answer = client.post("/v1/completions", prompt="In the", **GREEDY)
    assert status == 200
    (choice,) = answer["choices"]
    text = expected_text(long_model, "In the")
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    ids = list(b"In the")
    by_ids = client.post("/v1/completions", prompt=ids, **GREEDY)[1]["choices"][0]
    assert by_ids["text"] == text
    many = client.post("/v1/completions", prompt=["In the", ids, "b"], echo=True, **GREEDY)[1]
    texts = [c["text"] for c in many["choices"]]
    assert texts == ["In the" + text] * 2 + ["b" + expected_text(long_model, "b")]
    assert many["usage"]["prompt_tokens"] == 13


def test_samples_depend_on_their_seed_alone_and_n_are_as_many_single_ones(client):
    fields = {"prompt": "In the", "max_tokens": 12, "temperature": 0.9, "top_p": 0.95}
    four = client.post("/v1/completions", n=4, seed=5, **fields)[1]["choices"]
    texts = [choice["text"] for choice in four]
    singles = [
        client.post("/v1/completions", seed=5 + i, **fields)[1]["choices"][0]["text"]
        for i in range(4)
    ]
    assert texts == singles
    assert len(set(texts)) == 4
    unseeded = [client.post("/v1/completions", **fields)[1] for _ in range(2)]
    assert len({a["choices"][0]["text"] for a in unseeded}) == 2
    events = client.stream("/v1/completions", n=4, seed=5, **fields)
    assert [joined(events, i)[0] for i in range(4)] == texts


USUAL = {"prompt": "In the", "max_tokens": 30, "seed": 5}


@pytest.fixture(scope="module")
def usual(client):
    """The answer to the usual fields."""
    return client.post("/v1/completions", **USUAL)[1]["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"temperature": 2.5},
        {"top_p": 0.3},
        {"logit_bias": {"65": 100}},
        {"seed": 6},
        {"max_tokens": 9},
        {"stop": []},
        {"echo": True},
        {"n": 2},
        {"logprobs": 2},
        {"top_k": 40, "top_p": 0.3},
        {"stop_token_ids": []},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_field_changes_the_answer(client, usual, fields):
    if "stop_token_ids" in fields:
        fields = {"stop_token_ids": [ord(c) for c in usual[0]["text"] if c.isascii()]}
    if "stop" in fields:
        fields = {"stop": [usual[0]["text"][4:6]]}
    status, after = client.post("/v1/completions", **{**USUAL, **fields})
    assert status == 200
    assert after["choices"] != usual


def test_log_probabilities_are_the_models_and_offsets_index_the_text(client, long_model):
    fields = {"prompt": "In the", "echo": True, "logprobs": 3, "max_tokens": 4, "seed": 1}
    choice = client.post("/v1/completions", temperature=0.6, **fields)[1]["choices"][0]
    scores, text = choice["logprobs"], choice["text"]
    tokens, offsets = scores["tokens"], scores["text_offset"]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    ids = list(text.encode(errors="replace"))
    for token, offset in zip(tokens, offsets, strict=True):
        assert text[offset : offset + 1] in (token, "\ufffd") or "\ufffd" in token
    assert "".join(tokens[:6]) == "In the"
    hidden, _ = long_model.model(torch.tensor([ids[:6]]))
    raw = long_model.model.logits(hidden)[:, 0, :257].log_softmax(-1)
    own = raw[torch.arange(5), ids[1:6]].tolist()
    assert scores["token_logprobs"][1:6] == pytest.approx(own, abs=1e-9)
    sampling = SamplingConfig(num_tokens=4, temperature=0.6)
    new = generate(long_model.model, [list(b"In the")], sampling, seed=1)[0].ids
    hidden, _ = long_model.model(torch.tensor([[*b"In the", *new[:-1]]]))
    written = long_model.model.logits(hidden)[5:, 0, :257].log_softmax(-1)
    own = written[torch.arange(4), list(new)].tolist()
    assert scores["token_logprobs"][6:] == pytest.approx(own, abs=1e-9)
    values = {*raw[5].topk(3).values.tolist(), own[0]}  # and the drawn token
    top = scores["top_logprobs"][6]
    assert sorted(top.values()) == pytest.approx(sorted(values), abs=1e-9)
    assert top[tokens[6]] == scores["token_logprobs"][6]
    scored = client.post(
        "/v1/completions", prompt="In the", echo=True, logprobs=3, max_tokens=0
    )[1]["choices"][0]
    assert scored["text"] == "In the"
    assert scored["logprobs"]["token_logprobs"] == scores["token_logprobs"][:6]
    # Two texts of each prompt: the engine scores a prompt once.
    many = {**fields, "prompt": ["In the", "At"], "n": 2, "stop": "e"}
    reply = read_completion(CompletionBody(**many), client.server.served)
    assert [request.scores.prompt for request in reply.requests] == [True, False, True, False]
    choices = client.post("/v1/completions", **many)[1]["choices"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        found = [choice["logprobs"][name] for choice in choices]
        assert found[0][:6] == found[1][:6]
        assert found[2][:2] == found[3][:2]
    both = choices[1]["logprobs"]
    assert both["tokens"][:6] == tokens[:6]
    assert both["token_logprobs"][1:6] == pytest.approx(scores["token_logprobs"][1:6], abs=1e-9)
    assert [choice["text"][:2] for choice in choices] == ["In", "In", "At", "At"]


def test_scores_name_each_token_by_its_bytes(client, long_model):
    """Parts of characters are told apart, and the drawn token is among the likeliest."""
    fields = {"max_tokens": 12, "seed": 3, "temperature": 2.0}
    raw = client.post("/v1/completions", prompt="In the", logprobs=5, **fields)[1]["choices"][0]
    sampling = SamplingConfig(num_tokens=12, temperature=2.0)
    ids = generate(long_model.model, [list(b"In the")], sampling, seed=3, eod=256)[0].ids
    names = [chr(i) if i < 128 else f"bytes:\\x{i:02x}" for i in ids if i != 256]
    scores = raw["logprobs"]
    assert scores["tokens"] == names
    assert any(name.startswith("bytes:") for name in names)
    places = zip(names, scores["token_logprobs"], scores["top_logprobs"], strict=True)
    for name, value, top in places:
        assert len(top) in (5, 6)
        assert top[name] == value
    messages = [{"role": "user", "content": "x"}]
    chat = {"messages": messages, "logprobs": True, "top_logprobs": 5, **fields}
    tokens = client.post("/v1/chat/completions", **chat)[1]["choices"][0]["logprobs"]["content"]
    assert any(token["bytes"][0] > 127 for token in tokens)
    for token in tokens:
        assert len(token["bytes"]) == 1
        rivals = [tuple(rival["bytes"]) for rival in token["top_logprobs"]]
        assert len(set(rivals)) == len(rivals)
        assert tuple(token["bytes"]) in rivals


def test_fields_of_other_servers_do_what_they_do_there(client, long_model):
    end = {"logit_bias": {"256": 100}, "max_tokens": 9}
    ended = client.post("/v1/completions", prompt="a", **end)[1]
    assert ended["usage"]["completion_tokens"] == 1
    for extra in ({}, {"stop_token_ids": [66], "logit_bias": {"256": 100, "66": 100}}):
        longer = client.post("/v1/completions", prompt="a", min_tokens=4, **(end | extra))[1]
        assert longer["usage"]["completion_tokens"] in (4, 5)
    both = {"prompt": "a", "seed": 2, "top_k": 5, "top_p": 0.6, "max_tokens": 20}
    sampling = SamplingConfig(num_tokens=20, top_k=5, top_p=0.6)
    ids = generate(long_model.model, [[97]], sampling, seed=2, eod=256)[0].ids
    text = client.post("/v1/completions", **both)[1]["choices"][0]["text"]
    assert text == long_model.tokenizer.decode(list(ids), skip_special_tokens=True)
    drawn = [
        client.post("/v1/completions", prompt="a", max_tokens=9, seed=seed)[1]["choices"]
        for seed in (-5, -5, -6)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    status, answer = client.post("/v1/completions", prompt="a", model="gpt-4")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    messages = [{"role": "user", "content": "x"}]
    more = {"reasoning_effort": "low", "verbosity": "low", "parallel_tool_calls": True}
    assert client.post("/v1/chat/completions", messages=messages, **more, **GREEDY)[0] == 200
    for field in ("functions", "audio", "web_search_options"):
        status, answer = client.post("/v1/chat/completions", messages=messages, **{field: []})
        assert status == 400
        assert answer["error"]["param"] == field
        assert "unknown" not in answer["error"]["message"]


def test_every_field_of_the_official_client_has_an_answer():
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    for params, body in ((completions, CompletionBody), (chats, ChatBody)):
        known = params.CompletionCreateParamsBase.__annotations__
        assert set(known) - set(body.model_fields) - set(body.refused) == set()


def test_sampling_of_the_model_is_the_default_of_openais_interfaces(client):
    named = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    served = replace(client.server.served, defaults=named)
    (request,) = read_completion(CompletionBody(prompt="a"), served).requests
    found = {name: getattr(request.sampling, name) for name in named}
    assert found == named
    given = CompletionBody(prompt="a", temperature=1.0, top_k=0, top_p=1.0)
    (request,) = read_completion(given, served).requests
    assert request.sampling == SamplingConfig(repetition_penalty=1.2)
    (greedy,) = read_completion(CompletionBody(prompt="a", temperature=0), served).requests
    assert greedy.sampling.top_k == 1


def test_stop_strings_end_a_text_wherever_tokens_part_and_streams_are_the_same(
    client, long_model
):
    text = expected_text(long_model, "In the", 40, ignore_eod=True)
    fields = {"prompt": "In the", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    for at in range(0, 36, 5):
        stop = ["never", text[at : at + 3]]
        end = min(i for i in (text.find(s) for s in stop) if i >= 0)
        whole = client.post("/v1/completions", stop=stop, **fields)[1]["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == (text[:end], "stop")
        events = client.stream("/v1/completions", stop=stop, **fields)
        assert joined(events) == (text[:end], "stop")


def test_line_breaks_and_marks_of_events_pass_through_a_stream(client):
    for text in ("\n\n", "\r\n", "data: [DONE]\n\n"):
        prompt = f"a{text}b"
        events = client.stream("/v1/completions", prompt=prompt, echo=True, max_tokens=1)
        assert joined(events)[0].startswith(prompt)
    bias = {"10": 100}
    events = client.stream("/v1/completions", prompt="a", logit_bias=bias, max_tokens=5)
    assert joined(events)[0] == "\n" * 5


def test_a_chat_is_rendered_by_the_template_with_its_tools(client, long_model):
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "y"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = "/v1/chat/completions"
    prompt = f"t:{json.dumps(tools)}\ns:x\nu:y\nhappya:"
    more = {"tools": tools, "chat_template_kwargs": {"mood": "happy"}}
    status, answer = client.post(path, messages=messages, **more, **GREEDY)
    assert status == 200
    message = answer["choices"][0]["message"]
    text = expected_text(long_model, prompt)
    assert (message["role"], message["content"]) == ("assistant", text)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    plain = client.post(path, messages=messages, tools=tools, tool_choice="none", **GREEDY)[1]
    assert plain["usage"]["prompt_tokens"] == len("s:x\nu:y\na:")
    pair = [*tools, {"type": "function", "function": {"name": "g"}}]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = client.post(path, messages=messages, tools=pair, tool_choice=choice, **GREEDY)[1]
    assert found["usage"]["prompt_tokens"] == len(f"t:{json.dumps(tools)}\ns:x\nu:y\na:")
    developer = [{"role": "developer", "content": "x"}, messages[1]]  # newer word for system
    assert client.post(path, messages=developer, **GREEDY)[1]["choices"] == plain["choices"]
    chat = load_chat_format(CHATML, long_model.tokenizer)
    served = replace(client.server.served, chat=chat)
    assert read_chat(ChatBody(messages=messages, tools=[]), served)
    with pytest.raises(RequestError, match="has no place for tools"):
        read_chat(ChatBody(messages=messages, tools=tools), served)
    served = replace(served, chat=replace(chat, end_ids=(66,)))
    for form, reason in ((None, "stop"), ({"type": "json_object"}, None)):
        reply = read_chat(ChatBody(messages=messages, response_format=form), served)
        assert reply.requests[0].stop == ([] if form else [[66]])
        for token in b'{"a": "<|im_end|>':  # text of ChatML's mark, for which is no token
            reply.answers[0].add(NewToken(0, token, None))
        assert reply.answers[0].finish_reason == reason
    fields = {**GREEDY, "messages": messages, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = client.post(path, **fields)[1]["choices"]
    events = client.stream(path, stream_options={"include_usage": True}, **fields)
    assert events[-1]["usage"]["completion_tokens"] == 16
    for i, choice in enumerate(whole):
        assert joined(events, i) == (choice["message"]["content"], "length")
        parts = [
            c["logprobs"]["content"]
            for e in events
            for c in e["choices"]
            if c["index"] == i and c["logprobs"]
        ]
        scores = choice["logprobs"]["content"]
        assert [token for part in parts for token in part] == scores
        assert len(scores) == 8
        assert all(len(token["top_logprobs"]) == 2 for token in scores)


def test_the_official_client_works_unchanged(client, long_model):
    import openai  # only here, for it takes long to load

    api = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="any")
    with api:
        assert [model.id for model in api.models.list()] == ["tiny"]
        assert api.models.retrieve("tiny") == api.models.list().data[0]
        with pytest.raises(openai.NotFoundError, match="other/one is not served: tiny is"):
            api.models.retrieve("other/one")
        text = expected_text(long_model, "In the")
        whole = api.completions.create(model="tiny", prompt="In the", **GREEDY)
        assert whole.choices[0].text == text
        parts = api.completions.create(model="tiny", prompt="In the", stream=True, **GREEDY)
        assert "".join(part.choices[0].text for part in parts) == text
        messages = [{"role": "user", "content": "y"}]
        chat = api.chat.completions.create(model="tiny", messages=messages, **GREEDY)
        parts = api.chat.completions.create(
            model="tiny", messages=messages, stream=True, **GREEDY
        )
        streamed = "".join(part.choices[0].delta.content or "" for part in parts)
        assert streamed == chat.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            api.completions.create(model="tiny", prompt="a" * 600)


def test_a_text_ends_at_the_end_of_a_document_which_is_no_text(client, long_model):
    fields = {"prompt": "In the", "max_tokens": 9, "temperature": 0}
    biased = client.post("/v1/completions", logit_bias={"256": 100}, logprobs=0, **fields)[1]
    (choice,) = biased["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["tokens"] == []
    assert biased["usage"]["completion_tokens"] == 1
    on = client.post("/v1/completions", logit_bias={"256": 100}, ignore_eos=True, **fields)[1]
    assert on["choices"][0]["finish_reason"] == "length"
    assert on["usage"]["completion_tokens"] == 9


def test_a_text_longer_than_the_context_is_cut_and_says_so(client, long_model):
    answer = client.post("/v1/completions", prompt="a" * 500, max_tokens=4000, seed=1)[1]
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["completion_tokens"] <= 12
    sampling = SamplingConfig(num_tokens=12, ignore_eod=True)
    ids = generate(long_model.model, [[97] * 500], sampling, seed=1)[0].ids
    assert long_model.tokenizer.decode(list(ids)).startswith(answer["choices"][0]["text"])


def test_an_answer_is_held_to_its_format_beside_free_ones(client):
    """On a server that proposes tokens, whose counts its metrics show."""
    free = {"prompt": "abc abc abc", "max_tokens": 40, "seed": 5}
    expected = client.post("/v1/completions", **free)[1]["choices"][0]["text"]
    held = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(client.post, "/v1/completions", **free)
        answers = client.stream(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "a"}],
            response_format=held,
            max_tokens=200,
            seed=3,
        )
        text = "".join(a["choices"][0]["delta"].get("content") or "" for a in answers)
        assert json.loads(text)["n"] in range(10)
        assert answers[-1]["choices"][0]["finish_reason"] == "stop"
        assert beside.result()[1]["choices"][0]["text"] == expected
    number = {"type": "regex", "pattern": "[0-9]{3}-[ab]"}
    _, answer = client.post("/v1/completions", prompt="a", response_format=number, n=2)
    assert all(re.fullmatch("[0-9]{3}-[ab]", c["text"]) for c in answer["choices"])
    client.post("/v1/completions", prompt="aaa", temperature=0, max_tokens=40)  # repeats itself
    measures = client.send("GET", "/metrics")[2].decode()
    steps = re.search(r"^mcore_speculative_steps (\d+)$", measures, re.MULTILINE)
    assert int(steps[1]) > 0
