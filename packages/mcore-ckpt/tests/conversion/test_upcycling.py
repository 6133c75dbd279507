"""Dense checkpoints turned into mixtures of experts: the same function at the start."""

import pytest
import torch
from safetensors.torch import load_file

from mcore_ckpt.cli import main
from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.upcycling import UpcycleOptions, upcycle
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.index import read_index
from mcore_ckpt.storage.paths import resolve_folder
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import named_shards

pytest.importorskip("mcore_models")

from mcore_models.config import TransformerConfig
from mcore_models.description import ModelDescription
from mcore_models.gpt import GPT
from mcore_moe.config import MoEConfig

VOCAB = 16
IDS = torch.arange(10).view(2, 5) * 3 % VOCAB
KINDS = {
    "gated": {"swiglu": True},
    "plain with biases": {"swiglu": False, "add_bias_linear": True},
}


def config(**fields):
    return TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, **fields
    )


def model_of(description):
    moe = description.moe
    model = GPT(
        description.config,
        ParallelContext.single("cpu"),
        vocab_size=description.vocab_size,
        dtype=torch.float64,
        **({"moe": moe} if moe.num_experts else {}),
    )
    return model.eval()


def logits(model):
    hidden, _ = model(IDS)
    return hidden


def save_dense(folder, **fields):
    description = ModelDescription(config=config(**fields), vocab_size=VOCAB)
    torch.manual_seed(0)
    model = model_of(description)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    save(
        folder,
        3,
        {f"model.{name}": shard for name, shard in named_shards(model).items()},
        world=SINGLE,
        extra={"model": description.to_dict()},
    )
    return logits(model)


def upcycled_logits(folder):
    step = resolve_folder(folder)
    model = model_of(ModelDescription.from_dict(read_index(step).extra["model"]))
    load(
        step,
        {f"model.{name}": shard for name, shard in named_shards(model).items()},
        world=SINGLE,
    )
    return logits(model), model


@pytest.mark.parametrize(("granularity", "topk"), [(1, 2), (2, 2), (3, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_upcycled_model_computes_what_the_dense_one_did(tmp_path, kind, granularity, topk):
    expected = save_dense(tmp_path / "dense", **KINDS[kind])
    options = UpcycleOptions(
        num_experts=6, moe_router_topk=topk, moe_upcycling_granularity=granularity
    )
    upcycle(tmp_path / "dense", tmp_path / "moe", options)
    result, model = upcycled_logits(tmp_path / "moe")
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    routers = [block.moe.router.weight for block in model.blocks.values()]
    assert all(len(router.unique(dim=0)) == 6 // granularity for router in routers)
    assert not torch.equal(routers[0], routers[1])


@pytest.mark.parametrize("form", ["hf", "megatron"])
def test_a_folder_of_another_format_is_upcycled_as_it_is(tmp_path, form):
    expected = save_dense(
        tmp_path / "dense",
        **KINDS["gated"],
        normalization="RMSNorm",
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
    )
    convert("mcore", tmp_path / "dense", form, tmp_path / form)
    options = UpcycleOptions(num_experts=4)
    upcycle(tmp_path / form, tmp_path / "moe", options)
    result, _ = upcycled_logits(tmp_path / "moe")
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    of_ours = upcycle(tmp_path / "dense", tmp_path / "moe of ours", options)
    theirs = resolve_folder(tmp_path / "moe")
    one, other = (load_file(step / "rank_00000.safetensors") for step in (of_ours, theirs))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_command_upcycles_some_layers_and_refuses_what_cannot_be(tmp_path, capsys, caplog):
    expected = save_dense(tmp_path / "dense", **KINDS["gated"])
    command = ["upcycle", str(tmp_path / "dense"), "--output"]
    flags = ["--num-experts", "4", "--moe-layer-freq", "[0,1]", "--moe-aux-loss-coeff", "0.01"]
    assert main([*command, str(tmp_path / "moe"), *flags]) == 0
    result, model = upcycled_logits(tmp_path / "moe")
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    assert [hasattr(block, "mlp") for block in model.blocks.values()] == [True, False]
    assert model.blocks["1"].moe.router.config == MoEConfig(
        num_experts=4,
        moe_ffn_hidden_size=12,
        moe_layer_freq="[0,1]",
        moe_aux_loss_coeff=0.01,
    )
    uneven = ["--num-experts", "4", "--moe-upcycling-granularity", "2"]
    assert main([*command, str(tmp_path / "uneven"), *uneven, "--moe-router-topk", "3"]) == 0
    assert "not a multiple of --moe-upcycling-granularity 2" in caplog.text
    capsys.readouterr()
    for source, words, complaint in (
        ("moe", ["--num-experts", "4"], "has experts already"),
        ("dense", ["--num-experts", "10", "--moe-upcycling-granularity", "5"], "must divide"),
        ("dense", ["--num-experts", "3", "--moe-upcycling-granularity", "2"], "multiple of"),
        ("dense", ["--num-experts", "2", "--moe-router-topk", "1"], "--moe-router-pre-softmax"),
        ("dense", ["--num-experts", "2", "--moe-layer-freq", "[0,0]"], "selects no layer"),
    ):
        output = tmp_path / "refused"
        assert main(["upcycle", str(tmp_path / source), "--output", str(output), *words]) == 2
        assert complaint in capsys.readouterr().err
        assert not output.exists()


def test_weights_of_a_softmax_over_all_experts_are_scaled_to_the_dense_output(tmp_path):
    expected = save_dense(tmp_path / "dense", **KINDS["gated"])
    options = UpcycleOptions(
        num_experts=4, moe_router_topk=2, moe_router_pre_softmax=True, init_method_std=0.0
    )
    upcycle(tmp_path / "dense", tmp_path / "moe", options)
    torch.testing.assert_close(upcycled_logits(tmp_path / "moe")[0], expected)


@pytest.mark.parametrize(("std", "is_told"), [(0.02, True), (0.0, False)])
def test_weights_over_all_experts_are_told_to_change_the_function(
    tmp_path, caplog, std, is_told
):
    expected = save_dense(tmp_path / "dense", swiglu=True)
    options = UpcycleOptions(num_experts=4, moe_router_pre_softmax=True, init_method_std=std)
    upcycle(tmp_path / "dense", tmp_path / "run", options)
    assert (
        "computes the function of the dense model only approximately" in caplog.text
    ) == is_told
    got, _ = upcycled_logits(tmp_path / "run")
    assert torch.allclose(got, expected) != is_told
