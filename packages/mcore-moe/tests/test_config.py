import pytest

from mcore_moe import MoEConfig, expert_capacity


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": -1}, "--num-experts -1"),
        ({"num_experts": 2, "moe_router_topk": 3}, "from 1 to --num-experts 2"),
        ({"num_experts": 4, "moe_router_topk": 1}, "--moe-router-pre-softmax"),
        (
            {
                "num_experts": 4,
                "moe_router_score_function": "sigmoid",
                "moe_router_pre_softmax": True,
            },
            "no effect",
        ),
        (
            {
                "num_experts": 4,
                "moe_router_enable_expert_bias": True,
                "moe_router_load_balancing_type": "sinkhorn",
            },
            "no effect with --moe-router-load-balancing-type sinkhorn",
        ),
        ({"num_experts": 4, "moe_router_num_groups": 2}, "--moe-router-group-topk 0"),
        (
            {"num_experts": 4, "moe_router_group_score_topk": 1},
            "no effect without --moe-router",
        ),
        (
            {
                "num_experts": 4,
                "moe_router_num_groups": 2,
                "moe_router_group_topk": 1,
                "moe_router_group_score_topk": 3,
            },
            "--moe-router-group-score-topk 3 must be from 0 to the experts of a group, 2",
        ),
        (
            {"num_experts": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
            "must divide --num-experts 4",
        ),
        (
            {
                "num_experts": 8,
                "moe_router_topk": 3,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
            },
            "multiple of --moe-router-group-topk 2",
        ),
        (
            {
                "num_experts": 8,
                "moe_router_topk": 4,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 1,
            },
            "of the chosen groups, 2",
        ),
        ({"num_experts": 4, "moe_aux_loss_coeff": -1.0}, "--moe-aux-loss-coeff"),
        (
            {
                "num_experts": 4,
                "moe_aux_loss_coeff": 0.1,
                "moe_router_load_balancing_type": "none",
            },
            "no effect with --moe-router-load-balancing-type none",
        ),
        (
            {
                "num_experts": 4,
                "moe_router_load_balancing_type": "sinkhorn",
                "moe_router_score_function": "sigmoid",
            },
            "has its own scores",
        ),
        ({"num_experts": 4, "moe_shared_expert_gate": True}, "shared-expert-intermediate"),
        (
            {
                "num_experts": 4,
                "moe_split_batch_overlap": True,
                "moe_token_dispatcher_type": "allgather",
            },
            "dispatcher-type alltoall: give that, or leave it out",
        ),
        (
            {"num_experts": 4, "moe_experts_dtype": "fp8", "moe_grouped_gemm": False},
            "--no-moe-grouped-gemm exclude each other",
        ),
        ({"num_experts": 4, "moe_expert_capacity_factor": -1.0}, "capacity-factor"),
        (
            {"num_experts": 4, "moe_token_drop_policy": "position"},
            "no effect without --moe-exp",
        ),
        (
            {"num_experts": 4, "moe_router_score_function": "tanh"},
            "'tanh' is unknown: use softmax, sigmoid, sqrtsoftplus or sparsemixer",
        ),
        (
            {"num_experts": 4, "moe_router_score_function": "sparsemixer"}
            | {"moe_router_topk": 3},
            "chooses 2 of all experts",
        ),
        ({"num_experts": 4, "moe_router_dtype": "bf16"}, "unknown: use fp32 or fp64"),
        ({"num_experts": 4, "moe_dispatch_dtype": "fp4"}, "unknown: use fp8"),
        ({"num_experts": 4, "moe_ffn_hidden_size": -8}, "-8 must be 0 or more"),
        ({"num_experts": 4, "moe_router_bias_update_rate": -0.1}, "-0.1 must be 0 or more"),
        ({"num_experts": 4, "moe_pad_expert_input_to_capacity": True}, "capacity-factor"),
        (
            {
                "num_experts": 4,
                "moe_expert_capacity_factor": 1.0,
                "moe_pad_expert_input_to_capacity": True,
                "moe_token_dispatcher_type": "allgather",
            },
            "dispatcher-type alltoall",
        ),
    ],
)
def test_a_contradiction_names_the_flag_to_change(fields, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**fields)


def test_a_dense_config_does_not_mind_what_only_experts_use():
    assert MoEConfig(num_experts=0, moe_router_topk=8).moe_router_topk == 8


def test_capacity_is_the_even_share_times_the_factor_rounded_up():
    assert expert_capacity(3, 4, 2, 0.5) == 1
    assert expert_capacity(3, 4, 2, 1.0) == 2
    assert expert_capacity(0, 4, 2, 1.0) == 0
