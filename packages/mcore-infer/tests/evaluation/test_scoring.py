import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from warm_ranks import run_ranks

from mcore_infer import TextScore, load_model, score_documents, score_texts
from mcore_infer.evaluation.scoring import plan_windows
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext

DOCUMENTS = [[(7 * i) % 251 for i in range(n)] for n in (30, 1, 0, 75, 16)]
ONCE = {"begin_token": 256, "context_tokens": 16, "stride": 5, "batch": 3}


@given(st.lists(st.integers(0, 50), max_size=5), st.integers(1, 12), st.integers(1, 12))
def test_every_target_counts_once_with_the_overlap_as_its_context(lengths, context, stride):
    stride = min(stride, context)
    windows = plan_windows(lengths, context, stride)
    counted = [(w.document, t) for w in windows for t in range(w.first_counted, w.end)]
    assert counted == [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    for window in windows:
        assert window.end - window.begin <= context
        if window.first_counted:
            assert window.end - window.begin == context
            assert window.first_counted - window.begin >= context - stride


@pytest.mark.parametrize("stride", [0, 9])
def test_a_window_adds_from_one_to_all_of_its_tokens(stride):
    with pytest.raises(ValueError, match="--overlapping-eval"):
        plan_windows([20], 8, stride)


def by_hand(model, documents, context, stride):
    """Sum of losses, one window after the other, from whole softmaxes."""
    total = 0.0
    for window in plan_windows([len(d) for d in documents], context, stride):
        document = [256, *documents[window.document]]
        seen = torch.tensor([document[window.begin : window.end]])
        with torch.no_grad():
            logits = model.logits(model(seen)[0])[:, 0, :257].log_softmax(-1)
        for target in range(window.first_counted, window.end):
            total -= logits[target - window.begin, document[target + 1]].item()
    return total


def test_the_loss_is_the_sum_over_all_tokens(model):
    score = score_documents(model, DOCUMENTS, **ONCE)
    assert score.num_tokens == sum(map(len, DOCUMENTS))
    assert score.loss_sum == pytest.approx(by_hand(model, DOCUMENTS, 16, 5), rel=1e-10)


def test_batches_do_not_change_the_score(model):
    whole = score_documents(model, DOCUMENTS, **ONCE)
    one = score_documents(model, DOCUMENTS, **ONCE | {"batch": 1})
    assert one.loss_sum == pytest.approx(whole.loss_sum, rel=1e-12)


def scored_by_ranks(folder, tp):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=tp))
    model = load_model(folder, ctx).model
    score = score_documents(model, DOCUMENTS, axis=ctx.dp, **ONCE)
    ctx.destroy()
    return score


@pytest.mark.parametrize(("world_size", "tp"), [(3, 1), (4, 2)])
def test_ranks_share_the_work_and_know_the_whole_score(run_folder, model, world_size, tp):
    expected = score_documents(model, DOCUMENTS, **ONCE)
    for score in run_ranks(scored_by_ranks, world_size, run_folder, tp):
        assert score.loss_sum == pytest.approx(expected.loss_sum, rel=1e-10)
        assert score.num_tokens == expected.num_tokens


def test_bits_per_byte_and_perplexity_follow_from_the_sum():
    score = TextScore(loss_sum=80 * math.log(2), num_tokens=20, num_bytes=40)
    assert score.bits_per_byte == pytest.approx(2.0)
    assert score.perplexity == pytest.approx(2.0**4)
    assert TextScore(100.0, 1).perplexity == math.exp(20)
    assert math.isnan(TextScore(1.0, 1).bits_per_byte)


def test_texts_are_scored_by_their_bytes(loaded):
    texts = ["In the beginning", "wörter"]
    score = score_texts(loaded.model, loaded.tokenizer, texts, context_tokens=8)
    assert score.num_tokens == score.num_bytes == 16 + 7
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2))


def test_no_text_has_no_loss(model):
    assert score_documents(model, [], **ONCE) == TextScore(0.0, 0)
