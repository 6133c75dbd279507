"""From every format to every other, bit by bit; foreign pickles are data and never run."""

import json
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.inspection import describe as describe_folder
from mcore_ckpt.conversion.inspection import differences, rows
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.dcp import read_dcp_folder
from mcore_ckpt.formats.torch_files import read_torch_file
from mcore_ckpt.save_load.loading import read_tensor
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.index import read_index
from mcore_parallel.mesh import SINGLE
from mcore_parallel.sharding import Piece, Shard

# Heads x head dim is not the hidden size; nothing divides anything.
L, D, N, G, H, F, V, E = 3, 14, 6, 2, 10, 11, 37, 4

DENSE = {
    "num_layers": L,
    "hidden_size": D,
    "num_attention_heads": N,
    "num_query_groups": G,
    "kv_channels": H,
    "ffn_hidden_size": F,
    "max_position_embeddings": 19,
    "untie_embeddings_and_output_weights": True,
}
MOE = {"num_experts": E, "moe_router_topk": 2, "moe_ffn_hidden_size": 9}
MODELS = {
    "dense": (DENSE, {}),
    "tied, biases on queries": (
        DENSE | {"untie_embeddings_and_output_weights": False, "add_qkv_bias": True},
        {},
    ),
    "layer norms and biases": (
        DENSE
        | {"normalization": "LayerNorm", "add_bias_linear": True, "swiglu": False}
        | {"openai_gelu": True, "position_embedding_type": "learned_absolute"},
        {},
    ),
    "experts": (DENSE | {"qk_layernorm": True}, MOE),
    "experts in some layers, one shared": (
        DENSE,
        MOE
        | {"moe_layer_freq": "[0]*1+[1]*2", "moe_shared_expert_intermediate_size": 8}
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    ),
}


def describe(name):
    config, moe = MODELS[name]
    return {"family": "gpt", "vocab_size": V, "config": dict(config), "moe": dict(moe)}


def shapes_of(description):
    """List a model's logical tensors; written out here, apart from any table."""
    config, moe = description["config"], description["moe"]
    norm_bias = config.get("normalization") == "LayerNorm"
    biased = config.get("add_bias_linear")
    shapes = {"embedding.weight": (V, D)}
    if config.get("position_embedding_type") == "learned_absolute":
        shapes["position_embedding.weight"] = (19, D)

    def norm(name, size=D):
        shapes[f"{name}.weight"] = (size,)
        if norm_bias:
            shapes[f"{name}.bias"] = (size,)

    def linear(name, out, width, bias):
        shapes[f"{name}.weight"] = (out, width)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def mlp(name, width, bias):
        parts = ("fc1.gate", "fc1.up") if config.get("swiglu", True) else ("fc1",)
        for part in parts:
            linear(f"{name}.{part}", width, D, bias)
        linear(f"{name}.fc2", D, width, bias)

    for layer in range(L):
        block = f"blocks.{layer}"
        norm(f"{block}.attention_norm")
        norm(f"{block}.mlp_norm")
        for part, heads in (("q", N), ("k", G), ("v", G)):
            bias = biased or config.get("add_qkv_bias")
            linear(f"{block}.attention.qkv.{part}", heads * H, D, bias)
        linear(f"{block}.attention.proj", D, N * H, biased)
        if config.get("qk_layernorm"):
            norm(f"{block}.attention.q_norm", H)
            norm(f"{block}.attention.k_norm", H)
        if not moe or (layer == 0 and "moe_layer_freq" in moe):
            mlp(f"{block}.mlp", F, biased)
            continue
        shapes[f"{block}.moe.router.weight"] = (E, D)
        if moe.get("moe_router_enable_expert_bias"):
            shapes[f"{block}.moe.router.expert_bias"] = (E,)
        for expert in range(E):
            mlp(f"{block}.moe.experts.{expert}", 9, biased)
        if moe.get("moe_shared_expert_intermediate_size"):
            mlp(f"{block}.moe.shared", 8, False)
    norm("final_norm")
    if config.get("untie_embeddings_and_output_weights"):
        shapes["head.weight"] = (V, D)
    return shapes


def make_run(folder, name, dtype=torch.float32):
    """Save a model as a run folder of ours; return its tensors by logical name."""
    description = describe(name)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes_of(description).items()
    }
    shards = {
        f"model.{name}": Shard(
            tuple(t.shape), t.dtype, (Piece((0,) * t.dim(), tuple(t.shape), t),)
        )
        for name, t in tensors.items()
    }
    save(folder, 5, shards, world=SINGLE, extra={"model": description})
    return tensors


def tensors_of(run):
    step = run / "release"
    index = read_index(step)
    return {
        name.removeprefix("model."): read_tensor(step, name, index=index)
        for name in index.tensors
    }


def assert_equal_bitwise(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def by_default(*values, rest):
    """Parameters of which some are for the long run."""
    return [*values, *(pytest.param(*one, marks=pytest.mark.parity_long) for one in rest)]


# Each format and each model at least once by default; Megatron's rules are the richer ones.
@pytest.mark.parametrize(
    ("form", "name"),
    by_default(
        ("megatron", "layer norms and biases"),
        ("megatron", "experts in some layers, one shared"),
        ("dcp", "tied, biases on queries"),
        ("dcp", "experts"),
        rest=[
            *(("megatron", name) for name in ("dense", "tied, biases on queries", "experts")),
            *(("dcp", name) for name in ("dense", "layer norms and biases")),
            ("dcp", "experts in some layers, one shared"),
        ],
    ),
)
def test_a_model_survives_the_way_to_a_format_and_back_bitwise(tmp_path, name, form):
    before = make_run(tmp_path / "run", name)
    there = convert("mcore", tmp_path / "run", form, tmp_path / "there")
    back = convert(form, tmp_path / "there", "mcore", tmp_path / "again")
    assert_equal_bitwise(before, tensors_of(tmp_path / "again"))
    assert there.is_proven
    assert there.fingerprint == back.fingerprint
    assert there.num_tensors == back.num_tensors == len(before)
    assert read_index(tmp_path / "again" / "release").extra["model"] == describe(name)


@pytest.mark.parametrize("name", by_default("dense", rest=[("experts",)]))
def test_one_fingerprint_goes_round_through_all_formats_and_files_of_any_size(tmp_path, name):
    before = make_run(tmp_path / "mcore", name, torch.bfloat16)
    small_files = ConvertOptions(max_shard_size="3000")
    prints = set()
    for source, target in (
        ("mcore", "hf"),
        ("hf", "megatron"),
        ("megatron", "dcp"),
        ("dcp", "hf2"),
        ("hf2", "dcp2"),
        ("dcp2", "megatron2"),
        ("megatron2", "hf3"),
        ("hf3", "mcore2"),
        ("mcore2", "mcore3"),
    ):
        report = convert(
            source.rstrip("23"),
            tmp_path / source,
            target.rstrip("23"),
            tmp_path / target,
            None if target.startswith("mcore") else small_files,
        )
        prints.add(report.fingerprint)
    assert len(prints) == 1
    assert_equal_bitwise(before, tensors_of(tmp_path / "mcore3"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 3
    assert len(list((tmp_path / "hf3").glob("*.safetensors"))) > 3


def test_checkpoints_of_any_format_are_shown_and_compared(tmp_path, capsys):
    from mcore_ckpt.cli import main

    make_run(tmp_path / "mcore", "dense")
    unproven = ConvertOptions(verify=False)
    for form in ("hf", "megatron", "dcp"):
        convert("mcore", tmp_path / "mcore", form, tmp_path / form, unproven)
        assert main(["inspect", str(tmp_path / form)]) == 0
        assert f"({form})" in capsys.readouterr().out
        words = [str(tmp_path / "mcore"), "--compare", str(tmp_path / form)]
        assert main(["inspect", *words]) == 0
        assert "no difference" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "megatron"), "--as-json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["decoder.layers.mlp.linear_fc2.weight"]["layout"] == f"{L} x 1 x 1"
    make_run(tmp_path / "tied", "tied, biases on queries")
    words = [str(tmp_path / "tied"), "--compare", str(tmp_path / "hf")]
    assert main(["inspect", *words]) == 1
    shown = capsys.readouterr().out
    assert "blocks.0.attention.qkv.q.bias" in shown
    assert "head.weight" in shown


def loaded_by_torch(folder, dtype=torch.float32):
    listed = read_dcp_folder(folder).tensors
    state = {name: torch.empty(one.shape, dtype=dtype) for name, one in listed.items()}
    torch_dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_the_directories_that_are_written(tmp_path):
    before = make_run(tmp_path / "run", "dense")
    convert("mcore", tmp_path / "run", "dcp", tmp_path / "dcp")
    found = loaded_by_torch(tmp_path / "dcp")
    assert_equal_bitwise({f"model.{n}": t for n, t in before.items()}, found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatrons_tensors_hold_layers_groups_and_experts_where_it_looks_for_them(tmp_path):
    before = make_run(tmp_path / "run", "experts")
    convert("mcore", tmp_path / "run", "megatron", tmp_path / "there")
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "release"
    form = json.loads((tmp_path / "there" / "release" / "metadata.json").read_text())
    assert form == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    found = loaded_by_torch(tmp_path / "there" / "release")
    word = found["embedding.word_embeddings.weight"]
    assert word.shape == (128, D)
    assert torch.equal(word[:V], before["embedding.weight"])
    assert not word[V:].any()
    qkv = found["decoder.layers.self_attention.linear_qkv.weight"]
    assert qkv.shape == (L, (N + 2 * G) * H, D)
    # Of each group its queries, then its key, then its value.
    by_group = qkv[1].view(G, N // G + 2, H, D)
    own = "blocks.1.attention.qkv"
    assert torch.equal(by_group[:, : N // G].reshape(-1, D), before[f"{own}.q.weight"])
    assert torch.equal(by_group[:, -2].reshape(-1, D), before[f"{own}.k.weight"])
    assert torch.equal(by_group[:, -1].reshape(-1, D), before[f"{own}.v.weight"])
    fc1 = found["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert fc1.shape == (L, E, 18, D)
    assert torch.equal(fc1[2, 3, :9], before["blocks.2.moe.experts.3.fc1.gate.weight"])
    assert torch.equal(fc1[2, 3, 9:], before["blocks.2.moe.experts.3.fc1.up.weight"])
    assert "decoder.layers.pre_mlp_layernorm.weight" in found


def test_arguments_of_megatrons_say_which_model_it_is(tmp_path):
    from mcore_ckpt.formats.megatron.names import from_arguments, to_arguments

    for name in MODELS:
        description = describe(name)
        again = from_arguments(to_arguments(description, 128))
        assert again["vocab_size"] == V
        for part in ("config", "moe"):
            wanted = description[part]
            found = {key: again[part][key] for key in wanted}
            if "moe_layer_freq" in wanted:
                assert found.pop("moe_layer_freq") == "[0,1,1]"
                wanted.pop("moe_layer_freq")
            assert found == wanted, name
    with pytest.raises(ValueError, match="trained with --mtp-num-layers 1"):
        from_arguments({"mtp_num_layers": 1})
    with pytest.raises(ValueError, match="lack hidden_size: give --config"):
        from_arguments({"num_layers": 2})


def test_the_fused_gelu_of_megatrons_is_the_approximation_by_tanh():
    from mcore_ckpt.formats.megatron.names import from_arguments, to_arguments

    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    sizes |= {"padded_vocab_size": 64}
    fused = sizes | {"bias_gelu_fusion": True, "add_bias_linear": True}
    assert from_arguments(fused)["config"]["openai_gelu"]
    for other in ({"bias_gelu_fusion": False}, {"add_bias_linear": False}, {"swiglu": True}):
        assert not from_arguments(fused | other)["config"].get("openai_gelu")
    for name in (True, False):
        like = {"swiglu": False, "add_bias_linear": True, "openai_gelu": name}
        arguments = to_arguments(describe("dense") | {"config": DENSE | like}, 128)
        assert arguments["bias_gelu_fusion"] == name
        assert from_arguments(arguments)["config"]["openai_gelu"] == name


@pytest.mark.parametrize(
    "said",
    [
        {"no_rope_freq": [0, 1]},
        {"qk_l2_norm": True},
        {"apply_residual_connection_post_layernorm": True},
        {"position_embedding_type": "mrope"},
    ],
)
def test_arguments_that_change_numbers_and_have_no_flag_here_are_refused(said):
    from mcore_ckpt.formats.megatron.names import from_arguments

    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    flag = "--" + next(iter(said)).replace("_", "-")
    with pytest.raises(ValueError, match=f"trained with {flag} .*cannot be converted"):
        from_arguments(sizes | {"padded_vocab_size": 64} | said)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_with_hugging_face_names_comes_in_under_any_prefix(tmp_path):
    before = make_run(tmp_path / "run", "dense")
    out = ConvertOptions(dcp_names="hf")
    convert("mcore", tmp_path / "run", "dcp", tmp_path / "plain", out)
    state = {f"app.{n}": t for n, t in loaded_by_torch(tmp_path / "plain").items()}
    beside = {"optimizer.state.app.exp_avg": torch.ones(3), "train_state": {"step": 7}}
    torch_dcp.save(state | beside, checkpoint_id=tmp_path / "deep", no_dist=True)
    (tmp_path / "model.json").write_text(json.dumps(describe("dense")))
    options = ConvertOptions(config=str(tmp_path / "model.json"))
    report = convert("dcp", tmp_path / "deep", "mcore", tmp_path / "again", options)
    assert_equal_bitwise(before, tensors_of(tmp_path / "again"))
    assert report.left_behind == 2
    with pytest.raises(ValueError, match="does not name its model: give --config"):
        convert("dcp", tmp_path / "deep", "mcore", tmp_path / "x")
    # The shortest name is one that the prefix is found by.
    for name in ("app.model.layers.1.mlp.up_proj.weight", min(state, key=len)):
        less = {key: tensor for key, tensor in state.items() if key != name}
        torch_dcp.save(less, checkpoint_id=tmp_path / name, no_dist=True)
        with pytest.raises(ValueError, match=f"missing: {name.removeprefix('app.')}"):
            convert("dcp", tmp_path / name, "mcore", tmp_path / "x", options)


def test_a_vocabulary_is_cut_and_filled_up(tmp_path):
    before = make_run(tmp_path / "run", "dense")
    wide = ConvertOptions(vocab_size=48)
    convert("mcore", tmp_path / "run", "hf", tmp_path / "wide", wide)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["vocab_size"] == 48
    narrow = ConvertOptions(vocab_size=V)
    convert("hf", tmp_path / "wide", "mcore", tmp_path / "again", narrow)
    assert_equal_bitwise(before, tensors_of(tmp_path / "again"))
    # Megatron's padding is no part of the model, and is cut by what its arguments say.
    convert("mcore", tmp_path / "run", "megatron", tmp_path / "padded")
    convert("megatron", tmp_path / "padded", "hf", tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["vocab_size"] == V


def quantized(folder, block=(4, 8)):
    """Turn a Hugging Face folder's linears into fp8 with block scales; return both sides."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    wide = {}
    for name, weight in list(tensors.items()):
        if "_proj" not in name:
            wide[name] = weight
            continue
        rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
        scale = torch.rand(rows, columns) + 0.5
        small = weight.to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = small, scale
        full = torch.empty(weight.shape)
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                full[i, j] = small[i, j].float() * scale[i // block[0], j // block[1]]
        wide[name] = full.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return wide


def test_fp8_in_blocks_is_dequantized_and_other_quantizations_are_refused(tmp_path):
    make_run(tmp_path / "run", "dense", torch.bfloat16)
    convert("mcore", tmp_path / "run", "hf", tmp_path / "hf")
    wide = quantized(tmp_path / "hf")
    convert("hf", tmp_path / "hf", "mcore", tmp_path / "again")
    found = tensors_of(tmp_path / "again")
    for layer in range(L):
        there = f"model.layers.{layer}"
        assert torch.equal(
            found[f"blocks.{layer}.mlp.fc2.weight"], wide[f"{there}.mlp.down_proj.weight"]
        )
        assert torch.equal(
            found[f"blocks.{layer}.attention.qkv.k.weight"],
            wide[f"{there}.self_attn.k_proj.weight"],
        )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [8, 8]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"_scale_inv must be \[\d+, \d+\] for blocks of \[8, 8\]"
    ):
        convert("hf", tmp_path / "hf", "mcore", tmp_path / "x")
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"names packed weights \(qweight\), but the folder has none"
    ):
        convert("hf", tmp_path / "hf", "mcore", tmp_path / "x")


class Bomb:
    """Runs a function of ours when unpickled by a reader that executes."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_compressed_pickle_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1 << 24))
    with pytest.raises(CheckpointError, match=r"has data\.pkl compressed"):
        read_torch_file(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_containers_that_share_parts_are_walked_once(tmp_path, zipped):
    nested = [torch.ones(2)]
    for _ in range(60):
        nested = [nested, (nested, nested)]
    path = tmp_path / "pytorch_model.bin"
    torch.save(nested, path, _use_new_zipfile_serialization=zipped)
    found = read_torch_file(path)
    assert found[0] is found[1][0]


def test_a_malicious_pickle_is_refused_by_name_and_never_executed(tmp_path):
    struck = tmp_path / "struck"
    pickle.loads(pickle.dumps(Bomb(struck))).close()
    assert struck.exists(), "the bomb is a dud"
    struck.unlink()
    make_run(tmp_path / "run", "dense")
    convert("mcore", tmp_path / "run", "megatron", tmp_path / "there")
    step = tmp_path / "there" / "release"
    metadata = (step / ".metadata").read_bytes()
    refused = pytest.raises(
        RuntimeError, match=r"the name (io|_io|builtins)\.open.*not on the list"
    )

    def attempt(form, folder):
        with refused:
            convert(form, folder, "mcore", tmp_path / "x")
        assert not struck.exists()
        assert not (tmp_path / "x").exists()

    (step / ".metadata").write_bytes(pickle.dumps({"a": Bomb(struck)}))
    attempt("megatron", tmp_path / "there")
    attempt("dcp", step)
    (step / ".metadata").write_bytes(metadata)
    torch.save([Bomb(struck)], step / "common.pt")
    attempt("megatron", tmp_path / "there")
    for zipped in (True, False):
        rank = tmp_path / f"legacy{zipped}" / "mp_rank_00"
        rank.mkdir(parents=True)
        torch.save(
            {"model": Bomb(struck)},
            rank / "model_optim_rng.pt",
            _use_new_zipfile_serialization=zipped,
        )
        attempt("megatron", rank.parent)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damaged_and_odd_directories_are_refused_by_name(tmp_path):
    make_run(tmp_path / "run", "dense")
    convert("mcore", tmp_path / "run", "dcp", tmp_path / "dcp")
    metadata = (tmp_path / "dcp" / ".metadata").read_bytes()
    (tmp_path / "dcp" / ".metadata").write_bytes(metadata[:-40])
    with pytest.raises(RuntimeError, match="damaged pickle"):
        convert("dcp", tmp_path / "dcp", "mcore", tmp_path / "x")
    (tmp_path / "dcp" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"holds no \.metadata"):
        convert("dcp", tmp_path / "dcp", "mcore", tmp_path / "x")
    (tmp_path / "dcp" / ".metadata").write_bytes(metadata)
    file = tmp_path / "dcp" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(RuntimeError, match="ends before byte"):
        convert("dcp", tmp_path / "dcp", "mcore", tmp_path / "x")
    state = {"model.embedding.weight": torch.randn(5, 4).t()}
    torch_dcp.save(state, checkpoint_id=tmp_path / "turned", no_dist=True)
    folder = read_dcp_folder(tmp_path / "turned")
    with pytest.raises(RuntimeError, match="is not contiguous"):
        folder.locate(state)


# Old files of Megatron's.


def legacy_qkv(before, layer, kind, version, ranks):
    """Fuse queries, keys and values as a version of the old format did, one shard a rank."""
    parts = [before[f"blocks.{layer}.attention.qkv.{p}.{kind}"] for p in "qkv"]
    rest = parts[0].shape[1:]
    by_head = torch.stack([p.unflatten(0, (N, -1)) for p in parts])  # [3, N, H, ...]
    shards = []
    for rank in range(ranks):
        mine = by_head[:, rank * N // ranks : (rank + 1) * N // ranks]
        if version == 0:
            fused = mine
        elif version == 1.0:
            fused = mine.movedim(0, 2)  # [N, H, 3, ...]
        else:
            fused = mine.movedim(0, 1)  # [N, 3, H, ...]
        shards.append(fused.reshape(-1, *rest).clone())
    return shards


def legacy_layers(before, version, ranks, rank, layers, old):
    """Name one rank's layers as the old format does."""
    attention = "attention" if old else "self_attention"
    found = OrderedDict()
    for number, layer in enumerate(layers):
        own, there = f"blocks.{layer}.", f"layers.{number}."
        for kind in ("weight", "bias"):
            found[f"{there}input_layernorm.{kind}"] = before[f"{own}attention_norm.{kind}"]
            found[f"{there}post_attention_layernorm.{kind}"] = before[f"{own}mlp_norm.{kind}"]
            qkv = legacy_qkv(before, layer, kind, version, ranks)[rank]
            found[f"{there}{attention}.query_key_value.{kind}"] = qkv
            fc1 = before[f"{own}mlp.fc1.{kind}"].chunk(ranks)[rank]
            found[f"{there}mlp.dense_h_to_4h.{kind}"] = fc1.clone()
        for name, mine in (
            (f"{attention}.dense", "attention.proj"),
            ("mlp.dense_4h_to_h", "mlp.fc2"),
        ):
            columns = before[f"{own}{mine}.weight"].chunk(ranks, dim=1)[rank]
            found[f"{there}{name}.weight"] = columns.clone()
            found[f"{there}{name}.bias"] = before[f"{own}{mine}.bias"]
    return found


def legacy_state(before, version, ranks, rank, stages, stage, old):
    layers = range(4)[stage * 4 // stages : (stage + 1) * 4 // stages]
    body = legacy_layers(before, version, ranks, rank, layers, old)
    model = {}
    if stage == stages - 1:
        for kind in ("weight", "bias"):
            body[f"final_layernorm.{kind}"] = before[f"final_norm.{kind}"]
    model["transformer" if old else "encoder"] = body
    word = torch.cat((before["embedding.weight"], torch.full((3, 12), 9.0)))
    if stage == 0:
        shard = word.chunk(ranks)[rank].clone()
        model["embedding"] = {
            "word_embeddings": {"weight": shard},
            "position_embeddings": {"weight": before["position_embedding.weight"]},
        }
    return {"language_model": model}


def legacy_model(H=H):
    generator = torch.Generator().manual_seed(8)
    shapes = {"embedding.weight": (V, 12), "position_embedding.weight": (19, 12)}
    for layer in range(4):
        own = f"blocks.{layer}."
        shapes |= {f"{own}attention.qkv.{p}.weight": (N * H, 12) for p in "qkv"}
        shapes |= {f"{own}attention.qkv.{p}.bias": (N * H,) for p in "qkv"}
        shapes |= {
            f"{own}attention.proj.weight": (12, N * H),
            f"{own}attention.proj.bias": (12,),
        }
        shapes |= {f"{own}mlp.fc1.weight": (22, 12), f"{own}mlp.fc1.bias": (22,)}
        shapes |= {f"{own}mlp.fc2.weight": (12, 22), f"{own}mlp.fc2.bias": (12,)}
        for kind in ("weight", "bias"):
            shapes |= {f"{own}attention_norm.{kind}": (12,), f"{own}mlp_norm.{kind}": (12,)}
    shapes |= {"final_norm.weight": (12,), "final_norm.bias": (12,)}
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def arguments(**more):
    from argparse import Namespace

    return Namespace(
        num_layers=4,
        hidden_size=12,
        num_attention_heads=N,
        ffn_hidden_size=22,
        max_position_embeddings=19,
        padded_vocab_size=40,
        **more,
    )


@pytest.mark.parametrize(
    ("version", "ranks", "stages", "zipped"),
    [
        pytest.param(0, 1, 1, False, marks=pytest.mark.parity_long),
        (0, 2, 1, False),
        (1.0, 2, 2, True),
        (2.0, 2, 1, True),
        pytest.param(3.0, 1, 2, True, marks=pytest.mark.parity_long),
    ],
)
def test_gpt_of_old_files_comes_in_whatever_its_version_and_ranks(
    tmp_path, version, ranks, stages, zipped
):
    before = legacy_model()
    step = tmp_path / "old" / "iter_0000007"
    for rank in range(ranks):
        for stage in range(stages):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            state = {
                "args": arguments(kv_channels=H, tensor_model_parallel_size=ranks),
                "iteration": 7,
                "model": legacy_state(before, version, ranks, rank, stages, stage, version < 3),
                "optimizer": {"state": [torch.ones(3)]},
            }
            if version:
                state["checkpoint_version"] = version
            (step / name).mkdir(parents=True)
            file = step / name / "model_optim_rng.pt"
            torch.save(state, file, _use_new_zipfile_serialization=zipped)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("7")
    options = ConvertOptions(vocab_size=V)
    convert("megatron", tmp_path / "old", "mcore", tmp_path / "again", options)
    assert_equal_bitwise(before, tensors_of(tmp_path / "again"))
    description = read_index(tmp_path / "again" / "release").extra["model"]
    assert description["config"]["openai_gelu"]
    assert description["config"]["normalization"] == "LayerNorm"


def test_old_files_without_arguments_are_listed_and_converted_with_a_config(tmp_path):
    before = legacy_model()
    model = legacy_state(before, 0, 1, 0, 1, 0, True)
    for name, more in (("told", {"args": arguments(kv_channels=H)}), ("mute", {})):
        (tmp_path / name / "mp_rank_00").mkdir(parents=True)
        torch.save({"model": model, **more}, tmp_path / name / "mp_rank_00" / "model_rng.pt")
    options = ConvertOptions(vocab_size=V)
    convert("megatron", tmp_path / "told", "mcore", tmp_path / "run", options)
    config = tmp_path / "model.json"
    extra = read_index(tmp_path / "run" / "release").extra
    config.write_text(json.dumps(extra["model"]))
    for work in (rows, describe_folder):
        with pytest.raises(ValueError, match="no arguments of Megatron: give --config"):
            work(tmp_path / "mute")
    assert rows(tmp_path / "mute", str(config)) == rows(tmp_path / "told")
    assert "(megatron)" in describe_folder(tmp_path / "mute", str(config))
    asked = ConvertOptions(config=str(config))
    convert("megatron", tmp_path / "mute", "mcore", tmp_path / "again", asked)
    assert_equal_bitwise(before, tensors_of(tmp_path / "again"))
    assert differences(tmp_path / "mute", tmp_path / "run", str(config)) == []


def test_bert_of_old_files_comes_in_and_goes_on_to_hugging_face(tmp_path):
    from mcore_ckpt.formats.hf_folder import read_hf_folder

    before = legacy_model(H=2)
    generator = torch.Generator().manual_seed(9)
    extra = {
        "tokentype_embedding.weight": (2, 12),
        "lm_head.bias": (40,),
        **{f"{n}.bias": (12,) for n in ("lm_head.dense", "lm_head.norm", "pooler.dense")},
        "lm_head.dense.weight": (12, 12),
        "lm_head.norm.weight": (12,),
        "pooler.dense.weight": (12, 12),
        "binary_head.weight": (2, 12),
        "binary_head.bias": (2,),
    }
    more = {n: torch.randn(shape, generator=generator) for n, shape in extra.items()}
    model = legacy_state(before, 0, 1, 0, 1, 0, True)
    language = model["language_model"]
    language["embedding"]["tokentype_embeddings"] = {
        "weight": more["tokentype_embedding.weight"]
    }
    language["pooler"] = {f"dense.{k}": more[f"pooler.dense.{k}"] for k in ("weight", "bias")}
    model["lm_head"] = OrderedDict(
        {"bias": more["lm_head.bias"]}
        | {f"dense.{k}": more[f"lm_head.dense.{k}"] for k in ("weight", "bias")}
        | {f"layernorm.{k}": more[f"lm_head.norm.{k}"] for k in ("weight", "bias")}
    )
    model["binary_head"] = {k: more[f"binary_head.{k}"] for k in ("weight", "bias")}
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    state = {"args": arguments(kv_channels=2), "model": model, "iteration": 1}
    torch.save(
        state,
        tmp_path / "old" / "mp_rank_00" / "model_optim_rng.pt",
        _use_new_zipfile_serialization=False,
    )
    options = ConvertOptions(vocab_size=V)
    convert("megatron", tmp_path / "old", "mcore", tmp_path / "again", options)
    found = tensors_of(tmp_path / "again")
    wanted = before | more | {"lm_head.bias": more["lm_head.bias"][:V]}
    assert_equal_bitwise(wanted, found)
    convert("mcore", tmp_path / "again", "hf", tmp_path / "hf")
    folder = read_hf_folder(tmp_path / "hf")
    assert folder.config["model_type"] == "megatron-bert"
    assert "bert.encoder.layer.3.attention.self.query.weight" in folder.tensors


def test_missing_ranks_of_old_files_are_named(tmp_path):
    before = legacy_model()
    for rank in (0, 2):
        folder = tmp_path / "old" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        state = {"args": arguments(), "model": legacy_state(before, 0, 1, 0, 1, 0, True)}
        torch.save(state, folder / "model_optim_rng.pt")
    with pytest.raises(RuntimeError, match="holds 2 ranks of 3 x 1 x 1"):
        convert("megatron", tmp_path / "old", "mcore", tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("dense", "decoder.layers.mlp.linear_fc1._extra_state/shard_2_3"),
        ("experts", "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_2.3_3.4"),
        (
            "experts in some layers, one shared",
            "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_3_4",
        ),
    ],
)
def test_megatrons_layers_find_the_state_that_they_ask_for_beside_weights(name, wanted):
    from mcore_ckpt.formats.megatron.names import extra_states, table

    names = extra_states(table(describe(name), 128))
    assert wanted in names
    assert len(names) == len(set(names))
    mixed = "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1"
    alike = "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3"
    assert (mixed if "some" in name else alike) in names
    assert not any("output_layer" in one or "layer_norm" in one for one in names)
