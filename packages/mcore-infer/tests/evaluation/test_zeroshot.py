"""WIKITEXT103 and LAMBADA against sums by hand, on any ranks, and as commands."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from warm_ranks import run_ranks

from mcore_infer import load_model
from mcore_infer.cli import main
from mcore_infer.evaluation.continuations import Continuation, score_continuations
from mcore_infer.evaluation.lambada import continuation, read_texts, score_lambada
from mcore_infer.evaluation.wikitext import (
    detokenize,
    detokenizer_name,
    plan_overlapping,
    score_wikitext,
)
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext

TEXT = "= Tin =\n The cat 's hat , a ( red ) one , is old .\n"
PASSAGES = ["the cat sat on the mat", "a word", "in the beginning was the word"]


@pytest.mark.parametrize(
    ("path", "text", "plain"),
    [
        ("wiki.test.tokens", " = = Rain = = \n it 's wet ", " == Rain ==\nit's wet "),
        ("wiki", "1 @,@ 000 @.@ 5 well @-@ known", "1,000.5 well-known"),
        ("wiki", "so : a ; b . c ! d ? e , f", "so: a; b. c! d? e, f"),
        ("wiki", "( x ) [ y ] { z } \" q \" ' r '", "(x) [y] {z} \"q\" 'r'"),
        ("wiki", "a N at 5 \N{DEGREE SIGN} C", "a 1 at 5\N{DEGREE SIGN}C"),
        ("wiki", "the boys ' cats", "the boys' cats"),
        ("data/ptb.test", "it did n't cost $ N or # N on \n", "it didn't cost $1 or #1 on\n"),
        ("lambada.jsonl", " = = x = = ", " = = x = = "),
    ],
)
def test_detokenizers_undo_how_words_were_cut(path, text, plain):
    assert detokenize(text, detokenizer_name(path)) == plain


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))
def test_windows_count_every_target_once_and_begin_every_overlap(num_targets, context, overlap):
    overlap = min(overlap, context)
    windows = plan_overlapping(num_targets, context, overlap)
    counted = [t for w in windows for t in range(w.first_counted, w.end)]
    assert counted == list(range(num_targets))
    assert all(w.begin % overlap == 0 and w.end - w.begin <= context for w in windows)


def logits_of(model, ids):
    with torch.no_grad():
        return model.logits(model(torch.tensor([ids]))[0])[:, 0, :257].log_softmax(-1)


def test_ten_tokens_with_a_context_of_four_by_hand(loaded):
    text = "ab @-@ cd  e g"
    ids = list(b"ab-cd  e g")
    score = score_wikitext(
        loaded.model, loaded.tokenizer, text, context_tokens=4, overlap=2, batch=3
    )
    # Targets 1-4 from tokens 0-3; then two at a time, from the two before and themselves.
    total = -sum(logits_of(loaded.model, ids[0:4])[t, ids[t + 1]] for t in range(4))
    for begin in (2, 4):
        seen = logits_of(loaded.model, ids[begin : begin + 4])
        total -= sum(seen[t, ids[begin + t + 1]] for t in (2, 3))
    total -= logits_of(loaded.model, ids[6:9])[2, ids[9]]
    assert score.loss_sum == pytest.approx(total.item(), rel=1e-10)
    assert (score.num_tokenized, score.num_original) == (10, 6)  # an empty word between
    assert score.token_ratio == 9 / 5
    assert score.perplexity == pytest.approx(math.exp(total.item() / 9))
    assert score.adjusted_perplexity == pytest.approx(math.exp(min(20, total.item() / 5)))


def test_a_continuation_is_judged_in_its_own_context(model):
    rows = [[1, 2, 3, 4], [9, 8, 7, 6, 5, 4, 3], [5, 6]]
    counts = [2, 3, 1]
    for row, count in zip(rows, counts, strict=True):
        # What the model would write itself is greedy.
        for _ in range(count):
            row.append(logits_of(model, row)[-1].argmax().item())
    rows.append([*rows[1][:-1], (rows[1][-1] + 1) % 257])
    counts.append(3)
    whole = [Continuation(row, count) for row, count in zip(rows, counts, strict=True)]
    for batch in (1, 3, 8):
        found = score_continuations(model, whole, batch=batch)
        assert [one.is_greedy for one in found] == [True, True, True, False]
        for row, count, one in zip(rows, counts, found, strict=True):
            logits = logits_of(model, row[:-1])
            want = sum(logits[t - 1, row[t]].item() for t in range(len(row) - count, len(row)))
            assert one.log_prob == pytest.approx(want, rel=1e-10)
    assert score_continuations(model, []) == []
    with pytest.raises(ValueError, match="one token of context and one target"):
        score_continuations(model, [Continuation([1, 2], 2)])


def test_strict_lambada_asks_for_the_whole_last_word(loaded):
    tokenizer = loaded.tokenizer
    options = {"context_tokens": 40}
    strict = continuation(tokenizer, "the cat sat ", strict=True, **options)
    assert (list(strict.ids), strict.num_targets) == (list(b"the cat sat"), 4)
    loose = continuation(tokenizer, "the cat sat", strict=False, **options)
    assert (list(loose.ids), loose.num_targets) == (list(b"the cat sat"), 1)
    cut = continuation(tokenizer, "the cat sat", strict=True, context_tokens=6)
    assert list(cut.ids) == list(b"cat sat")
    with pytest.raises(ValueError, match="no context"):
        continuation(tokenizer, "sat", strict=True, context_tokens=40)
    # A model that writes the word itself is right, one that writes another is not.
    ids = list(b"the cat sat on a")
    while len(ids) < 24:
        ids.append(logits_of(loaded.model, ids)[-1, :97].argmax().item())
    rows = [Continuation(ids, 2), Continuation([*ids[:-1], 98], 2)]
    greedy = [one.is_greedy for one in score_continuations(loaded.model, rows)]
    score = score_lambada(loaded.model, tokenizer, PASSAGES, strict=True, **options)
    assert greedy[1] is False
    assert score.num_examples == 3
    assert score.accuracy == score.num_correct / 3


def test_lines_that_are_no_passages_are_named():
    assert read_texts(['{"text": "a b"}', "", '{"text": "c d", "n": 1}']) == ["a b", "c d"]
    for lines, message in (
        (['{"text": "a"}', "{"], "line 2"),
        (['{"words": "a"}'], "line 1"),
        (['{"text": "  "}'], "line 1"),
        ([], "no passage"),
    ):
        with pytest.raises(ValueError, match=message):
            read_texts(lines)


def scored_by_ranks(folder, tp):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=tp))
    loaded = load_model(folder, ctx)
    options = {"context_tokens": 12, "batch": 2, "axis": loaded.data}
    wiki = score_wikitext(loaded.model, loaded.tokenizer, TEXT, overlap=5, **options)
    rows = [Continuation(list(text.encode()), 4) for text in PASSAGES]
    judged = score_continuations(loaded.model, rows, batch=1, axis=loaded.data)
    ctx.destroy()
    return wiki, judged


@pytest.mark.parametrize(("world_size", "tp"), [(2, 2), (2, 1)])
def test_any_ranks_find_the_same_scores(run_folder, loaded, world_size, tp):
    options = {"context_tokens": 12, "overlap": 5}
    wiki = score_wikitext(loaded.model, loaded.tokenizer, TEXT, **options)
    rows = [Continuation(list(text.encode()), 4) for text in PASSAGES]
    judged = score_continuations(loaded.model, rows)
    for got, others in run_ranks(scored_by_ranks, world_size, run_folder, tp):
        assert got.loss_sum == pytest.approx(wiki.loss_sum, rel=1e-10)
        for one, other in zip(others, judged, strict=True):
            assert one.is_greedy == other.is_greedy
            assert one.log_prob == pytest.approx(other.log_prob, rel=1e-10)


def test_the_tasks_are_commands(run_folder, loaded, tmp_path, capsys):
    wiki, lambada = tmp_path / "wiki.valid.tokens", tmp_path / "lambada.jsonl"
    wiki.write_text(TEXT)
    passages = [*PASSAGES, "a line\u2028in a line"]  # that a file may hold as it is
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in passages)
    lambada.write_text("\n".join(lines), encoding="utf-8")
    words = ["eval", "--load", str(run_folder), "--seq-length", "16"]
    assert main([*words, "--task", "WIKITEXT103", "--valid-data", str(wiki)]) == 0
    score = score_wikitext(loaded.model, loaded.tokenizer, TEXT, context_tokens=16, overlap=16)
    out = capsys.readouterr().out
    assert f"avg loss {score.loss:.4f} | ppl {score.perplexity:.4f} | adjusted ppl" in out
    assert "detokenizer wiki" in out
    words[-1] = "40"
    task = [*words, "--task", "LAMBADA", "--valid-data", str(lambada)]
    assert main([*task, "--strict-lambada"]) == 0
    out = capsys.readouterr().out
    assert "LAMBADA strict | accuracy " in out
    assert "| 4 examples" in out
    for more, message in (
        ([*task, "--overlapping-eval", "4"], "no effect on --task LAMBADA"),
        ([*words, "--strict-lambada", "--valid-data", str(wiki)], "no effect on --task TEXT"),
        ([*task, str(wiki)], "takes one --valid-data, not "),
        ([*words, "--task", "LAMBADA", "--valid-data", str(wiki)], "line 1 is not a JSON"),
    ):
        assert main(more) == 2
        assert message in capsys.readouterr().err


def test_megatrons_command_for_tasks_runs_by_its_name(run_folder, tmp_path, capsys):
    path = Path(__file__).parents[4] / "examples/tasks/main.py"
    spec = importlib.util.spec_from_file_location("tasks_main", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "lambada.json").write_text(json.dumps({"text": PASSAGES[0]}))
    words = ["--task", "LAMBADA", "--valid-data", str(tmp_path / "lambada.json")]
    words += ["--num-layers", "2", "--hidden-size", "16", "--fp16", "--strict-lambada"]
    words += ["--load", str(run_folder), "--micro-batch-size", "8", "--log-interval", "10"]
    assert module.main([*words, "--no-load-optim", "--no-load-rng"]) == 0
    captured = capsys.readouterr()
    assert "LAMBADA strict | accuracy " in captured.out
    assert "--num-layers --hidden-size --log-interval --fp16" in captured.err
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text("{}")
    assert module.main([*words, "--vocab-file", str(vocabulary)]) == 0
    assert "--fp16 --vocab-file" in capsys.readouterr().err
    absent = ["--vocab-file", str(tmp_path / "no"), "--tokenizer-type", "BertWordPieceCase"]
    assert module.main([*words, *absent]) == 2
    assert f"{tmp_path}/no does not exist" in capsys.readouterr().err
