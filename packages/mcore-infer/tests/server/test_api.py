"""``PUT /api``: each field's limits, and that it changes the answer."""

import pytest
import torch

from mcore_infer import NewToken, SamplingConfig, TokenRules, generate
from mcore_infer.server.api import read_api
from mcore_infer.server.schemas import ApiBody

BASE = {"prompts": ["In the"], "tokens_to_generate": 8, "random_seed": 3}


def written(long_model, prompt, num_tokens=8, seed=3, **fields):
    """Token ids that the model writes alone."""
    sampling = SamplingConfig(num_tokens=num_tokens, **fields)
    return list(generate(long_model.model, [prompt], sampling, seed=seed, eod=256)[0].ids)


def test_prompts_come_back_with_their_text_tokens_segments_and_scores(client, long_model):
    prompts = ["In the", "\u4e16 b"]
    status, answer = client.post(
        "/api", **{**BASE, "prompts": prompts, "top_k": 1, "logprobs": True}
    )
    assert status == 200
    assert set(answer) == {"text", "tokens", "segments", "logprobs"}
    decode = long_model.tokenizer.decode
    for i, prompt in enumerate(prompts):
        ids = list(prompt.encode())
        new = written(long_model, ids, top_k=1)
        assert answer["tokens"][i] == [*ids, *new]
        assert answer["text"][i] == prompt + decode(new, skip_special_tokens=True)
        assert "".join(answer["segments"][i]) == decode([*ids, *new])
        assert len(answer["segments"][i]) == len(ids) + len(new)
        text = torch.tensor([[*ids, *new]])
        hidden, _ = long_model.model(text[:, :-1])
        raw = long_model.model.logits(hidden)[:, 0, :257].log_softmax(-1)
        own = raw.gather(-1, text[0, 1:, None])[:, 0].tolist()
        assert answer["logprobs"][i] == pytest.approx(own, abs=1e-9)
    top = client.post("/api", **BASE, logprobs=True, top_n_logprobs=2)[1]["top_n_logprobs"]
    assert len(top[0]) == 13
    assert {len(place) for place in top[0]} <= {2, 3}  # the drawn token is always there
    assert any(len(place) == 3 for place in top[0])
    scored = client.post("/api", prompts=["In"], tokens_to_generate=0, logprobs=True)[1]
    assert (scored["text"], scored["tokens"]) == (["In"], [[73, 110]])
    assert len(scored["logprobs"][0]) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens_to_generate": 9},
        {"temperature": 5},
        {"top_k": 2},
        {"top_p": 0.4},
        {"top_p": 0.99, "top_p_decay": 0.1},
        {"top_p": 0.99, "top_p_decay": 0.1, "top_p_bound": 0.9},
        {"add_BOS": True},
        {"random_seed": 4},
        {"stop_token": 101},
        {"logprobs": True},
        {"beam_width": 2},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_every_field_changes_the_answer(client, long_model, fields):
    *others, last = fields
    base = BASE | {name: fields[name] for name in others}
    if "stop_token" in fields:
        base["tokens_to_generate"] = 40
        new = written(long_model, list(b"In the"), 40)
        fields = {"stop_token": next(t for t in new[5:] if t != 256)}
    whole = {**base, last: fields[last]}
    before, after = client.post("/api", **base), client.post("/api", **whole)
    assert before[0] == after[0] == 200
    assert before[1] != after[1]
    assert client.post("/api", **whole) == after


def test_beams_come_best_first_with_their_scores(client, long_model):
    fields = {"prompts": ["In the"], "tokens_to_generate": 5, "beam_width": 3, "stop_token": 7}
    for penalty in (1.0, 0.0):
        answer = client.post("/api", **fields, length_penalty=penalty)[1]
        assert set(answer) == {"text", "tokens", "segments", "scores"}
        assert len(answer["text"]) == 3
        assert answer["scores"] == sorted(answer["scores"], reverse=True)
        for tokens, score in zip(answer["tokens"], answer["scores"], strict=True):
            hidden, _ = long_model.model(torch.tensor([tokens[:-1]]))
            scores = long_model.model.logits(hidden)[5:, 0, :257].log_softmax(-1)
            total = scores.gather(-1, torch.tensor(tokens[6:])[:, None]).sum().item()
            assert score == pytest.approx(total / (len(tokens) - 6) ** penalty, abs=1e-9)


def test_lines_end_a_text_and_a_colon_forbids_them(client):
    served = client.server.served

    def first(**fields):
        job = read_api(ApiBody(**BASE, **fields), served)
        return job.requests[0], job.answers[0]

    for field, ending in (("stop_on_eol", b"a\n"), ("stop_on_double_eol", b"a\nb\n\n")):
        _, answer = first(**{field: True})
        text = ""
        for token in ending + b"c":
            assert answer.finish_reason is None or token == ord("c")
            if not answer.finish_reason:
                text += answer.add(NewToken(0, token, None)).text
        assert (text, answer.finish_reason) == (ending.decode(), "stop")
    assert first(prevent_newline_after_colon=True)[0].rules.never_after == (58, 10)
    assert first()[0].rules == TokenRules()


LONG = ["a"] * 129


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts": None}, "prompts argument required"),
        ({"prompts": "a"}, "prompts is not a list"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": LONG}, "Maximum number of prompts is 128"),
        ({"prompts": [1]}, "list of strings"),
        ({"prompts": [""]}, "Empty prompts require add_BOS=true"),
        ({"prompts": ["a" * 600]}, "maximum context length was exceeded"),
        ({"max_len": 3}, "max_len is no longer used"),
        ({"sentences": ["a"]}, "sentences is no longer used"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "logprobs": True}, "beam_width needs a single prompt"),
        ({"beam_width": 2, "top_k": 3}, "--beam-width 2 searches for the likeliest"),
        ({"beam_width": 128, "stop_on_eol": True}, "beam_width needs a single prompt"),
        ({"tokens_to_generate": -1}, "tokens_to_generate"),
        ({"tokens_to_generate": True}, "tokens_to_generate"),
        ({"tokens_to_generate": 1.0}, "tokens_to_generate"),
        ({"tokens_to_generate": 0}, "needs logprobs=true"),
        ({"logprobs": 1}, "logprobs: must be a valid boolean"),
        ({"top_n_logprobs": 2}, "needs logprobs"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": 100.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": 1001}, "top_k"),
        ({"top_k": 258}, "vocabulary of 257"),
        ({"top_k": 2, "top_p": 0.5}, "top-k and top-p"),
        ({"top_p": 1}, "top_p must be a float"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p_decay": 0.5}, "--top-p"),
        ({"top_p": 0.5, "top_p_bound": 0.6}, "--top-p"),
        ({"add_BOS": "yes"}, "add_BOS"),
        ({"stop_on_double_eol": 1}, "stop_on_double_eol"),
        ({"stop_on_eol": "no"}, "stop_on_eol"),
        ({"prevent_newline_after_colon": 0}, "prevent_newline_after_colon"),
        ({"random_seed": -1}, "random_seed"),
        ({"stop_token": "x"}, "stop_token"),
        ({"stop_token": 257}, "stop_token"),
        ({"length_penalty": 2.0}, "--length-penalty 2.0 has no effect without --beam-width"),
        ({"tokens_to_generat": 3}, "did you mean tokens_to_generate?"),
    ],
)
def test_what_is_wrong_is_one_plain_string_with_status_400(client, fields, message):
    body = {"prompts": ["a"], **fields}
    status, answer = client.post("/api", **{k: v for k, v in body.items() if v is not None})
    assert status == 400
    assert isinstance(answer, str)
    assert message in answer


def test_an_empty_prompt_may_begin_a_document(client, long_model):
    answer = client.post("/api", **{**BASE, "prompts": [""], "add_BOS": True, "top_k": 1})[1]
    assert answer["tokens"][0] == [256, *written(long_model, [256], top_k=1)]
