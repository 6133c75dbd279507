"""The language of tables, and the families' words for our fields."""

import dataclasses

import pytest

from mcore_ckpt.families import MODEL_TYPES, family_for, find_family
from mcore_ckpt.families.common import fields
from mcore_ckpt.mapping.rules import Link, Rule, Table, expand, match_ours, match_theirs
from mcore_ckpt.storage.index import TensorEntry

TABLE = Table(
    (
        Rule("embedding", "wte"),
        Rule(("b.*.q", "b.*.k"), "h.*.qk", True, (6, 2)),
        Rule("b.*.e.*.up", "h.*.x.*.w1"),
        Rule("norm", "ln_f"),
    ),
    num_layers=2,
    num_experts=3,
    droppable=("*.angles",),
    copies={"head": "wte"},
)


def test_a_table_is_written_out_layer_by_layer():
    names = [link.theirs for link in expand(TABLE)]
    layer = ["h.0.qk", "h.0.x.0.w1", "h.0.x.1.w1", "h.0.x.2.w1"]
    assert names == [
        "wte",
        *layer,
        *(name.replace("h.0", "h.1") for name in layer),
        "ln_f",
    ]
    assert expand(TABLE)[5] == Link(("b.1.q", "b.1.k"), "h.1.qk", True, (6, 2))
    assert expand(TABLE)[8].ours == ("b.1.e.2.up",)


def test_rules_may_hold_for_some_layers_only():
    table = Table((Rule("a.*", "x.*", layers=(1,)), Rule("b.*", "y.*", layers=(0, 2))), 3)
    assert [link.theirs for link in expand(table)] == ["y.0", "x.1", "y.2"]


def test_two_rules_for_one_tensor_are_an_error():
    with pytest.raises(ValueError, match="several rules name x"):
        expand(Table((Rule("a", "x"), Rule("b", "x")), 1))
    with pytest.raises(ValueError, match="several rules name a"):
        expand(Table((Rule("a", "x"), Rule("a", "y")), 1))


def test_parts_of_a_fused_tensor_have_their_own_rows():
    assert Link(("q", "k", "v"), "x", False, (6, 2, 2)).rows((10, 3)) == [
        (0, 6),
        (6, 8),
        (8, 10),
    ]
    assert Link(("q", "k"), "x", True).rows((3, 10)) == [(0, 5), (5, 10)]
    with pytest.raises(ValueError, match=r"x of shape \[9, 3\] does not hold \[6, 2, 2\] rows"):
        Link(("q", "k", "v"), "x", False, (6, 2, 2)).rows((9, 3))


def test_foreign_names_must_be_exactly_the_tables():
    links = expand(TABLE)
    names = [link.theirs for link in links]
    assert match_theirs(TABLE, links, [*names, "h.0.angles", "head"]) == ["head"]
    with pytest.raises(ValueError, match="missing: ln_f") as caught:
        match_theirs(TABLE, links, [*names[:-1], "ln_g"])
    assert "not used by any rule: ln_g" in str(caught.value)


def test_ours_must_stack():
    links = [Link(("q", "k"), "qk")]
    q, k = TensorEntry((4, 3), "F32", ()), TensorEntry((2, 3), "F32", ())
    match_ours(links, {"q": q, "k": k})
    with pytest.raises(ValueError, match=r"k BF16 \[2, 3\] cannot be stacked on q F32"):
        match_ours(links, {"q": q, "k": dataclasses.replace(k, dtype="BF16")})


def test_fields_of_a_config_that_no_list_names_are_refused_by_families_without_them():
    assert set(fields.USUAL) < fields.DEFAULTS.keys()  # a name that is gone is found
    assert {"qk_l2_norm", "mamba_norm", "rope_type", "mtp_num_layers"} <= fields.VARIANTS.keys()
    assert fields.VARIANTS.keys().isdisjoint(fields.USUAL)
    described = {"config": {name: f"not {value}" for name, value in fields.VARIANTS.items()}}
    for name in fields.VARIANTS:
        others = fields.VARIANTS.keys() - {name}
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} not"):
            fields.refuse_variants(described, *others)


def test_each_family_refuses_flags_that_it_cannot_say():
    plain = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    more = {
        name: {"embedding_multiplier": 8**0.5}
        for name in (
            "gemma",
            "gemma2",
            "gemma3_text",
            "gemma3n_text",
            "gemma4_text",
            "vaultgemma",
        )
    }
    more["gemma3n_text"] |= {"altup_num_inputs": 2, "laurel_rank": 3}
    more["gemma3n_text"] |= {"per_layer_embedding_size": 3}
    more["gemma4_text"]["softmax_scale"] = 1.0
    more |= {name: {"swiglu": False} for name in ("gpt2", "gpt_neox", "falcon", "opt", "phi")}
    more |= {"granite": {"embedding_multiplier": 2.0}, "cohere2": {"window_size": (3, 0)}}
    more["ministral3"] = {
        "rope_type": "yarn",
        "original_max_position_embeddings": 16,
        "attention_temperature_layers": "all",
        "attention_temperature_span": 16,
        "attention_temperature_scale": 0.1,
    }
    sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    shared = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}
    routers = {"gpt_oss": {"moe_router_bias": True}, "glm4_moe": sigmoid, "dots1": sigmoid}
    routers |= {
        "qwen2_moe": shared,
        "hunyuan_v1_moe": {"moe_shared_expert_intermediate_size": 64},
        "ernie4_5_moe": {"moe_router_enable_expert_bias": True},
    }
    # Llama 4 has all of what others refuse.
    names = [name for name in MODEL_TYPES if name != "llama4_text"]
    for name in names[: names.index("deepseek_v2")]:
        family = find_family(name)
        described = {
            "family": "gpt",
            "vocab_size": 9,
            "config": plain | family.fixed | more.get(name, {}),
            "moe": {"num_experts": 2} | routers.get(name, {}) if family.experts else {},
        }
        find_family(name).to_theirs(described)
        for flag, value in (("qk_l2_norm", True), ("attention_chunk_size", 4)):
            if flag in family.fixed:  # nanochat's
                continue
            odd = {**described, "config": described["config"] | {flag: value}}
            with pytest.raises(
                ValueError, match=f"cannot express --{flag.replace('_', '-')} {value}"
            ):
                find_family(name).to_theirs(odd)
        if family.experts:
            odd = {**described, "moe": described["moe"] | {"moe_expert_capacity_factor": 1.5}}
            with pytest.raises(ValueError, match="cannot express --moe-expert-capacity-factor"):
                family.to_theirs(odd)
    for name in MODEL_TYPES[MODEL_TYPES.index("deepseek_v2") :]:
        message = "cannot express a model of the family 'gpt'"
        if name.startswith(("deepseek", "kimi", "glm4_moe_lite")):
            message = "cannot express --multi-latent-attention False"
        if name in PATTERNS:
            message = "cannot express .*--hybrid-override-pattern"
        if name == "minimax_m2":
            message = "cannot express --qk-layernorm False"
        if name == "phimoe":
            message = "cannot express --normalization RMSNorm"
        with pytest.raises(ValueError, match=message):
            find_family(name).to_theirs(described | {"moe": {}})


def test_a_model_of_mup_is_written_with_the_factors_of_its_width():
    config = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "use_mup": True}
    config |= {"mup_base_hidden_size": 8, "mup_base_head_dim": 4, "mup_embedding_mult": 3.0}
    described = {"family": "gpt", "vocab_size": 9, "config": config, "moe": {}}
    assert family_for(described) == "granite"
    theirs = find_family("granite").to_theirs(described)
    assert (theirs["embedding_multiplier"], theirs["logits_scaling"]) == (3.0, 4.0)
    assert theirs["attention_multiplier"] == 4**-0.5 * 4 / 16


PATTERNS = {
    *("mamba2", "nemotron_h", "qwen3_next", "bamba", "granitemoehybrid"),
    *("qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "minimax", "kimi_linear"),
}


def test_predictors_of_deepseek_v3_stand_after_the_last_layer_and_share_the_embedding():
    family = find_family("deepseek_v3")
    config = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    config |= {"intermediate_size": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 4}
    config |= {"qk_rope_head_dim": 2, "v_head_dim": 4, "n_routed_experts": 16, "vocab_size": 9}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 5, "q_lora_rank": 3}
    config |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    description = family.to_ours(config)
    table = family.table(description)
    pairs = {link.theirs: link.ours for link in expand(table)}
    at = "model.layers.2."
    assert pairs[f"{at}eh_proj.weight"] == ("mtp.0.eh_proj.weight",)
    assert pairs[f"{at}shared_head.norm.weight"] == ("mtp.0.final_norm.weight",)
    assert pairs[f"{at}self_attn.q_b_proj.weight"] == ("mtp.0.block.mla.q_up.weight",)
    assert pairs[f"{at}mlp.experts.1.up_proj.weight"] == (
        "mtp.0.block.moe.experts.1.fc1.up.weight",
    )
    assert f"{at}mlp.up_proj.weight" not in pairs
    assert table.copies[f"{at}embed_tokens.weight"] == "model.embed_tokens.weight"
    # A folder without them, as transformers saves it, has none.
    without = family.as_stored(description, {"model.norm.weight"})
    assert not any(name.startswith("model.layers.2.") for name in family.table(without).copies)
    assert all("mtp" not in link.ours[0] for link in expand(family.table(without)))
    assert family.to_theirs(without)["num_nextn_predict_layers"] == 0


def test_rows_that_blocks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"does not hold .* in 3 blocks"):
        Link(("q", "k"), "x", groups=3).shares((8, 2))


def test_indices_are_taken_off_a_tensor_that_holds_all_layers():
    from mcore_ckpt.mapping.rules import split_index, unstacked
    from mcore_ckpt.storage.index import StoredBox

    assert split_index("x[3,7]") == ("x", (3, 7))
    assert split_index("x") == ("x", ())
    whole = TensorEntry(
        (2, 4, 3),
        "F32",
        (StoredBox("a", 100, (0, 0, 0), (2, 2, 3)), StoredBox("b", 0, (0, 2, 0), (2, 2, 3))),
    )
    found = unstacked(
        {"x": whole, "y": whole}, [Link(("o.0",), "x[0]"), Link(("o.1",), "x[1]")]
    )
    assert set(found) == {"x[0]", "x[1]", "y"}
    assert found["x[1]"].shape == (4, 3)
    assert found["x[1]"].chunks == (
        StoredBox("a", 124, (0, 0), (2, 3)),
        StoredBox("b", 24, (2, 0), (2, 3)),
    )
    with pytest.raises(ValueError, match="has no 2 indices"):
        unstacked({"x": TensorEntry((3,), "F32", ())}, [Link(("o",), "x[0,1]")])
