"""Nameless buckets give the state that named tensors give, or are refused: never another."""

from argparse import Namespace
from functools import partial

import pytest
import torch

from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.formats.dcp_writing import write_dcp_folder
from mcore_ckpt.formats.megatron.layout import Order, Weight, bucket_starts
from mcore_ckpt.save_load.loading import read_tensor
from mcore_ckpt.storage.files import Item
from mcore_ckpt.storage.index import read_index

L, D, N, G, H, F, E, V = 2, 8, 4, 2, 6, 10, 2, 64
WORDS = ("param", "exp_avg", "exp_avg_sq")
WITH_STATE = ConvertOptions(optimizer=True)
MATRICES = {
    "self_attention.linear_proj.weight": (D, N * H),
    "self_attention.linear_qkv.weight": ((N + 2 * G) * H, D),
    "mlp.linear_fc1.weight": (2 * F, D),
    "mlp.linear_fc2.weight": (D, F),
    "mlp.router.weight": (E, D),
}
EXPERT = "mlp.experts.experts.linear_fc"
SHAPES = MATRICES | {f"{EXPERT}1.weight": (2 * F, D), f"{EXPERT}2.weight": (D, F)}
QKV_NORM = "self_attention.linear_qkv.layer_norm_weight"
# What Megatron's modules make, in their order: with layers of Transformer Engine, and without.
DENSE = (
    "self_attention.linear_proj.weight",
    QKV_NORM,
    "self_attention.linear_qkv.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
LOCAL = (QKV_NORM, *(name for name in DENSE if name != QKV_NORM))
SPARSE = (*DENSE[:3], "pre_mlp_layernorm.weight", "mlp.router.weight")
BY_MATRIX = (*SPARSE, *(f"{EXPERT}{m}.weight[{e}]" for m in (1, 2) for e in range(E)))
BY_EXPERT = (*SPARSE, *(f"{EXPERT}{m}.weight[{e}]" for e in range(E) for m in (1, 2)))


def weights_in_order(layer_names):
    """Name every weight as files do; a layer's number is the first index."""
    found = ["embedding.word_embeddings.weight"]
    for layer in range(L):
        for name in layer_names:
            stem, _, expert = name.partition("[")
            index = f"[{layer},{expert}" if expert else f"[{layer}]"
            found.append(f"decoder.layers.{stem}{index}")
    return [*found, "decoder.final_layernorm.weight", "output_layer.weight"]


def shape_of(name):
    stem = name.partition("[")[0].removeprefix("decoder.layers.")
    return SHAPES.get(stem, (V, D) if "layernorm" not in stem and "norm" not in stem else (D,))


def local_part(name, tensor, rank, count):
    """Cut what a rank of tensor parallelism has out of a weight."""
    if any(word in name for word in ("linear_proj", "linear_fc2")):
        return tensor.chunk(count, 1)[rank]
    if "linear_fc1.weight" in name:
        return torch.cat([half.chunk(count)[rank] for half in tensor.chunk(2)])
    if any(word in name for word in ("linear_qkv.weight", "embeddings", "output_layer")):
        return tensor.chunk(count)[rank]
    return tensor


def flat_buckets(parts, limit):
    """Lay parts into memory, the last first, each from a multiple of 64 elements."""
    buckets = [torch.empty(0)]
    for part in reversed(parts):
        if buckets[-1].numel() >= limit:
            buckets.append(torch.empty(0))
        gap = torch.full((-buckets[-1].numel() % 64,), torch.nan)
        buckets[-1] = torch.cat([buckets[-1], gap, part.reshape(-1)])
    return buckets


def build_item(name, parts):
    dtype = "BF16" if parts[0].dtype == torch.bfloat16 else "F32"
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Item(name, dtype, shape, partial(iter, [part for part in parts if part.numel()]))


def make_state(layer_names, seed=5):
    generator = torch.Generator().manual_seed(seed)
    names = weights_in_order(layer_names)
    return {
        word: {name: torch.randn(shape_of(name), generator=generator) for name in names}
        for word in WORDS
    }


def write(folder, state, items, objects, tp, ep=1):
    """Write a step of Megatron's, its weights beside other items."""
    arguments = Namespace(
        num_layers=L,
        hidden_size=D,
        num_attention_heads=N,
        num_query_groups=G,
        group_query_attention=True,
        kv_channels=H,
        ffn_hidden_size=F,
        max_position_embeddings=16,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        vocab_size=V,
        padded_vocab_size=V,
        num_experts=E if any("router" in name for name in state["param"]) else None,
        moe_router_topk=1,
        moe_ffn_hidden_size=F,
        consumed_train_samples=12,
        expert_model_parallel_size=ep,
        **({"tensor_model_parallel_size": tp} if tp else {}),
    )
    common = {"args": arguments, "iteration": 3, "optimizer": {}}
    if not objects:
        common["optimizer"] = {"optimizer": {"param_groups": [{"step": 3}]}}
    weights = [build_item(name, [t.bfloat16()]) for name, t in state["param"].items()]
    folder.mkdir(parents=True)
    everything = {"common_state/shard_0_1": [common], **objects}
    write_dcp_folder(folder, [*weights, *items], everything)
    return folder


def write_named(folder, state, **more):
    items = [
        build_item(f"optimizer.state.{word}.{name}", [tensor])
        for word, tensors in state.items()
        for name, tensor in tensors.items()
    ]
    return write(folder, state, items, {}, 1, **more)


def write_buckets(folder, state, memory=None, *, tp=1, stages=((0, 1),), **more):
    """Write weights and the memory of every model rank; ``stages``: the layers of each.

    With ``apart`` each expert is on a rank of its own, in an optimizer of its own.
    """
    memory, limit, apart = memory or state, more.get("limit", 10**9), more.get("apart")
    items, objects = [], {}

    def add(prefix, rank, word, parts):
        at = f"{prefix}optimizer.distributed.dp_group_idx_{rank}"
        dtype = "dtype_(torch.bfloat16, torch.float32)"
        for number, bucket in enumerate(flat_buckets(parts, limit)):
            # Three data ranks, which end anywhere.
            cuts = bucket.tensor_split((bucket.numel() // 3 + 1, bucket.numel() // 2))
            items.append(
                build_item(f"{at}.gbuf_idx_0.{dtype}.bucket_idx_{number}.{word}", cuts)
            )
        objects[f"{at}.optimizer/shard_0_1"] = [{"param_groups": [{"step": 3}]}]

    for stage, layers in enumerate(stages):
        ends = {"embedding.word_embeddings.weight": 0}
        names = [
            name
            for name in state["param"]
            if any(f"[{layer}" in name for layer in layers)
            or ("[" not in name and ends.get(name, len(stages) - 1) == stage)
        ]
        dense = [name for name in names if not (apart and "experts" in name)]
        for word, tensors in memory.items():
            prefix = "chained_0." if apart else ""
            for rank in range(tp):
                parts = [local_part(name, tensors[name], rank, tp) for name in dense]
                add(prefix, stage * tp + rank, word, parts)
            for expert in range(E if apart else 0):
                own = [tensors[n] for n in names if n.endswith(f",{expert}]")]
                add("chained_1.", stage * E + expert, word, own)
    told = tp if more.get("told", True) else 0
    return write(folder, state, items, objects, told, E if apart else 1)


def taken(folder, output):
    convert("megatron", folder, "mcore", output, WITH_STATE)
    step = output / "iter_0000003"
    index = read_index(step)
    assert index.extra["num_steps"] == 3
    return {name: read_tensor(step, name, index=index) for name in index.tensors}


@pytest.mark.parametrize(
    ("order", "layout"),
    [
        (DENSE, {"tp": 2, "limit": 150}),
        (LOCAL, {"tp": 2, "stages": ((0,), (1,))}),
        (BY_MATRIX, {"limit": 400}),
        (BY_EXPERT, {"stages": ((0,), (1,)), "apart": True}),
    ],
)
def test_buckets_of_a_layout_hold_what_named_tensors_hold(tmp_path, order, layout):
    state = make_state(order)
    wanted = taken(write_named(tmp_path / "named", state), tmp_path / "one")
    found = taken(write_buckets(tmp_path / "buckets", state, **layout), tmp_path / "other")
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name


def swapped(state):
    """Give two weights of one size each other's main weight."""
    mains = state["param"]
    one, other = (f"decoder.layers.mlp.linear_fc2.weight[{layer}]" for layer in (0, 1))
    mains[one], mains[other] = mains[other], mains[one]


def longer(state):
    state["exp_avg"]["output_layer.weight"] = torch.randn(V + 1, D)


@pytest.mark.parametrize(("change", "told"), [(swapped, True), (longer, True), (None, False)])
def test_buckets_that_are_not_those_of_the_weights_are_refused(tmp_path, change, told):
    state = make_state(DENSE)
    memory = {word: dict(tensors) for word, tensors in state.items()}
    if change:
        change(memory)
    folder = write_buckets(tmp_path / "buckets", state, memory, told=told)
    with pytest.raises(ValueError, match="dist-ckpt-optim-fully-reshardable"):
        taken(folder, tmp_path / "ours")
    assert not list(tmp_path.glob("ours/iter_*"))


def test_weights_with_biases_stand_in_the_order_of_the_modules():
    modules = (
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.layer_norm_bias",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.q_layernorm.bias",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.shared_experts.gate_weight",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc1.bias",
        "mlp.shared_experts.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
        "output_layer.weight",
    )
    layers = {"embedding": -1, "decoder": 9, "output_layer": 9}
    weights = [
        Weight(name, (1,), "bfloat16", name, layers.get(name.partition(".")[0], 0), -1, -1, 1)
        for name in modules
    ]
    mixed = sorted(weights, key=lambda weight: weight.name[::-1])
    order = Order(norm_first=False, by_matrix=False)
    assert [weight.name for weight in sorted(mixed, key=order.key)] == list(modules)


def test_weights_fill_buckets_that_end_with_one_or_where_the_next_would_begin():
    # A bucket ends with a weight, or, before an embedding that two stages have, aligned.
    assert bucket_starts([10, 70, 5], [134, 5]) == [(0, 0), (0, 64), (1, 0)]
    assert bucket_starts([10, 70, 5], [192, 5]) == [(0, 0), (0, 64), (1, 0)]
    assert bucket_starts([10, 70, 5], [197]) == [(0, 0), (0, 64), (0, 192)]
    for buckets in ([133, 5], [135, 5], [134, 6], [134], [134, 5, 1], []):
        assert bucket_starts([10, 70, 5], buckets) is None, buckets
