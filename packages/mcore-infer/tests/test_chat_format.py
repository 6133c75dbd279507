"""What ends a turn of a chat, for templates of families and for tokenizers without any."""

import logging

import pytest
import tokenizers

from mcore_data.datasets.chat import CHATML
from mcore_data.tokenizers.hf import HFTokenizer
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer.writing.chat_format import load_chat_format
from mcore_infer.writing.token_text import TokenTexts

PLAIN = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('late') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
THINKS = "{% for m in messages %}{{ m.content }}</s>{% endfor %}<think>\n{# </think> #}"


def marked(*names, **config):
    """A tokenizer of words, some of them special."""
    vocab = {"a": 0, "b": 1, "</s>": 2}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    core.add_special_tokens(["</s>", *names])
    return HFTokenizer(core, {"eos_token": "</s>", **config})


@pytest.mark.parametrize(
    ("template", "names", "ids", "texts"),
    [
        ("", ("<|im_end|>",), (3,), ()),
        ("", (), (), ("<|im_end|>",)),
        (CHATML, ("<|im_start|>", "<|im_end|>"), (4,), ()),
        (GEMMA, ("<end_of_turn>",), (3,), ()),
        (GEMMA, (), (), ("<end_of_turn>",)),
        (THINKS, (), (2,), ()),
        (PLAIN, (), (), ()),
    ],
)
def test_the_mark_that_a_template_writes_behind_an_answer_ends_the_turn(
    template, names, ids, texts, caplog
):
    with caplog.at_level(logging.WARNING):
        found = load_chat_format(template, marked(*names))
    assert (found.end_ids, found.end_texts) == (ids, texts)
    assert ("has no chat template" in caplog.text) == (not template)
    assert found.reasons_first("a<think>\n") == (template == THINKS)


def test_a_template_for_tools_is_taken_where_there_are_some():
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools }} <tool_call>"},
    ]
    found = load_chat_format("", marked(chat_template=named))
    assert found.render([], True, tools=None) == "plain"
    assert found.render([], True, tools=[1]) == "[1] <tool_call>"
    assert "<tool_call>" in found.source


def byte_fallback():
    """A tokenizer as SentencePiece's become: spaces as a letter, bytes by their number."""
    vocab = {"<0xE4>": 0, "<0x0A>": 1, "\u2581a": 2, "a": 3, "</s>": 4}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    replace = tokenizers.decoders.Replace("\u2581", " ")
    core.decoder = tokenizers.decoders.Sequence([replace, tokenizers.decoders.ByteFallback()])
    core.add_special_tokens(["</s>"])
    return HFTokenizer(core)


def test_tokens_have_the_bytes_of_the_vocabulary_and_names_of_their_own():
    texts = TokenTexts(byte_fallback())
    found = [(texts.of(i), texts.name(i)) for i in range(5)]
    assert found == [
        (b"\xe4", "bytes:\\xe4"),
        (b"\n", "\n"),
        (b" a", " a"),
        (b"a", "a"),
        (b"</s>", "</s>"),
    ]
    assert texts.by_name(((3, -1.0), (2, -2.0))) == {"a": -1.0, " a": -2.0}
    assert texts.fewest("a" * 9) == 3
    same = TokenTexts(ByteTokenizer())
    assert same.by_name(((65, -1.0), (65, -2.0))) == {"A": -1.0, "token_id:65": -2.0}
