"""Adapters that requests choose by name: each text is what its adapter alone writes."""

import json

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt import convert, save
from mcore_ckpt.save_load.loading import describe_checkpoint
from mcore_infer import (
    Engine,
    EngineConfig,
    SamplingConfig,
    ScoreRequest,
    build_engine,
    generate,
    load_model,
)
from mcore_infer.config import InferenceConfig, ServerConfig
from mcore_models.peft.config import is_adapter
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import named_shards

GREEDY = SamplingConfig(num_tokens=6, top_k=1)
PROMPTS = [[10, 20, 30, 80, 90, 100, 110, 120, 130], [40, 41]]
LIMITS = EngineConfig(
    max_sequence_tokens=40, num_pages=30, page_tokens=4, max_requests=6, max_tokens=11
)
NAMES = ["", "sql", "chat"]


def open_with(folders, ctx, names=("sql", "chat")):
    return load_model(
        folders / "base",
        ctx,
        dtype=torch.float64,
        adapters={name: folders / name for name in names},
    )


@pytest.fixture(scope="module")
def stacked(adapter_folders):
    return open_with(adapter_folders, ParallelContext.single())


@pytest.fixture(scope="module")
def alone(adapter_folders):
    """By adapter, what its merged model writes after each prompt."""
    found = {}
    for name in NAMES:
        source = adapter_folders / "base"
        if name:
            config = adapter_folders / name / "adapter_config.json"
            named = json.loads(config.read_text()) | {"base_model_name_or_path": str(source)}
            other = adapter_folders / f"{name}-with-base"
            other.mkdir()
            (other / "adapter_config.json").write_text(json.dumps(named))
            weights = "adapter_model.safetensors"
            (other / weights).write_bytes((adapter_folders / name / weights).read_bytes())
            source = adapter_folders / f"{name}-merged"
            convert("hf", other, "hf", source)
        model = load_model(source, ParallelContext.single(), dtype=torch.float64).model
        found[name] = list(generate(model, PROMPTS, GREEDY))
    assert len({result[0].ids for result in found.values()}) == 3
    return found


def written(engine):
    """Each prompt by each adapter, all in one batch; twice, so that prefixes are shared."""
    rounds = []
    for scores in (ScoreRequest(prompt=True), ScoreRequest()):
        numbers = {
            engine.add(prompt, GREEDY, adapter=name, scores=scores): (name, i)
            for i, prompt in enumerate(PROMPTS)
            for name in NAMES
        }
        done = dict(event for event in engine.run() if isinstance(event, tuple))
        rounds.append({key: done[number] for number, key in numbers.items()})
    return rounds


def assert_as_alone(rounds, alone):
    for results in rounds:
        for (name, i), result in results.items():
            assert result.ids == alone[name][i].ids
            assert result.log_probs == pytest.approx(alone[name][i].log_probs, abs=1e-9)


def test_requests_of_different_adapters_in_one_batch_get_what_each_adapter_writes_alone(
    stacked, alone
):
    engine = Engine(stacked.model, LIMITS, adapters=stacked.adapters)
    assert_as_alone(written(engine), alone)
    with pytest.raises(ValueError, match="the adapter tales is not loaded: use sql or chat"):
        engine.add([1], GREEDY, adapter="tales")
    search = SamplingConfig(num_tokens=3, beam_width=2)
    numbers = [engine.add(PROMPTS[0], search, adapter=name) for name in NAMES]
    done = dict(event for event in engine.run() if isinstance(event, tuple))
    assert len({done[number].ids for number in numbers}) > 1


def test_recorded_steps_choose_adapters_anew_in_every_replay(stacked, alone, tape_recorder):
    engine = Engine(stacked.model, LIMITS, adapters=stacked.adapters)
    engine.prompts.recorder = tape_recorder
    for i in range(9):  # until graphs of prompts are worth recording
        engine.add([200 + i, 3], GREEDY)
        for _ in engine.run():
            pass
    for _ in range(2):
        assert_as_alone(written(engine), alone)
    assert engine.prompts.num_recorded


def test_proposals_are_verified_by_the_adapter_of_their_request(stacked, alone):
    config = InferenceConfig(num_speculative_tokens=2, inference_dynamic_batching_block_size=4)
    engine = build_engine(stacked.model, config, adapters=stacked.adapters)
    assert_as_alone(written(engine), alone)
    mtp = InferenceConfig(num_speculative_tokens=2, speculative_drafts="mtp")
    with pytest.raises(ValueError, match=r"--speculative-drafts mtp"):
        build_engine(stacked.model, mtp, adapters=stacked.adapters)


def written_by_ranks(folders, fields):
    ctx = ParallelContext.build(ParallelConfig(**fields))
    loaded = open_with(folders, ctx)
    rounds = written(Engine(loaded.model, LIMITS, adapters=loaded.adapters))
    ctx.destroy()
    return rounds


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_tensor_and_pipeline_ranks_serve_adapters_as_one_rank_does(
    adapter_folders, alone, axis
):
    for rounds in run_ranks(
        written_by_ranks, 2, adapter_folders, {f"{axis}_model_parallel_size": 2}
    ):
        assert_as_alone(rounds, alone)


def test_a_run_of_adapters_is_served_as_the_folder_of_peft_that_holds_them(
    adapter_folders, alone, tmp_path
):
    single = ParallelContext.single()
    trained = load_model(adapter_folders / "sql-with-base", single, dtype=torch.float64)
    shards = {f"model.{n}": s for n, s in named_shards(trained.model).items() if is_adapter(n)}
    index = describe_checkpoint(adapter_folders / "sql-with-base")
    save(tmp_path / "run", 7, shards, world=SINGLE, extra=index.extra)
    loaded = load_model(
        adapter_folders / "base",
        single,
        dtype=torch.float64,
        adapters={"chat": adapter_folders / "chat", "sql": tmp_path / "run" / "iter_0000007"},
    )
    assert_as_alone(written(Engine(loaded.model, LIMITS, adapters=loaded.adapters)), alone)
    with pytest.raises(ValueError, match="with --lora-modules, load their base"):
        load_model(tmp_path / "run", single, adapters={"chat": adapter_folders / "chat"})


def test_what_cannot_share_a_batch_is_refused(adapter_folders, run_folder, tmp_path):
    single = ParallelContext.single()
    config = json.loads((adapter_folders / "sql" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    weights = (adapter_folders / "sql" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    for folder, match in [(tmp_path, "DoRA"), (run_folder / "iter_0000007", "no adapters")]:
        with pytest.raises(ValueError, match=match):
            load_model(adapter_folders / "base", single, adapters={"sql": folder})
    with pytest.raises(ValueError, match="NAME=FOLDER"):
        ServerConfig(lora_modules=("sql",))
    with pytest.raises(ValueError, match="two adapters the same name"):
        ServerConfig(lora_modules=("sql=a", "sql=b"))
