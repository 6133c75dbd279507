import json
import sys

import numpy as np
import pytest

from mcore_data.cli import main
from mcore_data.config import DataConfig
from mcore_data.datasets.chat import (
    SFTDataset,
    encode_chat,
    load_template,
    prepare_chats,
    segments,
)
from mcore_data.datasets.chat_records import messages_of
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.tokenizers.building import load_tokenizer

BYTES = load_tokenizer("ByteTokenizer")
CHATS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Sure? <|im_end|>"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Bye"},
    ],
    [
        {"role": "user", "content": "Say a"},
        {"role": "assistant", "content": "no", "learn": False},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "a"},
    ],
]


def test_only_the_assistants_words_and_their_ends_are_learnt():
    render = load_template("", BYTES)
    tokens, learnt = encode_chat(CHATS[0], BYTES, render)
    assert bytes(tokens).decode() == render(CHATS[0], False)
    assert bytes(t for t, m in zip(tokens, learnt, strict=True) if m).decode() == (
        "Four.<|im_end|>\nYes.<|im_end|>\n"
    )
    tokens, learnt = encode_chat(CHATS[1], BYTES, render)
    assert bytes(t for t, m in zip(tokens, learnt, strict=True) if m) == b"a<|im_end|>\n"


def test_the_tokens_before_an_answer_are_those_of_generation():
    render = load_template("", BYTES)
    prompt, answer, *_ = segments(CHATS[0], render)
    assert prompt == (render(CHATS[0][:2], True), False)
    assert answer == ("Four.<|im_end|>\n", True)


def test_a_template_sees_tools_and_the_default_of_several_is_taken():
    class Named:
        bos = eod = None
        config = {"chat_template": [  # noqa: RUF012
            {"name": "rag", "template": "no"},
            {"name": "default", "template": (
                "{% for t in tools %}{% if loop.index > 1 %}{% break %}{% endif %}"
                "{{ t | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}"
            )},
        ]}  # fmt: skip

    render = load_template("", Named())
    assert (
        render([], True, tools=[{"<a>": "\u00e9"}, 2], messages_ignored=1)
        == '{"<a>": "\u00e9"}4'
    )


def test_a_template_that_rewrites_earlier_turns_is_refused():
    last_only = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ValueError, match="cannot be separated by position"):
        list(segments(CHATS[0], load_template(last_only, BYTES)))
    ending = (
        "{% if messages[-1]['role'] == 'user' and not add_generation_prompt %}x{% endif %}"
        "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    )
    with pytest.raises(ValueError, match="renders earlier turns differently"):
        list(segments(CHATS[0], load_template(ending, BYTES)))


def test_a_template_sees_the_tokenizers_ends_and_may_refuse(bpe_folder):
    tokenizer = load_tokenizer(bpe_folder)
    render = load_template("{{ eos_token }}", tokenizer)
    assert render([], False) == tokenizer.decode([tokenizer.eod])
    with pytest.raises(ValueError, match="template refuses these messages: no system"):
        load_template("{{ raise_exception('no system') }}", tokenizer)([], False)


def test_a_template_that_is_none_or_fails_says_where_or_why():
    with pytest.raises(ValueError, match="line 2 of the chat template: Expected"):
        load_template("{{ messages }}\n{% for %}", BYTES)
    for template, why in (
        ("{{ mood.word }}", "'mood' is undefined"),
        ("{{ 1 + 'word' }}", "unsupported operand"),
    ):
        with pytest.raises(ValueError, match=f"template refuses these messages: {why}"):
            load_template(template, BYTES)([], False)


def test_templates_without_jinja_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(ImportError, match=r"pip install 'mcore-data\[chat\]'"):
        load_template("", BYTES)


def prepare(tmp_path, lines, *words):
    (tmp_path / "chats.jsonl").write_text("".join(line + "\n" for line in lines))
    return main([
        "prepare-chats", "--input", str(tmp_path / "chats.jsonl"),
        "--output-prefix", str(tmp_path / "chats"),
        "--tokenizer-type", "ByteTokenizer", *words,
    ])  # fmt: skip


def test_chats_become_packed_rows_with_their_loss_masks(tmp_path, capsys):
    lines = [json.dumps({"messages": chat}) for chat in CHATS * 5]
    assert prepare(tmp_path, lines) == 0
    assert "10 chats" in capsys.readouterr().out
    direct = SFTDataset(tmp_path / "chats", 256, seed=7)
    train, valid, _ = build_gpt_datasets(
        DataConfig(sft=True, data_path=(str(tmp_path / "chats"),), split="1"),
        BYTES,
        sequence_length=256,
        seed=7,
    )
    assert valid is None
    learnt = 0
    for k in range(len(direct)):
        sample = train[k]
        assert all(np.array_equal(sample[key], direct[k][key]) for key in sample)
        said = bytes(sample["labels"][sample["loss_mask"] > 0].astype(np.uint8)).decode()
        assert set(said.replace("<|im_end|>\n", " ").split()) <= {"Four.", "Yes.", "a"}
        learnt += int(sample["loss_mask"].sum())
    assert learnt == 5 * (len("Four.Yes.a") + 3 * len("<|im_end|>\n"))


def test_all_bad_chats_of_a_file_are_named_with_their_lines(tmp_path, capsys, caplog):
    asked = {"role": "user", "content": "x"}

    def chat(*messages, **more):
        return json.dumps({"messages": messages, **more})

    faults = [
        ("{", "truncated JSON"),
        ('{"text": "x"}', "no key 'messages' (keys: text); --json-key names"),
        ('{"messages": []}', "'messages' is not a list of messages"),
        ('{"messages": "x"}', "'messages' is not a list of messages"),
        (chat(asked), "no message that counts has the role 'assistant' (roles: user)"),
        (chat({"text": "x"}), "message 1 of 'messages' has no role (keys: text)"),
        (
            '{"conversations": [{"from": "human"}]}',
            "message 1 of 'conversations' has no content",
        ),
        (chat(asked, {"role": "assistant"}), "message 2 of 'messages' has no content"),
        (chat(asked, {"role": "assistant", "content": ""}), "is an empty answer: leave it out"),
        (chat(asked, {"role": "assistant", "content": 5}), "the content 5 is not a text"),
    ]
    good = json.dumps({"messages": CHATS[0]})
    lines = [good, " ", *(line for line, _ in faults), good]
    assert prepare(tmp_path, lines) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].endswith(
        f"chats.jsonl: {len(faults)} of {len(faults) + 2} records cannot be used:"
    )
    for number, (line, (_, message)) in enumerate(zip(told[1:], faults, strict=False), 3):
        assert line.startswith(f"  line {number}: ")
        assert message in line
    assert "--on-bad-record skip" in told[-1]
    assert not (tmp_path / "chats_tokens.idx").exists()
    assert prepare(tmp_path, lines, "--on-bad-record", "skip") == 0
    assert "2 chats" in capsys.readouterr().out
    assert "10 of 12 records are left out" in caplog.text
    for lines, message in (([], "has no records"), (["[", "]"], "is a JSON array")):
        assert prepare(tmp_path, lines) == 2
        assert message in capsys.readouterr().err


CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLING = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Rain"}, {"type": "text", "text": "?"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "No."},
]
TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}="
    "{{ c.function.arguments.city }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_tools_calls_and_content_in_parts_reach_the_template_as_in_serving(tmp_path, capsys):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    line = json.dumps({"messages": CALLING, "tools": tools})
    (tmp_path / "tools.jinja").write_text(TOOLS)
    assert prepare(tmp_path, [line], "--chat-template", str(tmp_path / "tools.jinja")) == 0
    row = SFTDataset(tmp_path / "chats", 100, seed=1)[0]
    text = bytes(row["tokens"].astype(np.uint8)).decode()
    assert text.startswith("[weather]user:Rain?;assistant:weather=Rome;tool:dry;assistant:No.")
    learnt = bytes(row["labels"][row["loss_mask"] > 0].astype(np.uint8)).decode()
    assert learnt == "weather=Rome;No.;"
    capsys.readouterr()
    for refused, message in (
        (line, "the chat template does not render tools"),
        (json.dumps({"messages": CALLING}), "the chat template does not render tool_calls"),
    ):
        assert prepare(tmp_path, [refused]) == 2
        assert message in capsys.readouterr().err


def test_files_that_are_no_text_are_named(tmp_path, capsys):
    template, chats = tmp_path / "template.jinja", tmp_path / "chats.jsonl"
    template.write_bytes(b"\xff")
    assert prepare(tmp_path, ["{}"], "--chat-template", str(template)) == 2
    told = capsys.readouterr().err
    assert told.endswith(
        f"--chat-template {template} is not UTF-8 text (invalid start byte): give a text "
        "file.\n"
    )
    chats.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"line 1: not UTF-8 \(invalid start byte at byte 0"):
        prepare_chats(chats, tmp_path / "chats", BYTES)


def test_options_without_effect_on_chats_are_refused():
    with pytest.raises(ValueError, match="--eod-mask-loss has no effect with --sft"):
        DataConfig(sft=True, data_path=("x",), eod_mask_loss=True)
    with pytest.raises(ValueError, match="as it reads prepared chats"):
        DataConfig(sft=True, mock_data=True)


PARTS = [{"type": "text", "text": "Two and "}, {"type": "text", "text": "two?"}]
QUESTION = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
]


@pytest.mark.parametrize(
    ("record", "chat"),
    [
        ({"messages": QUESTION}, QUESTION),
        (
            {"messages": [{"role": "user", "content": PARTS}, QUESTION[1]]},
            QUESTION,
        ),
        (
            {"conversations": [{"from": "human", "value": "Two and two?"},
                               {"from": "gpt", "value": "Four."}], "system": "Count."},
            [{"role": "system", "content": "Count."}, *QUESTION],
        ),
        ({"instruction": "Two and two?", "input": "", "output": "Four."}, QUESTION),
        (
            {"instruction": "Add.", "input": "2, 2", "output": "Four."},
            [{"role": "user", "content": "Add.\n\n2, 2"}, QUESTION[1]],
        ),
        ({"prompt": "Two and two?", "completion": "Four."}, QUESTION),
        ({"prompt": QUESTION[:1], "completion": QUESTION[1:]}, QUESTION),
    ],
)  # fmt: skip
def test_chats_of_published_forms_are_read(record, chat):
    assert messages_of(record, "messages") == chat


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}"
    "{{ m.content.split('!')[-1] }};{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def test_generation_blocks_of_a_template_mark_what_is_learnt():
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "thought!one"},
        {"role": "assistant", "content": "two", "learn": False},
    ]
    found = list(segments(chat, load_template(MARKED, BYTES, has_marks=True)))
    assert found == [("qA:", False), ("one;", True), ("A:", False), ("two;", False)]
    # At generation the same template has no marks.
    assert load_template(MARKED, BYTES)(chat, False) == "qA:one;A:two;"
    once = "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    with pytest.raises(ValueError, match="it must render one for each"):
        list(segments(chat, load_template(once, BYTES, has_marks=True)))
