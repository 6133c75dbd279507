"""Steps with prompts, recorded by their number of tokens; on a CPU with a recorder for it."""

import logging
from dataclasses import replace

import pytest
import torch

from mcore_infer import Engine, EngineConfig, SamplingConfig, ScoreRequest, generate, load_model
from mcore_infer.engine import model_runner
from mcore_infer.engine.model_runner import PromptSteps
from mcore_infer.engine.scheduler import Chunk, Step
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_parallel.mesh import ParallelContext

PROMPTS = [[10, 20, 30], [40], list(range(50, 69)), [10, 20, 30, 80, 90], [7]]
LIMITS = EngineConfig(
    max_sequence_tokens=40, num_pages=30, page_tokens=4, max_requests=4, max_tokens=7
)


def recording(model, limits, recorder):
    """An engine whose steps are recorded, and which has met its sizes often enough."""
    engine = Engine(model, limits)
    engine.prompts.recorder = recorder
    for i in range(9):
        assert not engine.prompts.num_recorded  # a graph is not worth it yet
        engine.add([200 + i, 3], SamplingConfig(num_tokens=1))
        for _ in engine.run():
            pass
    return engine


def test_recorded_prompts_are_read_as_those_alone_are(model, tape_recorder):
    """In chunks, beside texts that are written, after shared beginnings."""
    engine = recording(model, LIMITS, tape_recorder)
    samplings = [SamplingConfig(num_tokens=8, top_k=k) for k in (1, 5, 9, 1, 5)]
    scores = ScoreRequest(prompt=True)
    for _ in range(2):
        numbers = [
            engine.add(prompt, sampling, seed=i, scores=scores if i == 3 else None)
            for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
        ]
        done = dict(event for event in engine.run() if isinstance(event, tuple))
        for i, number in enumerate(numbers):
            alone = generate(model, [PROMPTS[i]], samplings[i], seed=i)[0]
            assert done[number].ids == alone.ids
            assert done[number].log_probs == pytest.approx(alone.log_probs, abs=1e-9)
        with torch.no_grad():
            whole = model(torch.tensor([PROMPTS[3]]))[0]
            logits = model.logits(whole)[:-1, 0, : model.vocab_size].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(PROMPTS[3][1:])[:, None])[:, 0].tolist()
        assert done[numbers[3]].prompt_log_probs == pytest.approx(wanted, abs=1e-9)
    assert engine.prompts.num_recorded > 6


@pytest.mark.parametrize("first", ["decoder", "prompts"])
def test_steps_whose_recorder_gave_up_run_as_they_come(
    first, model, waiting_recorder, monkeypatch
):
    """Nothing is padded for graphs that do not come, nor counted as one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    begun = recording if first == "prompts" else lambda model, limits, _: Engine(model, limits)
    engine = begun(model, LIMITS, waiting_recorder)
    decoder = engine.decoder
    engine.prompts.recorder = decoder.recorder = waiting_recorder
    decoder.is_recorded = True
    numbers = [engine.add(prompt, SamplingConfig(num_tokens=8, top_k=1)) for prompt in PROMPTS]
    if first == "prompts":
        engine.step()
        assert waiting_recorder.gave_up
        assert not decoder._runs
    done = dict(event for event in engine.run() if isinstance(event, tuple))
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        alone = generate(model, [prompt], SamplingConfig(num_tokens=8, top_k=1))[0]
        assert done[number].ids == alone.ids
    assert waiting_recorder.gave_up
    assert not decoder.is_recorded
    assert not any(inputs.is_recorded for inputs in decoder._inputs.values())
    assert engine.prompts.num_recorded == 0


def test_steps_that_keep_the_device_busy_are_not_recorded(model, tape_recorder, monkeypatch):
    engine = recording(model, EngineConfig(max_sequence_tokens=64), tape_recorder)
    engine.cache.is_padded = False  # as with a kernel of decoding

    def size(num_tokens, begin):
        chunk = Chunk(0, 0, begin, tuple(range(num_tokens)), (0,), wants_token=True)
        return engine.prompts._size(Step((chunk,)))

    assert engine.prompts.sizes == [16, 32, 64, 128, 192, 256, 384, 512, 768, 1024]
    assert size(16, 1000) == 16
    assert size(16, 40_000) == 0  # each token reads all keys
    assert size(1025, 0) == 0
    assert [size(40, 0) for _ in range(9)] == [0] * 8 + [64]
    long_texts = PromptSteps(model, engine.cache, 2048, table_pages=2000, recorder=None)
    assert long_texts.sizes[-2:] == [512, 524]
    num_parameters = sum(weight.numel() for weight in model.parameters())
    monkeypatch.setattr(model_runner, "_MOST_WORK", 300 * num_parameters // 2)
    large = PromptSteps(model, engine.cache, 2048, table_pages=1, recorder=None)
    assert large.sizes[-2:] == [256, 300]


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("run_folder", "there is no GPU"),
        ("hybrid_folder", "a recurrent layer reads the tokens of a text in order"),
    ],
)
def test_the_log_says_why_nothing_is_recorded(folder, reason, request, tape_recorder, caplog):
    caplog.set_level(logging.DEBUG)
    model = load_model(request.getfixturevalue(folder), ParallelContext.single()).model
    engine = Engine(model, LIMITS)
    assert engine.prompts.recorder is None
    assert f"steps with tokens of prompts are not recorded: {reason}" in caplog.text


def test_the_last_mlp_computes_only_the_tokens_whose_logits_are_read(model):
    """A prompt in three chunks, then one token of each text; scored prompts need all."""
    engine, num_rows = Engine(model, LIMITS), []
    mlp = list(model.blocks.values())[-1].mlp
    handle = mlp.register_forward_hook(lambda _, args, __: num_rows.append(len(args[0])))
    sampling = SamplingConfig(num_tokens=3, top_k=1)
    try:
        number = engine.add(PROMPTS[2], sampling)
        done = dict(event for event in engine.run() if isinstance(event, tuple))
        assert num_rows == [1] * 5  # chunks of 7, 7 and 5 tokens, then two tokens
        engine.add(PROMPTS[2], sampling, scores=ScoreRequest(prompt=True))
        list(engine.run())
        assert num_rows[5:] == [7, 7, 5, 1, 1]
    finally:
        handle.remove()
    with torch.no_grad():
        text = [*PROMPTS[2], *done[number].ids]
        logits = model.logits(model(torch.tensor([text]))[0])[:, 0, : model.vocab_size]
    assert logits[len(PROMPTS[2]) - 1 : -1].argmax(-1).tolist() == list(done[number].ids)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_drafts", "changes"), [(0, {}), (3, {}), (0, {"window_size": (20, 0)})]
)
def test_graphs_of_prompts_write_what_is_written_without_them(num_drafts, changes):
    config = TransformerConfig(
        num_layers=3, hidden_size=128, num_attention_heads=4, num_query_groups=2,
        max_position_embeddings=512, init_method_std=0.1, **changes,
    )  # fmt: skip
    model = GPT(config, ParallelContext.single("cuda"), vocab_size=500).eval()
    limits = EngineConfig(max_sequence_tokens=256, page_tokens=16, max_requests=6, num_pages=90)
    limits = replace(limits, max_tokens=128, num_speculative_tokens=num_drafts)
    prompts = [list(range(i, i + 4 + (37 * i) % 150)) for i in range(1, 60)]
    texts = []
    for is_recorded in (True, False):
        engine = Engine(model, limits)
        if not is_recorded:
            engine.prompts.recorder = None
        for i, prompt in enumerate(prompts):
            engine.add(prompt, SamplingConfig(num_tokens=5 + i % 20, top_k=1))
        done = dict(event for event in engine.run() if isinstance(event, tuple))
        texts.append([done[number].ids for number in sorted(done)])
        assert (engine.prompts.num_recorded > 10) == is_recorded
    assert texts[0] == texts[1]
