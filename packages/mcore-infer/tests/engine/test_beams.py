"""Beam search in the engine against one that reads every text anew."""

import pytest
import torch

from mcore_infer import (
    Engine,
    EngineConfig,
    SamplingConfig,
    ScoreRequest,
    TokenRules,
    generate,
)
from mcore_infer.engine.beams import BeamSearch
from mcore_infer.writing.sequence import RunningSequence, TextRequest

PROMPT = [10, 20, 30, 40, 50]


def searched(model, width, num_tokens, penalty, end):
    """Every successor of every kept text, best first."""
    live, over = [((), 0.0)], []
    for length in range(1, num_tokens + 1):
        found = []
        for ids, total in live:
            hidden, _ = model(torch.tensor([[*PROMPT, *ids]]))
            scores = model.logits(hidden[-1:])[0, 0, : model.vocab_size].log_softmax(-1)
            found += [((*ids, t), total + s) for t, s in enumerate(scores.tolist())]
        found.sort(key=lambda text: -text[1])
        over += [(i, s / length**penalty) for i, s in found[:width] if i[-1] == end]
        live = [text for text in found if text[0][-1] != end][:width]
        over = sorted(over, key=lambda text: -text[1])[:width]
        if len(over) == width and over[-1][1] >= live[0][1] / length**penalty:
            return over
    over += [(ids, total / num_tokens**penalty) for ids, total in live]
    return sorted(over, key=lambda text: -text[1])[:width]


def test_beams_are_those_of_a_search_that_reads_every_text_anew(model):
    """Beside a request that draws, on few pages; with ends that are reached."""
    engine = Engine(
        model, EngineConfig(max_sequence_tokens=40, num_pages=12, page_tokens=4, max_requests=4)
    )
    drawn = SamplingConfig(num_tokens=9)
    end = searched(model, 3, 4, 1.0, -1)[0][0][1]
    cases = [(3, 4, 1.0, end), (3, 5, 0.0, end), (1, 6, 1.0, None), (2, 6, 2.0, end)]
    numbers = [engine.add(PROMPT, drawn, seed=7)]
    numbers += [
        engine.add(
            PROMPT, SamplingConfig(num_tokens=n, beam_width=w, length_penalty=p), eod=eod
        )
        for w, n, p, eod in cases
    ]
    gone = engine.add(PROMPT, SamplingConfig(num_tokens=9, beam_width=4))
    engine.step()
    engine.abort(gone)
    streamed = {number: [] for number in numbers}
    results = {}
    for event in engine.run():
        if isinstance(event, tuple):
            results[event[0]] = event[1]
        else:
            streamed[event.row].append(event.id)
    assert sorted(results) == numbers
    assert results[numbers[0]].ids == generate(model, [PROMPT], drawn, seed=7)[0].ids
    reasons = set()
    for number, (width, count, penalty, eod) in zip(numbers[1:], cases, strict=True):
        expected = searched(model, width, count, penalty, eod)
        beams = results[number].beams
        assert [beam.ids for beam in beams] == [ids for ids, _ in expected]
        assert [b.score for b in beams] == pytest.approx([s for _, s in expected], abs=1e-9)
        assert streamed[number] == list(results[number].ids) == list(beams[0].ids)
        reasons |= {beam.has_end for beam in beams}
    assert reasons == {True, False}
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_pages
    assert not engine.has_work


def test_beams_are_also_found_offline(model):
    beams = SamplingConfig(num_tokens=4, beam_width=3)
    first, second = generate(model, [PROMPT, PROMPT[:2]], beams)
    found = [(beam.ids, pytest.approx(beam.score)) for beam in first.beams]
    assert found == searched(model, 3, 4, 1.0, -1)
    assert len(second.beams) == 3


def test_a_search_ends_when_no_beam_can_do_better():
    sampling = SamplingConfig(num_tokens=9, beam_width=2, length_penalty=0.0)
    request = TextRequest(prompt=[1], sampling=sampling, num_tokens=9, seed=0, eod=0)
    search = BeamSearch(RunningSequence(request))
    assert not search.take([((0, -1.0), (5, -1.2), (6, -2.0), (7, -3.0))])
    assert [ids for ids, _ in search.live] == [(5,), (6,)]
    ends = [((0, -0.5), (1, -0.6), (2, -0.7), (3, -0.8))] * 2
    assert search.take(ends)  # those that go on are behind both that ended
    assert [(beam.ids, beam.score) for beam in search.over] == [((0,), -1.0), ((5, 0), -1.7)]


def test_what_beams_cannot_keep_is_refused(model):
    engine = Engine(model, EngineConfig(max_sequence_tokens=40))
    beams = SamplingConfig(num_tokens=3, beam_width=2)
    with pytest.raises(ValueError, match="does not support biases"):
        engine.add(PROMPT, beams, rules=TokenRules(bias=((1, 1.0),)))
    for scores in (ScoreRequest(num_top=2), ScoreRequest(prompt=True)):
        with pytest.raises(ValueError, match="scores of complete texts"):
            engine.add(PROMPT, beams, scores=scores)
    with pytest.raises(ValueError, match="stop sequences of one token"):
        engine.add(PROMPT, beams, stop=[[1, 2]])
    with pytest.raises(ValueError, match="maximum context length was exceeded"):
        engine.add(PROMPT, beams, num_tokens=39)
    with pytest.raises(ValueError, match="has no effect without --beam-width"):
        SamplingConfig(length_penalty=2.0)
    with pytest.raises(ValueError, match="leave temperature"):
        SamplingConfig(beam_width=2, temperature=0.5)
    assert not engine.has_work
