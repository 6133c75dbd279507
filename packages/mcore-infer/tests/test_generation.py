import logging

import pytest
import torch
from warm_ranks import run_ranks

from mcore_infer import SamplingConfig, generate, generate_text, load_model, sample, stream
from mcore_infer.generation import next_logits, prompt_ids
from mcore_models.kernels.batch_invariant import token_log_probs
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext

PROMPTS = [[10, 20, 30], [40], [50, 60, 70, 80, 90, 100]]
SAMPLINGS = [
    SamplingConfig(num_tokens=8, top_k=1),
    SamplingConfig(num_tokens=8),
    SamplingConfig(num_tokens=8, temperature=0.7, top_k=20),
    SamplingConfig(num_tokens=8, top_p=0.8),
]
NAMES = ["greedy", "plain", "top-k", "top-p"]


def recomputed(model, prompt, sampling, seed):
    """What one row writes when the whole text is read anew for every token."""
    random = torch.Generator().manual_seed(seed)
    text, log_probs = list(prompt), []
    for _ in range(sampling.num_tokens):
        logits = next_logits(model, torch.tensor([text]))
        draws = torch.rand(1, generator=random, dtype=torch.float64)
        chosen = sample(logits, sampling, draws)
        log_probs.append(token_log_probs(logits, chosen).item())
        text.append(chosen.item())
    return text[len(prompt) :], log_probs


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_a_batch_writes_what_each_prompt_alone_would_read_anew_for_every_token(model, sampling):
    for i, result in enumerate(generate(model, PROMPTS, sampling, seed=3)):
        ids, log_probs = recomputed(model, PROMPTS[i], sampling, seed=3 + i)
        assert list(result.ids) == ids
        assert result.log_probs == pytest.approx(log_probs, abs=1e-9)
        assert result.finish_reason == "length"


def test_the_same_seed_writes_the_same_and_another_something_else(model):
    texts = [generate(model, PROMPTS, SAMPLINGS[1], seed=s)[0].ids for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_an_end_of_document_is_kept_and_ends_its_row_alone(model):
    whole = generate(model, PROMPTS, SAMPLINGS[0])
    eod = whole[0].ids[3]
    first = whole[0].ids.index(eod)
    results = generate(model, PROMPTS, SAMPLINGS[0], eod=eod)
    assert results[0].ids == whole[0].ids[: first + 1]
    assert results[0].finish_reason == "stop"
    for result, unstopped in zip(results[1:], whole[1:], strict=True):
        if eod not in unstopped.ids:
            assert result == unstopped


def test_stop_words_are_cut_off_and_never_streamed(model):
    (whole,) = generate(model, PROMPTS[:1], SAMPLINGS[1])
    stop = [[*whole.ids[4:5], 999], list(whole.ids[3:6])]
    (result,) = generate(model, PROMPTS[:1], SAMPLINGS[1], stop=stop)
    assert result.ids == whole.ids[:3]
    assert len(result.log_probs) == 3
    assert result.finish_reason == "stop"
    streamed = [token.id for token in stream(model, PROMPTS[:1], SAMPLINGS[1], stop=stop)]
    assert streamed == list(whole.ids[:3])


def test_the_beginning_of_a_stop_word_that_does_not_come_is_given_out(model):
    (whole,) = generate(model, PROMPTS[:1], SAMPLINGS[1])
    stop = [[whole.ids[-1], 999]]
    streamed = [token.id for token in stream(model, PROMPTS[:1], SAMPLINGS[1], stop=stop)]
    assert streamed == list(whole.ids)


def test_rows_stream_their_tokens_in_order(model):
    rows = {i: [] for i in range(len(PROMPTS))}
    for token in stream(model, PROMPTS, SAMPLINGS[3], seed=3):
        rows[token.row].append((token.id, token.log_prob))
    for i, result in enumerate(generate(model, PROMPTS, SAMPLINGS[3], seed=3)):
        assert rows[i] == list(zip(result.ids, result.log_probs, strict=True))


def test_a_text_ends_where_the_models_positions_do(model, caplog):
    prompts = [[1] * 36, [2]]
    with caplog.at_level(logging.WARNING):
        results = generate(model, prompts, SamplingConfig(num_tokens=20, top_k=1))
    assert [len(r.ids) for r in results] == [4, 20]
    assert "4 more fit into --max-position-embeddings 40, instead of" in caplog.text


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one token"),
        ([[1], []], "at least one token"),
        ([[1] * 40], "maximum context length was exceeded"),
    ],
)
def test_prompts_that_cannot_be_written_on_are_refused(model, prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, SAMPLINGS[0])


def test_a_model_in_training_mode_is_refused(model):
    model.train()
    try:
        with pytest.raises(ValueError, match="eval mode"):
            generate(model, PROMPTS, SAMPLINGS[0])
    finally:
        model.eval()


def test_text_goes_in_and_text_comes_out(loaded):
    sampling = SamplingConfig(num_tokens=5, top_k=1)
    texts = generate_text(loaded.model, loaded.tokenizer, ["In the", ""], sampling)
    ids = generate(loaded.model, [list(b"In the"), [256]], sampling, eod=256)
    assert texts == [loaded.tokenizer.decode(list(r.ids)) for r in ids]


def test_an_empty_prompt_begins_a_document(loaded):
    assert prompt_ids(loaded.tokenizer, "") == [256]


def written_by_ranks(folder, tp, sampling):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=tp))
    results = generate(load_model(folder, ctx).model, PROMPTS, sampling, seed=3)
    ctx.destroy()
    return results


def test_tensor_ranks_agree_and_write_what_one_rank_does(run_folder, model):
    expected = generate(model, PROMPTS, SAMPLINGS[3], seed=3)
    for results in run_ranks(written_by_ranks, 2, run_folder, 2, SAMPLINGS[3]):
        for result, one in zip(results, expected, strict=True):
            assert result.ids == one.ids
            assert result.log_probs == pytest.approx(one.log_probs, abs=1e-9)


@pytest.mark.parametrize("kind", ["expert_folder", "hybrid_folder"])
def test_experts_and_recurrent_layers_write_what_reading_anew_would(kind, request):
    folder = request.getfixturevalue(kind)
    model = load_model(folder, ParallelContext.single()).model
    sampling = SAMPLINGS[3]
    expected = generate(model, PROMPTS, sampling, seed=3)
    for i, result in enumerate(expected):
        assert list(result.ids) == recomputed(model, PROMPTS[i], sampling, seed=3 + i)[0]
    for results in run_ranks(written_by_ranks, 2, folder, 2, sampling):
        assert [r.ids for r in results] == [r.ids for r in expected]
