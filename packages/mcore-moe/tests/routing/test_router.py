import pytest
import torch
from torch.utils.checkpoint import checkpoint
from warm_ranks import run_ranks

from mcore_moe import (
    MoEConfig,
    Router,
    Routing,
    expert_scores,
    finish_step,
    limit_to_capacity,
    moe_axes,
    route,
)
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import named_shards

# Three tokens and four experts; the numbers of this file were obtained by running the
# reference implementation on them (Megatron-LM, August 2026).
LOGITS = torch.tensor([[2.0, 1, 0, -1], [0, 3, 1, 2], [1, 1.5, -2, 0.5]])


def dense(routing, num_experts=4):
    """Weights as a [T, E] table, zero where an expert was not chosen."""
    table = torch.zeros(routing.ids.shape[0], num_experts, dtype=routing.probs.dtype)
    return table.scatter(1, routing.ids, routing.probs)


def config(**fields):
    return MoEConfig(num_experts=4, moe_router_topk=2, **fields)


def table(*rows):
    result = torch.zeros(len(rows), 4)
    for t, row in enumerate(rows):
        for expert, weight in row.items():
            result[t, expert] = weight
    return result


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {},
            table(
                {0: 0.731059, 1: 0.268941},
                {1: 0.731059, 3: 0.268941},
                {0: 0.377541, 1: 0.622459},
            ),
        ),
        (
            {"moe_router_pre_softmax": True},
            table(
                {0: 0.643914, 1: 0.236883},
                {1: 0.643914, 3: 0.236883},
                {0: 0.302568, 1: 0.498851},
            ),
        ),
        (
            {
                "moe_router_score_function": "sigmoid",
                "moe_router_topk_scaling_factor": 2.5,
            },
            table(
                {0: 1.366123, 1: 1.133877},
                {1: 1.298938, 3: 1.201062},
                {0: 1.180167, 1: 1.319832},
            ),
        ),
        (
            {"moe_router_score_function": "sqrtsoftplus"},
            table(
                {0: 0.55998, 1: 0.44002}, {1: 0.544879, 3: 0.455121}, {0: 0.467677, 1: 0.532323}
            ),
        ),
    ],
)
def test_weights_equal_the_published_numbers(fields, expected):
    torch.testing.assert_close(dense(route(LOGITS, config(**fields))), expected, **SIX_DIGITS)


def test_an_unknown_score_function_is_refused():
    with pytest.raises(ValueError, match="unknown score function 'tanh': use softmax"):
        expert_scores(LOGITS, "tanh")


def test_sparsemixer_weighs_each_choice_among_scores_near_it():
    fields = {"moe_router_score_function": "sparsemixer", "moe_router_sparsemixer_eps": 0.25}
    routing = route(LOGITS, config(**fields))
    # Scores of at least half the best one's share in the softmax: 2 and 1, then 1 alone.
    expected = table(
        {0: 0.731059, 1: 1.0}, {1: 0.731059, 3: 0.731059}, {1: 0.622459, 0: 0.622459}
    )
    torch.testing.assert_close(dense(routing), expected, **SIX_DIGITS)


SIX_DIGITS = {"rtol": 0, "atol": 1e-6}


def test_expert_bias_moves_the_choice_and_leaves_the_weights_alone():
    routing = route(
        LOGITS,
        config(moe_router_score_function="sigmoid"),
        expert_bias=torch.tensor([0.0, 0, 0.5, 0]),
    )
    expected = table(
        {0: 0.63789, 2: 0.36211}, {1: 0.565785, 2: 0.434215}, {0: 0.472067, 1: 0.527933}
    )
    torch.testing.assert_close(dense(routing), expected, **SIX_DIGITS)
    # Softmax after the choice: the bias moves shares of all experts, not their logits.
    bias = torch.tensor([0.0, 0, 0.25, 0])
    routing = route(LOGITS, config(), expert_bias=bias)
    assert routing.ids.tolist() == [[0, 2], [1, 2], [1, 0]]
    chosen = LOGITS.gather(1, routing.ids)
    torch.testing.assert_close(routing.probs, chosen.softmax(1))


def test_groups_are_worth_the_sum_of_the_experts_they_may_give():
    routing = route(
        LOGITS,
        config(
            moe_router_score_function="sigmoid",
            moe_router_num_groups=2,
            moe_router_group_topk=1,
        ),
    )
    expected = table({2: 0.453551, 3: 0.546449})[0]
    torch.testing.assert_close(dense(routing)[1], expected, **SIX_DIGITS)


def test_equal_scores_go_to_the_lower_expert():
    assert route(torch.zeros(5, 4), config()).ids.tolist() == [[0, 1]] * 5


def test_scores_stay_float64_and_bfloat16_becomes_float32():
    assert expert_scores(LOGITS.double(), "softmax").dtype == torch.float64
    assert route(LOGITS.bfloat16(), config()).probs.dtype == torch.float32


def test_route_takes_no_tokens():
    for fields in ({}, {"moe_router_num_groups": 2, "moe_router_group_topk": 1}):
        assert route(torch.zeros(0, 4), config(**fields)).ids.shape == (0, 2)


def router_on_logits(weight=LOGITS, **fields):
    """A router whose logits are LOGITS when its input is the identity matrix."""
    router = Router(3, config(**fields), dtype=weight.dtype)
    with torch.no_grad():
        router.weight.copy_(weight.T)
    return router


def test_router_returns_aux_and_z_losses_times_their_coefficients():
    x = torch.eye(3)
    aux = router_on_logits(moe_aux_loss_coeff=0.01)(x)[1]
    z = router_on_logits(moe_z_loss_coeff=0.001)(x)[1]
    both = router_on_logits(moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001)(x)[1]
    assert aux.item() == pytest.approx(0.0145521881, rel=1e-6)
    assert z.item() == pytest.approx(0.0075364760, rel=1e-6)
    assert both.item() == pytest.approx(aux.item() + z.item(), rel=1e-6)


def test_router_in_eval_mode_has_no_loss_and_counts_nothing():
    router = router_on_logits(moe_aux_loss_coeff=0.01).eval()
    assert router(torch.eye(3))[1].item() == 0
    assert router.step_counts.sum() == 0


def test_router_counts_choices_over_the_forwards_of_a_step():
    router = router_on_logits()
    router(torch.eye(3))
    router(torch.eye(3))
    assert router.step_counts.tolist() == [4, 6, 0, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_does_not_count_choices_twice(reentrant):
    router = router_on_logits(moe_aux_loss_coeff=0.01)
    x = torch.eye(3, requires_grad=True)
    probs, aux = checkpoint(
        lambda x: (router(x)[0].probs, router(x)[1]), x, use_reentrant=reentrant
    )
    (probs.sum() + aux).backward()
    assert router.step_counts.tolist() == [4, 6, 0, 2]


def test_global_loss_refuses_to_be_recomputed_with_other_counts():
    router = router_on_logits(
        moe_aux_loss_coeff=0.01, moe_router_load_balancing_type="global_aux_loss"
    )
    aux = checkpoint(lambda x: router(x)[1], torch.eye(3).requires_grad_(), use_reentrant=False)
    with pytest.raises(ValueError, match="global_aux_loss cannot be recomputed"):
        aux.backward()


def test_global_loss_divides_by_what_was_really_seen():
    router = router_on_logits(
        moe_aux_loss_coeff=1.0, moe_router_load_balancing_type="global_aux_loss"
    )
    router(torch.eye(3)[2:])
    finish_step(router)  # what an earlier step has seen does not count
    router(torch.eye(3))
    aux = router(torch.eye(3)[:1])[1]
    counts = torch.tensor([3.0, 4, 0, 1])  # 3 + 1 tokens, by hand from the table above
    expected = 4 * (counts / 8 * LOGITS[0].softmax(0)).sum()
    assert aux.item() == pytest.approx(expected.item(), rel=1e-6)


def test_masked_tokens_are_routed_but_take_no_part_in_balance():
    fields = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.01}
    masked, alone = router_on_logits(**fields), router_on_logits(**fields)
    routing, aux = masked(torch.eye(3), mask=torch.tensor([True, False, True]))
    _, expected = alone(torch.eye(3)[[0, 2]])
    assert routing.ids.shape == (3, 2)
    assert aux.item() == pytest.approx(expected.item(), rel=1e-6)
    assert masked.step_counts.tolist() == alone.step_counts.tolist()


def test_sequence_loss_is_the_mean_of_the_losses_of_single_sequences():
    fields = {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "seq_aux_loss"}
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    sequences = torch.arange(8) % 2
    mask = torch.tensor([True, False, True, True, True, False, False, True])
    for real in (torch.ones_like(mask), mask):
        together = router_on_logits(**fields)(x, sequences, 2, real)[1]
        apart = [router_on_logits(**fields)(x[b::2][real[b::2]])[1] for b in (0, 1)]
        torch.testing.assert_close(together, (apart[0] + apart[1]) / 2)


def test_padding_takes_no_room_of_an_expert_from_tokens():
    config = MoEConfig(
        num_experts=2,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_expert_capacity_factor=1.0,
    )
    wanted = Routing(
        torch.zeros(4, 1, dtype=torch.int64), torch.tensor([[0.9, 0.8, 0.2, 0.1]]).T
    )
    mask = torch.tensor([False, False, True, True])
    assert limit_to_capacity(wanted, config, mask).keep.flatten().tolist() == mask.tolist()
    assert limit_to_capacity(wanted, config).keep.flatten().tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_sinkhorn_routing_weighs_by_softmax_and_is_plain_in_eval():
    router = router_on_logits(moe_router_load_balancing_type="sinkhorn")
    training = router(torch.eye(3))[0]
    softmax = LOGITS.softmax(1)
    torch.testing.assert_close(training.probs, softmax.gather(1, training.ids))
    evaluated = router.eval()(torch.eye(3))[0]
    torch.testing.assert_close(evaluated.probs, softmax.topk(2).values)


def test_jitter_stays_within_its_bounds_and_out_of_eval():
    router = router_on_logits(moe_input_jitter_eps=0.1, moe_router_pre_softmax=True)
    quiet = router.eval()(torch.eye(3))[0].probs
    torch.manual_seed(0)
    noisy = router.train()(torch.eye(3))[0].probs
    assert not torch.equal(noisy, quiet)
    assert (noisy / quiet - 1).abs().max() < 0.5


def noise_of(ctx, streams_seed):
    """What jitter makes of equal tokens, and whether torch's own generator moved."""
    router = Router(
        3,
        config(moe_input_jitter_eps=0.1, moe_router_pre_softmax=True),
        axes=moe_axes(ctx),
        streams=RngStreams(streams_seed, ctx),
        init_std=0.0,
    )
    with torch.no_grad():
        router.weight.fill_(1.0)[0] = 2.0
    before = torch.random.get_rng_state()
    probs = router(torch.ones(5, 3))[0].probs.detach()
    return probs.tolist(), torch.equal(torch.random.get_rng_state(), before)


def noise_on_a_rank(degrees):
    ctx = ParallelContext.build(ParallelConfig(**degrees))
    found = noise_of(ctx, 7), noise_of(ctx, 7)
    ctx.destroy()
    return found


@pytest.mark.parametrize("degrees", [{}, {"tensor_model_parallel_size": 2}])
def test_jitter_is_other_noise_on_every_rank_and_the_same_for_a_seed(degrees):
    ranks = run_ranks(noise_on_a_rank, 2, degrees)
    for (noise, is_default_untouched), again in ranks:
        assert (noise, is_default_untouched) == again
        assert is_default_untouched
    assert ranks[0][0][0] != ranks[1][0][0]


@pytest.mark.parametrize(("flag", "dtype"), [("", torch.float32), ("fp64", torch.float64)])
def test_router_dtype_sets_the_precision_of_the_weights_of_choices(flag, dtype):
    router = router_on_logits(LOGITS.bfloat16(), moe_router_dtype=flag)
    assert router(torch.eye(3, dtype=torch.bfloat16))[0].probs.dtype == dtype


def test_expert_bias_keeps_its_bits_when_the_model_is_cast():
    router = router_on_logits(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
    )
    router.expert_bias.detach().fill_(0.1234567)
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias.dtype == torch.float32
    assert (router.expert_bias == 0.1234567).all()
    assert named_shards(router)["expert_bias"].shape == (4,)
    assert "step_counts" not in router.state_dict()


def test_init_std_zero_draws_nothing():
    before = torch.random.get_rng_state()
    router = Router(3, config(), init_std=0.0)
    assert router.weight.abs().sum() == 0
    assert torch.equal(torch.random.get_rng_state(), before)
