"""Rates and rules of single parameters, by kind and by name."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mcore_models.mup import step_width
from mcore_models.parameter_kinds import parameter_kind, tensor_kind
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.lion import Lion
from mcore_parallel.optimizers.muon import Muon
from mcore_train.composition import TrainConfig, compose
from mcore_train.config import ParameterRatesConfig
from mcore_train.resolution import ConflictError, resolve
from mcore_train.updating.group_entries import read_entries
from mcore_train.updating.lr_schedule import LRSchedule
from mcore_train.updating.parameter_groups import ParameterGroups, named_rates

MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "seq_length": 16,
    "train_iters": 2,
    "lr": 1e-3,
}


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("embedding.weight", (64, 32), "embedding"),
        ("position_embedding.weight", (16, 32), "embedding"),
        ("encoder.relative_position_bias.weight", (32, 4), "embedding"),
        ("head.weight", (64, 32), "head"),
        ("blocks.0.attention.qkv.q.weight", (32, 32), "matrix"),
        ("blocks.0.attention.qkv.q.bias", (32,), "bias"),
        ("blocks.0.mamba.dt_bias", (4,), "bias"),
        ("blocks.0.attention.q_norm.weight", (4, 8), "norm"),
        ("final_norm.weight", (32,), "norm"),
        ("blocks.0.moe.router.weight", (8, 32), "router"),
        ("blocks.0.moe.experts.3.fc2.weight", (32, 64), "matrix"),
        ("blocks.0.mamba.conv1d.x.weight", (32, 1, 4), "vector"),
        ("blocks.0.mamba.A_log", (4,), "vector"),
    ],
)
def test_a_tensor_has_the_kind_of_its_name(name, shape, kind):
    assert tensor_kind(name, shape) == kind


def test_tensors_of_several_kinds_are_no_matrix_together():
    assert parameter_kind([("a.weight", (2, 2)), ("b.weight", (2, 2))]) == "matrix"
    assert parameter_kind([("a.weight", (2, 2)), ("a.bias", (2,))]) == "vector"


def named(*names, shape=(32, 32)):
    parts = tuple(SimpleNamespace(name=name, shape=shape) for name in names)
    return SimpleNamespace(name=names[0], layout=SimpleNamespace(parts=parts))


def groups(rule=None, **options):
    config = compose({**MODEL, **options})
    return ParameterGroups(config, rule or AdamW(config.adam))


QKV = named(*(f"blocks.1.attention.qkv.{part}.weight" for part in "qkv"))
EMBEDDING, NORM = named("embedding.weight"), named("blocks.0.mlp_norm.weight", shape=(32,))
Q_NORM = named("blocks.0.attention.q_norm.weight", shape=(8,))
HEAD, ROUTER = named("head.weight"), named("blocks.0.moe.router.weight")


def test_without_options_matrices_decay_and_all_learn_alike():
    usual = groups()
    assert [usual.group_of(p).decay_factor for p in (QKV, EMBEDDING, NORM)] == [1.0, 1.0, 0.0]
    for parameter in (QKV, EMBEDDING, NORM):
        group = usual.group_of(parameter)
        assert (group.lr_name, group.lr_factor, group.width) == ("", 1.0, 1.0)


def test_a_matrix_optimizer_leaves_tables_head_norms_and_routers_to_adam():
    config = compose({**MODEL, "optimizer": "muon", "adam_beta2": 0.9})
    rule = Muon(config.muon)
    found = ParameterGroups(config, rule)
    assert found.group_of(QKV).rule is rule
    for parameter in (EMBEDDING, HEAD, NORM, ROUTER):
        own = found.group_of(parameter).rule
        assert isinstance(own, AdamW)
        assert own.config.adam_beta2 == 0.9
    given = replace(
        config,
        parameter_rates=ParameterRatesConfig(parameter_groups=("*.qkv.* optimizer=adam",)),
    )
    assert isinstance(ParameterGroups(given, rule).group_of(QKV).rule, AdamW)
    assert not found.group_of(QKV).joins_parts
    joined = compose({**MODEL, "optimizer": "muon", "muon_split_qkv": False})
    fused = named(*(f"blocks.1.attention.qkv.{part}.weight" for part in "qkv"))
    fused.name = "blocks.1.attention.qkv.weight"
    assert ParameterGroups(joined, Muon(joined.muon)).group_of(fused).joins_parts


def test_entries_set_rates_by_kind_and_name_and_later_ones_win():
    found = groups(
        parameter_groups=(
            "embedding decay_factor=0",
            "blocks.1.* lr_factor=0.5",
            "matrix lr=2e-3 min_lr=1e-4 beta2=0.95",
            "*.qkv.q.weight lr_factor=0.25",
        )
    )
    assert found.group_of(EMBEDDING).decay_factor == 0.0
    group = found.group_of(QKV)
    assert (group.lr_name, group.lr_factor) == ("group 2", 0.25)
    assert group.rule.config.adam_beta2 == 0.95
    assert found.group_of(QKV).rule is group.rule  # neighbours of one group are one call
    assert found.group_of(NORM).rule.config.adam_beta2 == 0.999


def test_decoupled_rates_layer_decay_and_decay_of_qk_norms():
    found = groups(
        decoupled_lr=1e-2,
        layer_lr_decay=0.5,
        qk_layernorm=True,
        apply_wd_to_qk_layernorm=True,
        untie_embeddings_and_output_weights=True,
    )
    by_name = {"embedding": EMBEDDING, "head": HEAD, "qkv": QKV, "norm": NORM}
    factors = {name: found.group_of(p).lr_factor for name, p in by_name.items()}
    assert factors == {"embedding": 0.25, "head": 1.0, "qkv": 1.0, "norm": 0.5}
    assert found.group_of(EMBEDDING).lr_name == found.group_of(HEAD).lr_name == "decoupled"
    assert found.group_of(QKV).lr_name == ""
    assert found.group_of(Q_NORM).decay_factor == 1.0
    assert found.group_of(NORM).decay_factor == 0.0


def test_named_rates_follow_the_schedule_between_their_own_ends():
    options = ParameterRatesConfig(
        decoupled_lr=4.0, decoupled_min_lr=2.0, parameter_groups=("norm lr=10 min_lr=0",)
    )
    schedule = LRSchedule(max_lr=1.0, min_lr=0.1, decay_samples=100)
    assert named_rates(options, schedule, 50) == {"group 0": 5.0, "decoupled": 3.0}


def test_mup_divides_spectral_updates_and_not_those_of_fixed_spectral_norm():
    options = {"use_mup": True, "mup_base_hidden_size": 8, "optimizer": "muon"}
    for mode, width in (("spectral", 4.0), ("unit_rms_norm", 1.0), ("shape_scaling", 1.0)):
        config = compose({**MODEL, **options, "muon_scale_mode": mode})
        assert ParameterGroups(config, Muon(config.muon)).group_of(QKV).width == width


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("norm", "give a pattern and what is set"),
        ("norm lr=x", "'lr=x' is none of"),
        ("norm speed=1", "'speed=1' is none of"),
        ("norm lr=-1", "'lr=-1' is none of"),
        ("norm optimizer=sgd", "'optimizer=sgd' is none of"),
        ("norm min_lr=1", "give a pattern"),
    ],
)
def test_entries_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_entries((text,))


def plan(*entries):
    values = {**MODEL, "micro_batch_size": 1, "global_batch_size": 1, "mock_data": True}
    return resolve(compose({**values, "parameter_groups": entries}), 1)


def test_under_mup_matrices_learn_slower_in_wide_models_and_norms_of_heads_do_not():
    config = SimpleNamespace(use_mup=True, hidden_size=64, mup_base_hidden_size=16)
    widths = {
        "blocks.0.mlp.fc2.weight": 4,
        "blocks.0.attention.q_norm.weight": 1,
        "blocks.0.mamba.conv1d.x.weight": 1,
        "head.weight": 1,
    }
    for name, width in widths.items():
        assert step_width([(name, (4, 16))], config) == width, name


def test_entries_of_no_parameter_and_betas_of_another_rule_are_refused():
    assert isinstance(plan("blocks.1.mlp.* lr_factor=2").config, TrainConfig)
    with pytest.raises(ConflictError, match=r"'blocks.7.\* lr_factor=2' matches no parameter"):
        plan("blocks.7.* lr_factor=2")
    with pytest.raises(ConflictError, match="min_lr must not be above lr"):
        plan("norm lr=1 min_lr=2")
    config = compose({**MODEL, "optimizer": "lion", "parameter_groups": ("norm beta1=0.5",)})
    with pytest.raises(ValueError, match="beta1 and beta2 are AdamW's"):
        ParameterGroups(config, Lion(config.lion)).group_of(NORM)
