"""A run's checkpoints: Hugging Face folders under any layout, one pointer, one writer."""

import json
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file
from warm_ranks import run_ranks

from mcore_ckpt.conversion.conversion import mcore_to_hf
from mcore_ckpt.conversion.inspection import check, differences
from mcore_ckpt.conversion.resharding import reshard
from mcore_ckpt.save_load.loading import read_tensor
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.index import read_index
from mcore_ckpt.storage.paths import resolve_folder
from mcore_data.tokenizers.building import load_tokenizer
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.batches.datasets import Datasets
from mcore_train.checkpoints.adapter_bases import check_model, model_description
from mcore_train.checkpoints.checkpointing import Checkpoints
from mcore_train.checkpoints.origin import carried_files
from mcore_train.checkpoints.resuming import (
    _streams_fit,
    build_run,
    load_run,
    save_run,
    take_snapshot,
)
from mcore_train.composition import compose
from mcore_train.layout_check.rows import Rows
from mcore_train.loop import train
from mcore_train.options.parsing import parse
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 2,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 43,
    "num_workers": 0,
    "make_vocab_size_divisible_by": 8,
    "bf16": True,
}
MODELS = {
    "dense": {},
    "untied, four layers": {"num_layers": 4, "untie_embeddings_and_output_weights": True},
    "mixtral": {
        "num_experts": 4,
        "moe_router_topk": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_layer_freq": "[0,1]",
        "qk_layernorm": True,
        "kv_channels": 8,
    },
}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP = "expert_model_parallel_size"
LAYOUTS = {
    "dense": {TP: 2, PP: 2},
    "untied, four layers": {TP: 2, PP: 2, "pipeline_schedule": "zb-v"},
    "mixtral": {
        "async_save": True,
        EP: 2,
        TP: 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
    },
    "qwen3_moe": {PP: 2, EP: 2, "use_distributed_optimizer": True},
}
"""How each model is saved; the vocabulary of 43 is padded to 48 everywhere."""

OTHER_LAYOUTS = {
    "dense": {TP: 2, "use_distributed_optimizer": True},
    "untied, four layers": {PP: 4},
    "mixtral": {PP: 2, "use_distributed_optimizer": True},
    "qwen3_moe": {TP: 2, EP: 4, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
}
"""How it is loaded again."""


ROWS = Rows(seq_length=8, vocab_size=43, global_batch_size=4, num_steps=16)


def build(world_size=1, **changes):
    config = compose({**TINY, **changes})
    plan = resolve(config, world_size)
    ctx = ParallelContext.build(config.parallelism)
    return assemble(plan, ctx, datasets=Datasets(train=ROWS))


def save_and_load_layouts(folder):
    for name, layout in LAYOUTS.items():
        options = {**MODELS[name], "train_iters": 1}
        run = build(4, save=f"{folder}/{name}/hf", save_hf=True, **options, **layout)
        train(run, Reporter(None))
        what = take_snapshot(run)
        save(f"{folder}/{name}/plain", 1, what.shards, world=run.ctx.world, extra=what.extra)
        run.ctx.destroy()
        again = build(4, load=f"{folder}/{name}/hf", **options, **OTHER_LAYOUTS[name])
        again = load_run(again)
        assert again.origin.checkpoint
        assert_holds(take_snapshot(again).shards, resolve_folder(f"{folder}/{name}/plain"))
        again.ctx.destroy()


def assert_holds(shards, step):
    """Compare what a rank holds with a step of ours, tensor by tensor."""
    index = read_index(step)
    for name, shard in shards.items():
        if name.startswith("rng."):
            continue
        whole = read_tensor(step, name, index=index)
        for piece in shard.pieces:
            box = tuple(
                slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True)
            )
            assert torch.equal(piece.data, whole[box]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_and_load_layouts, 4, str(folder), timeout_s=240.0)
    return folder


def auto_model():
    from transformers import AutoModelForCausalLM  # seconds that the ranks need not spend

    return AutoModelForCausalLM


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_step_is_a_hugging_face_folder_and_loads_as_ours(saved, tmp_path, name):
    step = resolve_folder(saved / name / "hf")
    plain = saved / name / "plain"
    # Ours: the same bits, whichever files they stand in, and every checksum right.
    assert differences(plain, step) == []
    check(step)
    # Theirs: the tensors that a conversion writes.
    mcore_to_hf(plain, tmp_path / "converted")
    files = [load_file(file) for file in step.glob("model*.safetensors")]
    theirs = {key: tensor for file in files for key, tensor in file.items()}
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert theirs.keys() == converted.keys()
    for key, tensor in converted.items():
        assert torch.equal(theirs[key], tensor), key
    # Every rank wrote a part of them, and no weight stands twice.
    assert len(files) == 4
    for file in step.glob("rank_*.safetensors"):
        assert not any(key.startswith("model.") for key in load_file(file))
    model, told = auto_model().from_pretrained(step, output_loading_info=True)
    assert not any(told.values())
    family = {"dense": "llama", "untied, four layers": "llama"}.get(name, name)
    assert model.config.model_type == family
    assert model.config.to_dict()["vocab_size"] == 43
    state = model.state_dict()
    # Newer transformers name and stack experts in another way.
    assert all(
        torch.equal(state[k], t)
        for k, t in theirs.items()
        if "moe" not in k and ".experts." not in k
    )


def test_a_step_with_foreign_weights_loads_under_one_rank_and_reshards(saved, tmp_path):
    source = str(saved / "dense" / "hf")
    ends = b'{"eos_token_id": [1, 2]}'
    (resolve_folder(source) / "generation_config.json").write_bytes(ends)
    run = build(
        load=source, save=str(tmp_path), save_hf=True, override_opt_param_scheduler=True
    )
    run = load_run(run)
    assert run.origin.checkpoint
    train(run, Reporter(None))
    step = resolve_folder(tmp_path)
    assert (step / "generation_config.json").read_bytes() == ends
    assert {f.name for f in step.glob("*.safetensors")} == {
        "model.safetensors",
        "rank_00000.safetensors",
    }
    assert not (step / "model.safetensors.index.json").exists()
    auto_model().from_pretrained(step)
    again = reshard(step, tmp_path / "whole")
    assert differences(step, again) == []
    assert not (again / "config.json").exists()
    assert json.loads((step / "config.json").read_text())["dtype"] == "bfloat16"


def test_how_texts_end_is_carried_from_a_base_and_under_its_own_tokenizer(saved, tmp_path):
    run = build(save=str(tmp_path), pretrained_checkpoint=str(saved / "dense" / "hf"))
    origin = resolve_folder(saved / "dense" / "hf")
    (origin / "generation_config.json").write_text("{}")
    config, mine = run.plan.config, load_tokenizer("ByteTokenizer")
    name = "generation_config.json"
    run = load_run(run)
    assert run.origin.checkpoint
    assert run.origin.carried_files == {name: b"{}"}
    assert carried_files(config, mine) == {}
    mine.save(origin / "tokenizer")
    assert carried_files(config, mine) == {name: b"{}"}
    load_tokenizer("NullTokenizer", vocab_size=42).save(origin / "tokenizer")
    assert carried_files(config, mine) == {}
    named = {"pretrained_checkpoint": str(origin), "tokenizer_model": f"{origin}/tokenizer"}
    assert carried_files(compose({**TINY, **named}), mine) == {name: b"{}"}
    rmtree(origin / "tokenizer")


def test_a_model_that_no_family_can_say_is_refused_before_training(tmp_path):
    run = build(save=str(tmp_path), save_hf=True, swiglu=False, quick_geglu=True)
    with pytest.raises(ValueError, match="no Hugging Face family can express this model"):
        train(run, Reporter(None))
    assert run.progress.iteration == 0


def test_a_run_with_experts_may_balance_otherwise_and_a_dense_one_names_upcycle(tmp_path):
    def plan(**fields):
        return resolve(compose(TINY | MODELS["mixtral"] | fields), 1)

    saved = model_description(plan())
    free = {"moe_router_force_load_balancing": True, "moe_router_dtype": "fp32"}
    check_model(saved, plan(moe_router_load_balancing_type="sinkhorn", **free), tmp_path)
    with pytest.raises(
        ValueError, match=r"moe_router_topk: 2 in the checkpoint, 3 here\): leave these"
    ):
        check_model(saved, plan(moe_router_topk=3), tmp_path)
    # One list of layers has many spellings.
    check_model(saved, plan(moe_layer_freq="[1]*2"), tmp_path)
    with pytest.raises(ValueError, match=r"moe_layer_freq: 1 in the checkpoint, \[0, 1\] here"):
        check_model(saved, plan(moe_layer_freq="[0, 1]"), tmp_path)
    # Descriptions of Hugging Face folders leave out what has its default.
    del saved["config"]["position_embedding_type"]
    check_model(saved, plan(), tmp_path)
    with pytest.raises(
        ValueError, match="position_embedding_type: rope in the checkpoint, none here"
    ):
        check_model(saved, plan(position_embedding_type="none"), tmp_path)
    dense = model_description(plan(num_experts=0))
    with pytest.raises(
        ValueError, match=f"mcore-ckpt upcycle {tmp_path} --output DIR --num-ex"
    ):
        check_model(dense, plan(), tmp_path)


def test_a_mixture_of_hugging_face_adds_a_balancing_loss_where_transformers_does(
    tmp_path, caplog
):
    experts = {**MODELS["mixtral"], "moe_aux_loss_coeff": 0.02}
    save_run(build(save=str(tmp_path / "run"), **experts))
    mcore_to_hf(tmp_path / "run", tmp_path / "hf")
    words = ["--mock-data", "--train-iters", "1", "--lr", "1", "--load"]

    def loss_of(folder, *flags):
        caplog.clear()
        with caplog.at_level("INFO"):
            config = parse([*words, str(tmp_path / folder), *flags])
        return config.experts.moe_aux_loss_coeff, caplog.text

    weight, told = loss_of("hf")
    assert weight == 0.0
    assert "none, as in transformers" in told
    assert "--moe-aux-loss-coeff 0.02 adds it" in told
    assert (
        "aux_loss x 0.3, from the command line"
        in loss_of("hf", "--moe-aux-loss-coeff", "0.3")[1]
    )
    # What a run has trained with goes on, and so does what transformers adds.
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_router_logits": True}))
    for folder in ("run", "hf"):
        weight, told = loss_of(folder)
        assert weight == 0.02
        assert f"aux_loss x 0.02, from {tmp_path / folder}" in told


STATEFUL = {
    "num_layers": 4,
    "hybrid_override_pattern": "M-*-",
    "mamba_head_dim": 16,
    "mamba_num_groups": 1,
}


def refuse_to_draw(*_, **__):
    raise AssertionError("weights are drawn that are loaded next")


@pytest.mark.parametrize("flags", [MODELS["qwen3_moe"], STATEFUL], ids=["experts", "mamba"])
def test_a_run_that_loads_all_weights_draws_none_and_goes_on_like_one_that_drew(
    tmp_path, monkeypatch, flags
):
    ctx = ParallelContext.single()
    options = {**TINY, **flags, "use_distributed_optimizer": True}
    first = assemble(resolve(compose({**options, "save": str(tmp_path)}), 1), ctx)
    train(first, Reporter(None), until=1)
    folder = str(save_run(first))
    plan = resolve(compose({**options, "load": folder}), 1)
    runs = [load_run(assemble(plan, ctx))]
    starts = [{"load": folder, "finetune": True}, {"pretrained_checkpoint": folder}]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", refuse_to_draw)
        runs.append(build_run(plan, ctx))
        for start in starts:
            assert build_run(resolve(compose(options | start), 1), ctx).origin.checkpoint
        with pytest.raises(AssertionError, match="drawn"):
            build_run(resolve(compose(options), 1), ctx)
    for run in runs:
        train(run, Reporter(None))
    drawn, loaded = (take_snapshot(run).shards for run in runs)
    assert drawn.keys() == loaded.keys()
    for name, shard in drawn.items():
        pairs = zip(shard.pieces, loaded[name].pieces, strict=True)
        assert all(torch.equal(a.data, b.data) for a, b in pairs), name


def test_weights_that_a_checkpoint_lacks_are_those_of_the_seed(tmp_path):
    ctx, lacking = ParallelContext.single(), "model.blocks.1.mlp.fc1.up.weight"
    fresh = assemble(resolve(compose(TINY), 1), ctx)
    what = take_snapshot(fresh)
    assert lacking in what.shards
    shards = {name: shard for name, shard in what.shards.items() if name != lacking}
    save(tmp_path, 1, shards, world=ctx.world, extra=what.extra)
    options = TINY | {"load": str(tmp_path), "finetune": True}
    lenient = {"dist_ckpt_strictness": "log_all"}
    run = build_run(resolve(compose(options | lenient), 1), ctx)
    piece, wanted = (take_snapshot(r).shards[lacking].pieces[0].data for r in (run, fresh))
    assert torch.equal(piece, wanted)
    assert wanted.any()
    with pytest.raises(ValueError, match="missing in the checkpoint"):
        build_run(resolve(compose(options), 1), ctx)


def test_noise_that_another_layout_draws_anew_is_named(tmp_path, caplog):
    noise = {"num_experts": 4, "moe_input_jitter_eps": 0.1, "peft": "lora", "lora_dim": 2}
    noise |= {"lora_dropout": 0.1}
    run = build(save=str(tmp_path), **noise)
    save_run(run)
    extra = read_index(resolve_folder(tmp_path)).extra
    extra["parallel"]["tensor_model_parallel_size"] = 2
    assert not _streams_fit(run, extra)
    assert "new random streams for --lora-dropout and --moe-input-jitter-eps" in caplog.text


def test_a_save_in_the_background_is_told_until_it_is_durable(tmp_path):
    run = build(save=str(tmp_path), async_save=True, train_iters=1)
    with Checkpoints(run, Reporter(None)) as checkpoints:
        assert not checkpoints.is_saving
        checkpoints.save()
        assert checkpoints.is_saving
        checkpoints.finish()
        assert not checkpoints.is_saving
