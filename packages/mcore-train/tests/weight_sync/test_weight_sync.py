"""Weights of runs in many layouts, pushed to engines on other ranks and to folders."""

import os
from functools import partial

import pytest
import torch
from forks import exit_code, fork
from safetensors.torch import load_file
from warm_ranks import run_ranks

from mcore_ckpt import convert
from mcore_infer import Engine, EngineConfig, SamplingConfig, load_model
from mcore_infer.loading import empty_model
from mcore_models.description import ModelDescription
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.checkpoints.adapter_bases import model_description, model_shards
from mcore_train.composition import compose
from mcore_train.resolution import build_plan
from mcore_train.weight_sync.engine_sync import EngineSync
from mcore_train.weight_sync.hf_weights import HFWeights, combined_digest, save_weights_folder

TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "ffn_hidden_size": 24,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 4,
    "lr": 1e-2,
    "mock_data": True,
    "mock_vocab_size": 64,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 63,
    "num_workers": 0,
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
LAYOUTS = {
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2},
    "ZeRO": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "FSDP": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "ep 2": {**EXPERTS, "expert_model_parallel_size": 2},
}
GREEDY = SamplingConfig(num_tokens=4, top_k=1)
CONFIG = EngineConfig(max_sequence_tokens=32, num_pages=32, page_tokens=4)


def assembled(changes, seed, ranks):
    config = compose({**TINY, **changes, "seed": seed})
    plan = build_plan(config, len(ranks))
    return assemble(plan, ParallelContext.build(config.parallelism, ranks=ranks))


def built_engine(changes, ctx):
    """An engine whose weights are zero."""
    config = compose({**TINY, **changes})
    description = ModelDescription.from_dict(model_description(build_plan(config, 2)))
    return Engine(empty_model(description, ctx, torch.float32).eval(), CONFIG)


def layouts_pushed_to_an_engine(folder):
    """Ranks 0 and 1 train, ranks 2 and 3 serve with split matrices."""
    whole = ParallelContext.build(ParallelConfig())
    rank, found = whole.world.rank, {}
    contexts = [whole]
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        if rank < 2:
            run = assembled(layout, seed=number, ranks=(0, 1))
            description = model_description(run.plan)
            read = partial(model_shards, run)
            sync = EngineSync(whole.world, weights=read, round_bytes=2000)
            versions = [sync.push(), sync.push(7)]
            folder_of = save_weights_folder(
                folder / str(number), 1, read, description, run.ctx.world
            )
            sent = HFWeights(read, description, run.ctx.world, bucket_bytes=3000)
            tensors = [pair for bucket in sent.buckets() for pair in bucket]
            tensors = [(name, tensor.clone()) for name, tensor in tensors]
            found[name] = versions, folder_of, tensors, sent.num_bytes
            contexts.append(run.ctx)
        else:
            split = ParallelConfig(tensor_model_parallel_size=2)
            ctx = ParallelContext.build(split, ranks=(2, 3))
            engine = built_engine(LAYOUTS[name], ctx)
            sync = EngineSync(whole.world, engine=engine, round_bytes=2000)
            number_of_old = engine.add([1, 2, 3], GREEDY)
            engine.step()
            versions = [sync.push(), sync.push(7)]
            texts = dict(event for event in engine.run() if isinstance(event, tuple))
            found[name] = (
                versions,
                engine.weights_version,
                texts[number_of_old].weights_versions,
                {n: p.detach().clone() for n, p in engine.model.named_parameters()},
            )
            contexts.append(ctx)
    for ctx in contexts:
        ctx.destroy()
    return found


def loaded_parameters(folders):
    """What the same engine ranks load from the folders."""
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    models = {name: load_model(folder, ctx).model for name, folder in folders.items()}
    ctx.destroy()
    return {
        name: {n: p.detach().clone() for n, p in model.named_parameters()}
        for name, model in models.items()
    }


def test_an_engine_has_the_bytes_of_convert_after_a_push_from_any_layout(tmp_path):
    trainer, _, *engines = run_ranks(layouts_pushed_to_an_engine, 4, tmp_path)
    folders = {name: trainer[name][1] for name in LAYOUTS}
    expected = run_ranks(loaded_parameters, 2, folders)
    for name, (versions, folder, tensors, num_bytes) in trainer.items():
        assert versions == [1, 7]
        report = convert("mcore", folder.parent, "hf", tmp_path / f"{name}-converted")
        converted = load_file(report.output / "model.safetensors")
        assert {n: t.shape for n, t in tensors} == {n: t.shape for n, t in converted.items()}
        assert all(torch.equal(t, converted[n]) for n, t in tensors), name
        in_order = [(n, converted[n]) for n, _ in tensors]
        assert combined_digest(0, tensors) == combined_digest(0, in_order)
        assert num_bytes == sum(t.nbytes for t in converted.values())
        for rank, engine in enumerate(engines):
            pushed, version, text_versions, parameters = engine[name]
            assert (pushed, version, text_versions) == ([1, 7], 7, (0, 7)), name
            for parameter, value in expected[rank][name].items():
                assert torch.equal(parameters[parameter], value), f"{name}: {parameter}"


def damaged_push():
    import mcore_ckpt.save_load.tensor_exchange as tensor_exchange

    whole = ParallelContext.build(ParallelConfig())
    rank = whole.world.rank
    ctx = ParallelContext.build(ParallelConfig(), ranks=(rank,))
    if rank == 0:
        run = assembled({}, seed=3, ranks=(0,))
        sync = EngineSync(whole.world, weights=partial(model_shards, run))
        engine = None
    else:
        engine = built_engine({}, ctx)
        sync = EngineSync(whole.world, engine=engine)
    with pytest.raises(ValueError, match=r"push of versions \[3, 4\] after version 0"):
        sync.push(3 + rank)
    real = tensor_exchange.all_to_all

    def damaging(x, axis, send, receive):
        got = real(x, axis, send, receive)
        if got.dtype == torch.uint8 and len(got):
            got[len(got) // 2] ^= 1
        return got

    tensor_exchange.all_to_all = damaging
    try:
        with pytest.raises(RuntimeError, match=r"arrived damaged \(on rank 1 from ranks \[0\]"):
            sync.push()
    finally:
        tensor_exchange.all_to_all = real
    assert sync.version == 0
    if engine is not None:
        assert engine.weights_version == 0
        assert not any(p.any() for p in engine.model.parameters())
    assert sync.push() == 1
    assert engine is None or any(p.any() for p in engine.model.parameters())


def test_a_push_that_arrives_damaged_leaves_the_old_version():
    run_ranks(damaged_push, 2)


class Dying(dict):
    """Shards of a trainer that dies while it sends them."""

    def __getitem__(self, name):
        os._exit(0)


def dying_world(rank, path):
    store = torch.distributed.FileStore(str(path), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    whole = ParallelContext.build(ParallelConfig())
    ctx = ParallelContext.build(ParallelConfig(), ranks=(rank,))
    if rank == 0:
        run = assembled({}, seed=3, ranks=(0,))
        shards = [model_shards(run), Dying(model_shards(run))]
        EngineSync(whole.world, weights=lambda: shards.pop(0)).push()
    engine = built_engine({}, ctx)
    sync = EngineSync(whole.world, engine=engine)
    with pytest.raises(RuntimeError):
        sync.push()
    number = engine.add([1, 2, 3], GREEDY)
    texts = dict(event for event in engine.run() if isinstance(event, tuple))
    assert texts[number].weights_versions == (0,)
    return 0


def test_an_engine_serves_the_old_version_after_its_trainer_died(tmp_path):
    children = [fork(partial(dying_world, rank, tmp_path / "store")) for rank in range(2)]
    assert [exit_code(child) for child in children] == [0, 0]
