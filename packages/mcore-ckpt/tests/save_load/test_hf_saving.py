"""Who puts which foreign tensor together: every byte once, about as many on each rank."""

from math import prod

import pytest

from mcore_ckpt.mapping.rules import Link
from mcore_ckpt.save_load.hf_saving import hf_view, plan_hf
from mcore_ckpt.storage.shard_plans import Claim, plan_writes

LINKS = [
    Link(("embedding.weight",), "embed.weight"),
    *(
        link
        for i in range(6)
        for link in (
            Link((f"blocks.{i}.q", f"blocks.{i}.k"), f"layers.{i}.qk"),
            Link((f"blocks.{i}.norm",), f"layers.{i}.norm"),
        )
    ),
]


def claims(num_ranks):
    """Tensor-parallel ranks: rows of matrices cut, norms on all, an optimizer beside them."""
    ranks = []
    for rank in range(num_ranks):
        rows = 8 // num_ranks
        mine = {"model.embedding.weight": cut((8, 16), rank * rows, rows)}
        for i in range(6):
            mine[f"model.blocks.{i}.q"] = cut((8, 4), rank * rows, rows)
            mine[f"model.blocks.{i}.k"] = cut((8, 4), rank * rows, rows)
            norm = Claim((4,), "F32", rank == 0, (((0,), (4,)),))
            mine[f"model.blocks.{i}.norm"] = norm
        mine["optimizer.m"] = cut((8, 4), rank * rows, rows)
        ranks.append(mine)
    return ranks


def cut(shape, first, rows):
    return Claim(shape, "BF16", True, (((first, 0), (rows, *shape[1:])),))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_foreign_tensor_has_one_owner_and_gets_every_box_once(num_ranks):
    held = claims(num_ranks)
    writes = plan_writes(held)
    plan = plan_hf(LINKS, held, writes)
    entries = [entry for mine in plan.entries for entry in mine]
    assert sorted(entry.key for entry in entries) == sorted(link.theirs for link in LINKS)
    assert next(e.shape for e in entries if e.key == "layers.3.qk") == (16, 4)
    for rank, mine in enumerate(plan.entries):
        wanted = {one.name: prod(one.box[1]) for entry in mine for one in entry.sections}
        got = dict.fromkeys(wanted, 0)
        for move in plan.moves:
            if move.target == rank:
                got[move.key.name] += move.key.num_elements
        assert got == wanted
    for move in plan.moves:
        assert move.key in writes[move.source]
    assert [one.name for mine in plan.rest for one in mine] == ["optimizer.m"] * num_ranks
    loads = [sum(entry.num_bytes for entry in mine) for mine in plan.entries]
    assert max(loads) - min(loads) <= 256
    names = [name for name in plan.names if name]
    if num_ranks == 1:
        assert names == ["model.safetensors"]
    else:
        assert names[-1] == f"model-{len(names):05d}-of-{len(names):05d}.safetensors"


def test_weights_that_no_rule_speaks_of_are_named():
    held = claims(1)
    held[0]["model.extra"] = cut((8, 4), 0, 8)
    with pytest.raises(ValueError, match="not used by any rule: extra"):
        plan_hf(LINKS, held, plan_writes(held))


def test_a_family_that_stores_matrices_turned_is_refused():
    description = {
        "family": "gpt",
        "vocab_size": 11,
        "config": {
            "num_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "swiglu": False,
            "openai_gelu": True,
            "add_bias_linear": True,
        },
        "moe": {},
    }
    with pytest.raises(
        ValueError, match="--save-hf cannot write gpt2, which stores rows in another"
    ):
        hf_view(description)
