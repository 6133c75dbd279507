import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_infer import NewToken, SamplingConfig, TokenRules, filter_logits, sample
from mcore_infer.engine.sampling import apply_penalties
from mcore_infer.writing.sequence import RunningSequence, TextRequest
from mcore_models.kernels.batch_invariant import token_log_probs

# The expected numbers were obtained by running the reference (Megatron-LM, August 2026).
PROBS = torch.tensor([[0.5, 0.3, 0.15, 0.05]])


def kept(logits, **fields):
    return (filter_logits(logits, SamplingConfig(**fields)) > -torch.inf).sum(-1).tolist()


def test_tokens_that_tie_with_the_kth_all_stay():
    assert kept(torch.tensor([[1.0, 1, 1, 0]]), top_k=2) == [3]
    assert kept(torch.tensor([[3.0, 2, 1, 0]]), top_k=2) == [2]


@pytest.mark.parametrize(("top_p", "number"), [(0.5, 2), (0.6, 2), (0.8, 3), (0.81, 3)])
def test_a_token_stays_unless_those_before_it_hold_more_than_top_p(top_p, number):
    assert kept(PROBS.log(), top_p=top_p) == [number]


def test_the_likeliest_token_always_stays():
    assert kept(PROBS.log(), top_p=1e-6) == [1]


def test_top_p_of_one_keeps_all():
    assert kept(PROBS.log(), top_p=1.0) == [4]


def test_temperature_comes_before_the_cut():
    prob = filter_logits(PROBS.log(), SamplingConfig(top_p=0.6, temperature=2.0)).softmax(-1)
    assert prob[0, :2].tolist() == pytest.approx([0.5635, 0.4365], abs=5e-5)
    assert prob[0, 2:].sum() == 0


def test_top_p_counts_the_probability_that_top_k_left():
    # Of .5/.3/.15/.05 the first three are .526/.316/.158: before the third stand .842.
    assert kept(PROBS.log(), top_p=0.82) == [3]
    assert kept(PROBS.log(), top_p=0.82, top_k=3) == [2]
    assert kept(PROBS.log(), top_p=0.85, top_k=3) == [3]


def test_order_of_the_vocabulary_does_not_matter():
    order = torch.tensor([2, 0, 3, 1])
    shuffled = filter_logits(PROBS.log()[:, order], SamplingConfig(top_p=0.6))
    assert torch.equal(
        shuffled, filter_logits(PROBS.log(), SamplingConfig(top_p=0.6))[:, order]
    )


def test_greedy_is_top_k_one_whatever_the_draw_and_temperature():
    logits = torch.tensor([[0.0, 2, 1], [3, 0, 1]])
    greedy = SamplingConfig(top_k=1, temperature=100.0)
    assert sample(logits, greedy, torch.tensor([0.99, 0.99]).double()).tolist() == [1, 0]


def test_more_than_the_vocabulary_cannot_be_kept():
    with pytest.raises(ValueError, match="--top-k 5 exceeds the vocabulary of 4"):
        filter_logits(PROBS, SamplingConfig(top_k=5))


def test_draws_land_on_tokens_as_often_as_their_probability_says():
    draws = (torch.arange(1000).double() + 0.5) / 1000
    ids = sample(PROBS.log().expand(1000, 4), SamplingConfig(), draws)
    assert torch.bincount(ids).tolist() == [500, 300, 150, 50]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=20),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2),
)
def test_no_draw_finds_a_token_that_was_cut_off(scores, draw, kind):
    sampling = SamplingConfig(**({}, {"top_k": 2}, {"top_p": 0.4})[kind])
    logits = torch.tensor([scores])
    (token,) = sample(logits, sampling, torch.tensor([draw], dtype=torch.float64)).tolist()
    assert filter_logits(logits, sampling).softmax(-1)[0, token] > 0


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_ends_of_the_draw_are_safe(draw):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    (token,) = sample(logits, SamplingConfig(), torch.tensor([draw]).double()).tolist()
    assert token == (1 if draw == 0 else 2)


@pytest.mark.parametrize("kind", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_temperature_near_zero_chooses_the_likeliest(kind):
    logits = torch.tensor([[1.0, -3.0, 2.0, 1.5], [-9.0, -4.0, -8.0, -7.0]])
    sampling = SamplingConfig(temperature=1e-300, **kind)
    draws = torch.tensor([0.3, 0.999]).double()
    assert sample(logits, sampling, draws).tolist() == [2, 1]


def test_a_repetition_penalty_near_zero_and_a_nan_name_a_token():
    scores = apply_penalties(
        torch.tensor([1.0, 2.0]),
        [1],
        [],
        SamplingConfig(repetition_penalty=1e-300),
        TokenRules(),
    )
    draws = torch.tensor([0.3]).double()
    assert sample(scores[None], SamplingConfig(temperature=0.5), draws).tolist() == [1]
    assert sample(torch.full((1, 2), torch.nan), SamplingConfig(), draws).item() in (0, 1)


def test_log_probs_are_those_of_the_model_before_temperature():
    ids = torch.tensor([2])
    assert token_log_probs(PROBS.log(), ids).item() == pytest.approx(torch.tensor(0.15).log())


def test_min_p_leaves_out_what_is_less_likely_than_a_share_of_the_likeliest():
    assert kept(PROBS.log(), min_p=0.3) == [3]  # 0.15 / 0.5, a tie with the bound
    assert kept(PROBS.log(), min_p=0.31) == [2]
    assert kept(PROBS.log(), min_p=1.0) == [1]
    assert kept(PROBS.log(), top_k=3, min_p=0.5) == [2]


def test_penalties_and_rules_change_the_scores_of_their_tokens_alone():
    logits = torch.tensor([2.0, -2.0, 1.0, 3.0, 0.0])
    sampling = SamplingConfig(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5
    )
    scores = apply_penalties(
        logits, [0], [1, 1], sampling, TokenRules(bias=((2, 4.0), (4, -1.0)))
    )
    # 0 is of the prompt: repetition alone; 1 was written twice.
    assert scores.tolist() == [1.0, -4.0 - 0.25 - 1.0, 5.0, 3.0, -1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, 3.0, 0.0]
    rules = TokenRules(never_after=(0, 3))
    assert apply_penalties(logits, [0], [], SamplingConfig(), rules)[3] == -torch.inf
    assert apply_penalties(logits, [0], [1], SamplingConfig(), rules)[3] == 3


def test_a_text_keeps_no_object_for_each_token():
    """Python would look for cycles among all of them while the device waits."""
    request = TextRequest(prompt=[1], sampling=SamplingConfig(), num_tokens=9999, seed=1)
    writing = RunningSequence(request)
    before = len(gc.get_objects())
    for token in range(1000):
        writing.add(NewToken(0, token, -0.5))
    assert len(gc.get_objects()) < before + 100
    assert len(writing.ids) == 1000


def test_top_p_decays_to_its_bound():
    sampling = SamplingConfig(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    writing = RunningSequence(TextRequest(prompt=[1], sampling=sampling, num_tokens=9, seed=1))
    seen = []
    for _ in range(4):
        seen.append(writing.cut.top_p)
        writing.add(NewToken(0, 5, None))
    assert seen == [0.8, 0.4, 0.3, 0.3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_p": 1.1}, "--min-p"),
        ({"top_p_decay": 0.5}, "--top-p-decay"),
        ({"top_p": 0.5, "top_p_bound": 0.6}, "--top-p-bound"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty"),
        ({"presence_penalty": 1e9}, "--presence-penalty"),
        ({"temperature": float("nan")}, "--temperature"),
    ],
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**fields)
