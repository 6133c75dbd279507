"""An optimizer's state goes to Megatron's format and back; half of one is refused."""

from argparse import Namespace
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from mcore_ckpt.cli import main
from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.formats.dcp import read_dcp_folder
from mcore_ckpt.formats.dcp_writing import write_dcp_folder
from mcore_ckpt.formats.megatron import names as megatron_names
from mcore_ckpt.save_load.loading import read_tensor
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.files import Item
from mcore_ckpt.storage.index import read_index
from mcore_parallel.mesh import SINGLE
from mcore_parallel.sharding import Piece, Shard

L, D, N, G, H, F, V, PADDED = 2, 12, 4, 2, 5, 6, 37, 40
SHAPES = {"embedding.weight": (V, D), "final_norm.weight": (D,), "head.weight": (V, D)}
for _layer in range(L):
    SHAPES |= {
        f"blocks.{_layer}.attention_norm.weight": (D,),
        f"blocks.{_layer}.attention.qkv.q.weight": (N * H, D),
        f"blocks.{_layer}.attention.qkv.k.weight": (G * H, D),
        f"blocks.{_layer}.attention.qkv.v.weight": (G * H, D),
        f"blocks.{_layer}.attention.proj.weight": (D, N * H),
        f"blocks.{_layer}.mlp_norm.weight": (D,),
        f"blocks.{_layer}.mlp.fc1.gate.weight": (F, D),
        f"blocks.{_layer}.mlp.fc1.up.weight": (F, D),
        f"blocks.{_layer}.mlp.fc2.weight": (D, F),
    }
DESCRIPTION = {
    "family": "gpt",
    "vocab_size": V,
    "config": {
        "num_layers": L,
        "hidden_size": D,
        "num_attention_heads": N,
        "num_query_groups": G,
        "kv_channels": H,
        "ffn_hidden_size": F,
        "untie_embeddings_and_output_weights": True,
    },
    "moe": {},
}
MOE = {
    "num_experts": 2,
    "moe_ffn_hidden_size": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
PROGRESS = {
    "iteration": 7,
    "num_steps": 6,
    "consumed_train_samples": 56,
    "schedule_samples": 48,
    "schedule": {
        "max_lr": 1e-3,
        "min_lr": 1e-4,
        "warmup_samples": 8,
        "decay_samples": 800,
        "decay_style": "cosine",
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.1,
        "weight_decay_samples": 800,
        "weight_decay_style": "constant",
    },
}
WITH_STATE = ConvertOptions(optimizer=True)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(half, seed=3):
    """Make weights and their state; norms are of 32 bits, the rest of 16 if asked."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in SHAPES.items():
        weight = torch.randn(shape, generator=generator)
        is_half = half and "norm" not in name
        tensors[f"model.{name}"] = weight.bfloat16() if is_half else weight
        if is_half:
            tensors[f"optimizer.main.{name}"] = weight
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{kind}.{name}"] = torch.randn(shape, generator=generator)
    return tensors


def make_run(folder, tensors, **extra):
    shards = {
        name: Shard(tuple(t.shape), t.dtype, (Piece((0,) * t.dim(), tuple(t.shape), t),))
        for name, t in tensors.items()
    }
    everything = {"model": DESCRIPTION, **PROGRESS, "recipe": {"adam_beta2": 0.95}, **extra}
    save(folder, 7, shards, world=SINGLE, extra=everything)


def held(step):
    index = read_index(step)
    return {name: read_tensor(step, name, index=index) for name in index.tensors}


def assert_equal_bitwise(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def loaded_by_torch(folder):
    listed = read_dcp_folder(folder).tensors
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    state = {n: torch.empty(one.shape, dtype=dtypes[one.dtype]) for n, one in listed.items()}
    torch_dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("half", [True, False])
def test_a_state_goes_to_megatron_and_back_bitwise(tmp_path, half):
    before = state_of(half)
    make_run(tmp_path / "run", before)
    convert("mcore", tmp_path / "run", "megatron", tmp_path / "there", WITH_STATE)
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "7"
    there = tmp_path / "there" / "iter_0000007"
    found = loaded_by_torch(there)
    for word, kind in (("param", "main"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        qkv = found[f"optimizer.state.{word}.decoder.layers.self_attention.linear_qkv.weight"]
        groups = qkv[1].view(G, N // G + 2, H, D)
        key = "blocks.1.attention.qkv.k.weight"
        mine = f"optimizer.{kind}.{key}"
        # A weight of 32 bits is its own main weight here, and has an equal one there.
        wanted = before.get(mine, before[f"model.{key}"])
        assert torch.equal(groups[:, -2].reshape(-1, D), wanted), word
        norm = found[f"optimizer.state.{word}.decoder.final_layernorm.weight"]
        own = before.get(f"optimizer.{kind}.final_norm.weight")
        assert torch.equal(norm, before["model.final_norm.weight"] if own is None else own)
        words = found[f"optimizer.state.{word}.embedding.word_embeddings.weight"]
        assert words.shape == (128, D)
        assert not words[V:].any()
    common = read_dcp_folder(there).read_object("common_state/shard_0_1")[0]
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
    assert {(g["step"], g["betas"], g["max_lr"]) for g in groups} == {(6, (0.9, 0.95), 1e-3)}
    assert common["opt_param_scheduler"]["num_steps"] == 48
    report = convert("megatron", tmp_path / "there", "mcore", tmp_path / "back", WITH_STATE)
    assert report.left_behind == 0
    again = tmp_path / "back" / "iter_0000007"
    assert_equal_bitwise(before, held(again))
    extra = read_index(again).extra
    assert {name: extra[name] for name in PROGRESS} == PROGRESS
    assert extra["parallel"] == {}


def test_a_vocabulary_is_cut_in_the_state_too(tmp_path):
    before = state_of(half=True)
    make_run(tmp_path / "run", before)
    options = ConvertOptions(optimizer=True, vocab_size=30)
    convert("mcore", tmp_path / "run", "mcore", tmp_path / "cut", options)
    after = held(tmp_path / "cut" / "iter_0000007")
    for kind in ("model", "optimizer.main", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        name = f"{kind}.embedding.weight"
        assert torch.equal(after[name], before[name][:30])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run's tensors, and the same under Megatron's names."""
    folder = tmp_path_factory.mktemp("plain")
    before = state_of(half=True)
    make_run(folder / "run", before)
    convert("mcore", folder / "run", "megatron", folder / "there", WITH_STATE)
    return before, loaded_by_torch(folder / "there" / "iter_0000007")


def megatrons(folder, plain, common, change=lambda state: None, flat=()):
    """Write Megatron's directory by hand, from a run's tensors; ``flat``: in flat ranges."""
    before, whole = plain
    state = {name: tensor.clone() for name, tensor in whole.items()}
    change(state)
    items = []
    for name, tensor in state.items():
        grid = flat[name.count("decoder.layers")] if flat and "optimizer" in name else None
        if grid is None or tensor.dim() != len(grid):
            items.append(build_item(name, [tensor]))
            continue
        steps = [n // count for n, count in zip(tensor.shape, grid, strict=True)]
        for block in torch.cartesian_prod(*(torch.arange(count) for count in grid)).tolist():
            part = tensor
            for dim, (number, step) in enumerate(zip(block, steps, strict=True)):
                part = part.narrow(dim, number * step, step)
            # Three data ranks' ranges, which end in the middle of rows.
            ranges = part.reshape(-1).tensor_split((7, 20))
            items.append(build_item(f"{name}{block}".replace(" ", ""), ranges))
    (folder / "there").mkdir()
    write_dcp_folder(folder / "there", items, {"common_state/shard_0_1": [common]})
    return before, folder / "there"


def build_item(name, parts):
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    dtype = "BF16" if parts[0].dtype == torch.bfloat16 else "F32"
    return Item(name, dtype, shape, partial(iter, [part for part in parts if part.numel()]))


def common_state(**changes):
    arguments = megatron_names.to_arguments(DESCRIPTION, 128)
    arguments["consumed_train_samples"] = 56
    step = torch.tensor(6.0)
    optimizer = {"optimizer": {"state": {"common_step": step}, "param_groups": []}}
    whole = {"args": Namespace(**arguments), "iteration": 7, "optimizer": optimizer}
    return whole | changes


def test_flat_ranges_of_older_releases_are_put_in_their_places(tmp_path, plain):
    # Rows cut in two, then a layer at a time with rows in two.
    flat = ((2, 1), (2, 2, 1))
    before, there = megatrons(tmp_path, plain, common_state(), flat=flat)
    listed = read_dcp_folder(there).tensors
    qkv = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"
    assert listed[qkv].shape == (2, 2, 1, (N + 2 * G) * H * D // 2)
    convert("megatron", there, "mcore", tmp_path / "ours", WITH_STATE)
    assert_equal_bitwise(before, held(tmp_path / "ours" / "iter_0000007"))


def no_moments(state):
    for name in [name for name in state if name.startswith("optimizer.state.exp_avg_sq.")]:
        del state[name]


def no_moment_of_one(state):
    del state["optimizer.state.exp_avg.decoder.final_layernorm.weight"]


def no_main(state):
    for name in [name for name in state if name.startswith("optimizer.state.param.")]:
        del state[name]


def another_main(state):
    state["optimizer.state.param.decoder.final_layernorm.weight"] += 1


def another_shape(state):
    name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    state[name] = state[name][:-1].clone()


@pytest.mark.parametrize(
    ("change", "common", "message"),
    [
        (no_moments, {}, "dp_zero_gather_scatter.*dist-ckpt-optim-fully-reshardable"),
        (no_moment_of_one, {}, "missing: decoder.final_layernorm.weight"),
        (no_main, {}, r"main is missing for blocks\.0\.attention\.proj\.weight"),
        (another_main, {}, "main weight of decoder.final_layernorm.weight, rounded, differs"),
        (another_shape, {}, "does not fit its weight"),
        (
            lambda _: None,
            {"optimizer": {}},
            "updates for all weights, but has none",
        ),
        (
            lambda _: None,
            {"optimizer": [{"step": 5}, {"step": 6}]},
            "updates for all weights, but has 5, 6",
        ),
        (lambda _: None, {"iteration": None}, "lacks iteration"),
    ],
)
def test_a_state_that_is_not_whole_is_refused(tmp_path, plain, change, common, message):
    _, there = megatrons(tmp_path, plain, common_state(**common), change)
    with pytest.raises(ValueError, match=message):
        convert("megatron", there, "mcore", tmp_path / "ours", WITH_STATE)
    assert not list(tmp_path.glob("ours/iter_*"))


def test_what_holds_no_state_says_so_and_how_to_go_on(tmp_path, capsys):
    tensors = state_of(half=True)
    lone = {name: t for name, t in tensors.items() if name.startswith("model.")}
    make_run(tmp_path / "weights", lone, num_steps=None)
    few = {name: t for name, t in tensors.items() if name != "optimizer.exp_avg_sq.head.weight"}
    make_run(tmp_path / "half", few)
    make_run(tmp_path / "whole", tensors)
    words = ["convert", "mcore-to-megatron", "--output", str(tmp_path / "x"), "--optimizer"]
    for run, more, message in (
        ("weights", [], "holds no optimizer state (num_steps not in its index)"),
        ("half", [], "exp_avg_sq is missing for head.weight"),
        ("whole", ["--dtype", "fp32"], "--dtype fp32 and --optimizer exclude each other"),
    ):
        assert main([*words, "--input", str(tmp_path / run), *more]) == 2
        told = capsys.readouterr().err
        assert message in told
        assert not (tmp_path / "x").exists()
    whole = ["--input", str(tmp_path / "whole"), "--optimizer", "--output", str(tmp_path / "x")]
    assert main(["convert", "mcore-to-hf", *whole]) == 2
    assert "--optimizer converts between mcore and megatron only" in capsys.readouterr().err


def test_the_state_of_experts_comes_in_from_an_optimizer_of_their_own(tmp_path):
    config = {**DESCRIPTION, "moe": MOE}
    shapes = {name: shape for name, shape in SHAPES.items() if ".mlp." not in name}
    for layer in range(L):
        moe = f"blocks.{layer}.moe."
        shapes |= {f"{moe}router.weight": (2, D), f"{moe}router.expert_bias": (2,)}
        for expert in range(2):
            at = f"{moe}experts.{expert}."
            shapes |= {f"{at}fc1.{part}.weight": (4, D) for part in ("gate", "up")}
            shapes[f"{at}fc2.weight"] = (D, 4)
    items, before = [], {}
    # Each kind of state, as if it were weights, under Megatron's names.
    for number, kind in enumerate(("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")):
        generator = torch.Generator().manual_seed(number)
        mine = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        run = tmp_path / f"run{number}"
        make_run(run, {f"model.{name}": t for name, t in mine.items()}, model=config)
        convert("mcore", run, "megatron", tmp_path / f"there{number}")
        word = f"optimizer.state.{kind.removeprefix('optimizer.')}."
        for name, tensor in loaded_by_torch(tmp_path / f"there{number}" / "release").items():
            chained = f"chained_{int('.experts.' in name)}."
            is_state = number > 0 and "expert_bias" not in name
            if number == 0 or is_state:
                there = f"{chained}{word}{name}" if is_state else name
                items.append(build_item(there, [tensor]))
        has = {n: t for n, t in mine.items() if number == 0 or "expert_bias" not in n}
        before |= {f"{kind}.{name}": tensor for name, tensor in has.items()}
    arguments = megatron_names.to_arguments(config, 128) | {"consumed_train_samples": 56}
    groups = {"optimizer": {"param_groups": [{"step": 6}, {"step": 6}]}}
    common = common_state(args=Namespace(**arguments), optimizer={0: groups, 1: groups})
    (tmp_path / "there").mkdir()
    write_dcp_folder(tmp_path / "there", items, {"common_state/shard_0_1": [common]})
    options = ConvertOptions(optimizer=True, vocab_size=V)
    report = convert("megatron", tmp_path / "there", "mcore", tmp_path / "ours", options)
    assert report.left_behind == 0
    assert_equal_bitwise(before, held(tmp_path / "ours" / "iter_0000007"))
    for apart in (False, True):
        options = ConvertOptions(optimizer=True, experts_apart=apart)
        back = tmp_path / f"back{apart}"
        convert("mcore", tmp_path / "ours", "megatron", back, options)
        convert("megatron", back, "mcore", tmp_path / f"again{apart}", WITH_STATE)
        assert_equal_bitwise(before, held(tmp_path / f"again{apart}" / "iter_0000007"))
        there = read_dcp_folder(back / "iter_0000007")
        optimizer = there.read_object("common_state/shard_0_1")[0]["optimizer"]
        owners = [optimizer[number] for number in (0, 1)] if apart else [optimizer]
        groups = [group for owner in owners for group in owner["optimizer"]["param_groups"]]
        wanted = [False, False, True, True] if apart else [False, False]
        assert [group["is_expert_parallel"] for group in groups] == wanted


def test_experts_of_their_own_are_refused_where_there_are_none(tmp_path):
    make_run(tmp_path / "run", state_of(half=True))
    options = ConvertOptions(optimizer=True, experts_apart=True)
    with pytest.raises(ValueError, match="--experts-apart applies to the optimizer's state"):
        convert("mcore", tmp_path / "run", "megatron", tmp_path / "there", options)


def test_old_files_are_refused_before_they_are_read(tmp_path):
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "old" / "mp_rank_00" / "model_optim_rng.pt").touch()
    with pytest.raises(ValueError, match="old format, whose optimizer state has no names"):
        convert("megatron", tmp_path / "old", "mcore", tmp_path / "ours", WITH_STATE)
