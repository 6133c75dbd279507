"""Context parallelism of every kind, packed and ragged rows, split backwards: as one rank.

Held to the same tolerances as ``test_layouts``; a world of each size serves all its rows.
"""

from functools import cache

import pytest
from parity.brief import Brief, train_all
from warm_ranks import run_ranks

from mcore_train.layout_check.certificate import compare_trials


def cp(size, kind="", **flags):
    return {"context_parallel_size": size, "cp_comm_type": kind, **flags}


def zb(pp, name="zb-h1", **flags):
    return {"pipeline_model_parallel_size": pp, "pipeline_schedule": name, **flags}


EXPERTS = {"sparse": True, "micro_batch_size": 2}
BESIDE = {"expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True}
CASES = {
    "cp2 p2p": Brief(2, cp(2, "p2p")),
    "cp2 all_gather": Brief(2, cp(2, "all_gather")),
    "cp2 a2a": Brief(2, cp(2, "a2a")),
    "cp2 p2p packed": Brief(2, cp(2, "p2p"), rows="packed"),
    "cp2 all_gather packed": Brief(2, cp(2, "all_gather"), rows="packed"),
    "cp2 a2a packed": Brief(2, cp(2, "a2a"), rows="packed"),
    "pp2 zb-h1": Brief(2, zb(2)),
    "pp2 zb-h1 experts": Brief(2, zb(2), **EXPERTS),
    "pp2 zb-v": Brief(2, zb(2, name="zb-v"), num_layers=4),
    "cp2 pp2 zb-v packed, zero, overlapped": Brief(
        4,
        cp(
            2,
            "p2p",
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            ddp_bucket_size=2000,
            **zb(2, name="zb-v"),
        ),
        num_layers=4,
        rows="packed",
    ),
    "ep2 beside": Brief(2, BESIDE, **EXPERTS),
    "pp2 ep2 beside, gathered": Brief(
        4,
        {
            "pipeline_model_parallel_size": 2,
            "moe_token_dispatcher_type": "allgather",
            **BESIDE,
        },
        **EXPERTS,
    ),
    "tp2 sp pp2 ep2 dualpipev, beside": Brief(
        4,
        zb(
            2,
            name="dualpipev",
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            expert_tensor_parallel_size=1,
            **BESIDE,
        ),
        num_layers=4,
        **EXPERTS,
    ),
    "cp4 a2a, two kv heads": Brief(4, cp(4, "a2a")),
    "cp2 pp2 p2p packed": Brief(4, cp(2, "p2p", pipeline_model_parallel_size=2), rows="packed"),
    "tp2 sp pp2, lengths vary": Brief(
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
        },
        rows="ragged",
    ),
    "pp2 dp2 zero2, recomputed by twos": Brief(
        4,
        {
            "pipeline_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads",
            "recompute_granularity": "full",
            "recompute_num_layers": 2,
        },
        num_layers=4,
        micro_batch_size=2,
    ),
    "cp2 pp2 lengths vary, one by one": Brief(
        4,
        cp(2, pipeline_model_parallel_size=2, batch_p2p_communication=False),
        rows="ragged",
    ),
    "pipeline ranks first": Brief(
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "rank_order": "pp-cp-tp-ep-dp",
        },
    ),
    "experts over data ranks first": Brief(
        4,
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "use_distributed_optimizer": True,
            "rank_order": "dp-ep-cp-tp-pp",
        },
        **EXPERTS,
    ),
    "tp2 sp pp2 ep2": Brief(
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        **EXPERTS,
    ),
    "pp4 zb-h1": Brief(4, zb(4), num_layers=4, micro_batch_size=2),
    "tp2 sp pp2 zb-h1": Brief(
        4,
        zb(2, tensor_model_parallel_size=2, sequence_parallel=True),
    ),
    "pp2 dp2 zb-h1 zero, overlapped, experts": Brief(
        4,
        zb(
            2,
            expert_model_parallel_size=2,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            ddp_bucket_size=2000,
        ),
        **EXPERTS,
    ),
}


LONG = {
    "cp2 all_gather",
    "ep2 beside",
    "tp2 sp pp2, lengths vary",
    "experts over data ranks first",
    "pp2 dp2 zero2, recomputed by twos",
    "cp2 all_gather packed",
    "cp2 a2a packed",
    "cp2 pp2 lengths vary, one by one",
    "pipeline ranks first",
    "pp2 zb-h1 experts",
    "cp4 a2a, two kv heads",
    "pp4 zb-h1",
    "tp2 sp pp2 zb-h1",
}
"""Rows that others nearly hold: in the long suite."""


@cache
def outcomes(world_size, is_long):
    """All rows of one world size, by name."""
    names = [n for n, case in CASES.items() if case.world_size == world_size]
    names = [name for name in names if (name in LONG) == is_long]
    # Four ranks run the code of two: their shapes are checked once.
    cases, is_checked = [CASES[name] for name in names], world_size > 2
    ranks = run_ranks(train_all, world_size, cases, check_shapes=is_checked)
    return dict(zip(names, ranks[0], strict=True))


@cache
def one_rank(num_layers, sparse, rows):
    case = Brief(1, {}, num_layers, 2 if sparse else 4, sparse, rows)
    return run_ranks(train_all, 1, [case], check_shapes=False)[0][0]


def marked(name):
    return pytest.param(name, marks=pytest.mark.parity_long) if name in LONG else name


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_a_layout_trains_as_one_rank_does(name):
    case = CASES[name]
    found = outcomes(case.world_size, name in LONG)[name]
    oracle = one_rank(case.num_layers, case.sparse, case.rows)
    assert [line for line in compare_trials(found, oracle) if not line.passed] == []


def test_packing_and_lengths_change_what_is_learned():
    plain, packed, ragged = (one_rank(2, False, r) for r in ("plain", "packed", "ragged"))
    assert len({*plain.losses, *packed.losses, *ragged.losses}) == 6


def test_a_split_backward_has_every_bit_of_a_whole_one():
    brief = Brief(2, {"pipeline_model_parallel_size": 2})
    whole = run_ranks(train_all, 2, [brief], check_shapes=False)[0][0]
    split = outcomes(2, False)["pp2 zb-h1"]
    assert split.losses == whole.losses
    assert all((split.updates[n] == t).all() for n, t in whole.updates.items())


TP2 = {"tensor_model_parallel_size": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
SP2 = {
    **TP2,
    "sequence_parallel": True,
    "moe_shared_expert_intermediate_size": 16,
    "global_batch_size": 4,  # two micro-batches
}
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
RECOMPUTED = [
    Brief(2, {**TP2}),
    Brief(2, {**TP2, **FULL, "distribute_saved_activations": True}),
    Brief(2, {**TP2, **SELECTIVE, "recompute_modules": ("layernorm", "mlp_act", "core_attn")}),
    Brief(2, {**TP2, **SELECTIVE, "recompute_modules": ("layernorm", "mlp")}),
    Brief(2, {**SP2}, **EXPERTS),
    Brief(
        2,
        {**SP2, **SELECTIVE, "recompute_modules": ("layernorm", "moe_act", "shared_experts")},
        **EXPERTS,
    ),
]


@pytest.mark.parity_long
def test_recomputing_under_tensor_parallelism_and_dropout_changes_no_bit():
    found = run_ranks(train_all, 2, RECOMPUTED, check_shapes=False)[0]
    for outcome, oracle in [(o, found[0]) for o in found[1:4]] + [(found[5], found[4])]:
        assert outcome.losses == oracle.losses
        for kind in ("gradients", "updates"):
            tensors = getattr(oracle, kind)
            assert all((getattr(outcome, kind)[n] == t).all() for n, t in tensors.items())
