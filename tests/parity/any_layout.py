"""Layouts drawn at random, each held to one rank: a generator, a runner and a shrinker.

A draw is a table of flags. Draws that the house refuses are drawn again, so a feature that
appears later is covered as soon as nothing refuses it. Of many draws those are kept that
show the most pairs of values not yet seen together (Cohen et al. 1997, the AETG system), as
most faults of composition need two options at once.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from warm_ranks import run_ranks

from mcore_parallel.mesh import ParallelContext
from mcore_train.composition import compose, field_types
from mcore_train.layout_check.certificate import compare_trials
from mcore_train.layout_check.rows import build_rows
from mcore_train.layout_check.trial import run_trial
from mcore_train.layout_check.verification import alone
from mcore_train.options.recipe import to_flags
from mcore_train.resolution import Plan, resolve

Draw = dict[str, Any]
Choices = tuple[tuple[int, int], tuple[int, int]]
"""Two choices: row and place of each."""

BASE: Draw = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "seq_length": 16,
    "vocab_size": 45,
    "make_vocab_size_divisible_by": 4,
    "init_method_std": 0.1,
    "mock_data": True,
    "num_workers": 0,
    "train_iters": 2,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "clip_grad": 0.05,
}
"""What every draw has."""

PP2: Draw = {"pipeline_model_parallel_size": 2}
NO_EXPERTS: Draw = {}
BALANCED: Draw = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_aux_loss_coeff": 0.05}
BIASED: Draw = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
}
SINKHORN: Draw = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_router_load_balancing_type": "sinkhorn",
}
INSTANCES: Draw = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}

OPTIONS: tuple[tuple[Draw, ...], ...] = (
    tuple({"tensor_model_parallel_size": n} for n in (1, 2, 4)),
    ({}, {"sequence_parallel": True}),
    tuple({"pipeline_model_parallel_size": n} for n in (1, 2, 4)),
    (
        {},
        PP2 | {"num_virtual_stages_per_pipeline_rank": 2},
        PP2 | {"pipeline_schedule": "zb-h1"},
        PP2 | {"pipeline_schedule": "zb-v"},
        PP2 | {"pipeline_schedule": "dualpipev"},
        PP2 | {"decoder_first_pipeline_num_layers": 1},
        PP2 | {"pipeline_model_parallel_layout": "Ett|ttL"},
    ),
    (
        {},
        {"context_parallel_size": 2},
        {"context_parallel_size": 2, "cp_comm_type": "p2p"},
        {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
        {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    ),
    (
        NO_EXPERTS,
        BALANCED,
        BALANCED | {"expert_model_parallel_size": 2},
        BALANCED | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        BALANCED | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        BALANCED
        | {
            "expert_model_parallel_size": 2,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_z_loss_coeff": 0.01,
            "moe_shared_expert_intermediate_size": 8,
        },
        BALANCED
        | {
            "moe_layer_freq": "2",
            "moe_token_dispatcher_type": "allgather",
        },
        BIASED,
        BIASED | {"context_parallel_size": 2},
        SINKHORN,
        SINKHORN | {"context_parallel_size": 2},
        SINKHORN | {"expert_model_parallel_size": 2, "moe_router_topk": 1},
        BALANCED | {"expert_model_parallel_size": 2} | INSTANCES,
    ),
    (
        {},
        {"use_distributed_optimizer": True},
        {"overlap_grad_reduce": True, "ddp_bucket_size": 3000},
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "ddp_bucket_size": 3000,
        },
        INSTANCES,
        {"use_torch_fsdp2": True},
        {"data_parallel_sharding_strategy": "optim_grads"},
        {"use_torch_fsdp2": True, "num_distributed_optimizer_instances": 2},
    ),
    (
        {},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
    ),
    ({}, {"use_tp_pp_dp_mapping": True}, {"rank_order": "dp-pp-tp-cp-ep"}),
    (
        {},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "block"},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "distribute_saved_activations": True},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp_act")},
    ),
    (
        {},
        {"untie_embeddings_and_output_weights": True},
        {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5},
        {"mtp_num_layers": 1, "untie_embeddings_and_output_weights": True},
    ),
    (
        {},
        {"num_query_groups": 2},
        {"num_query_groups": 1},
        {"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 8},
        {"num_attention_heads": 12, "num_query_groups": 6, "kv_channels": 8},
    ),
    (
        {},
        {"add_bias_linear": True, "normalization": "LayerNorm"},
        {"add_qkv_bias": True, "qk_layernorm": True},
        {"swiglu": False, "squared_relu": True},
    ),
    (
        {},
        {"position_embedding_type": "learned_absolute", "max_position_embeddings": 16},
        {"reset_position_ids": True},
        {"reset_position_ids": True, "reset_attention_mask": True},
        {"window_size": (5, 0)},
        {"window_size": (5, 0), "window_attn_skip_freq": "2"},
    ),
    ({"micro_batch_size": 1}, {"micro_batch_size": 2}),
)
"""Choices that a draw is made of, one of each row."""

NUM_MICROBATCHES = (1, 2, 3, 4)
_KNOWN = frozenset(field_types())
_CANDIDATES = 60
_NEW_CHOICE = 12


def build_plan(draw: Draw, world_size: int) -> Plan:
    """Resolve a draw.

    Raises:
        ValueError: if the house refuses it.
    """
    return resolve(compose(BASE | draw), world_size)


def is_valid(draw: Draw, world_size: int) -> bool:
    """Whether every flag is known and nothing refuses the draw."""
    if not set(draw) <= _KNOWN:
        return False
    try:
        build_plan(draw, world_size)
    except ValueError:
        return False
    return True


def draws(seed: int, world_size: int, count: int) -> list[Draw]:
    """Choose draws that show many pairs of choices together; the same for the same seed."""
    source = random.Random(seed)
    seen: set[Choices] = set()
    chosen: list[Draw] = []
    while len(chosen) < count:
        candidates = [_draw(source, world_size) for _ in range(_CANDIDATES)]
        valid = [(pairs, draw) for pairs, draw in candidates if is_valid(draw, world_size)]
        if not valid:
            continue
        pairs, draw = max(valid, key=lambda candidate: _news(candidate[0] - seen))
        seen |= pairs
        chosen.append(draw)
    return chosen


def _draw(source: random.Random, world_size: int) -> tuple[set[Choices], Draw]:
    """Draw one choice of each row; return the pairs of choices, and the flags."""
    draw: Draw = {}
    places = []
    for row_number, row in enumerate(OPTIONS):
        # A choice that names a flag of later work is no choice yet. The plain first one comes
        # often: of draws that ask for everything at once nearly all are refused.
        known = [place for place, choice in enumerate(row) if set(choice) <= _KNOWN]
        place = source.choice(known) if source.random() < 0.5 else known[0]
        places.append((row_number, place))
        draw |= row[place]
    data_ranks = max(1, world_size // _model_ranks(draw))
    number = source.choice(NUM_MICROBATCHES)
    size = draw["micro_batch_size"] * data_ranks * number
    # A choice alone is a pair with itself.
    pairs = set(itertools.combinations_with_replacement(places, 2))
    return pairs, draw | {"global_batch_size": size}


def _news(pairs: set[Choices]) -> int:
    """Count pairs; a choice that was never seen counts as many."""
    return sum(_NEW_CHOICE if one == other else 1 for one, other in pairs)


def _model_ranks(draw: Draw) -> int:
    axes = ("tensor", "pipeline")
    ranks = draw.get("context_parallel_size", 1)
    for axis in axes:
        ranks *= draw[f"{axis}_model_parallel_size"]
    return ranks


def failures_of(cases: list[Draw]) -> list[list[str]] | None:
    """Hold each draw to one rank, on every rank of a world; only rank 0 returns.

    Returns:
        For each draw the quantities that are off.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    oracles = {}
    for number, case in enumerate(cases):
        plan = build_plan(case, world_size)
        if number % world_size == rank:
            single = ParallelContext.single()
            oracles[number] = run_trial(alone(plan), single, build_rows(plan))
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(oracles, gathered, dst=0)
    known = {number: trial for part in gathered or () for number, trial in part.items()}
    found = []
    for number, case in enumerate(cases):
        plan = build_plan(case, world_size)
        ctx = ParallelContext.build(
            plan.config.parallelism, embedding_stages=plan.embedding_stages
        )
        trial = run_trial(plan, ctx, build_rows(plan))
        ctx.destroy()
        if rank == 0:
            lines = [line for line in compare_trials(trial, known[number]) if not line.passed]
            found.append([f"{line.what} {line.worst} {line.error:.2e}" for line in lines])
    return found if rank == 0 else None


def check(cases: list[Draw], world_size: int, *, check_shapes: bool = False) -> None:
    """Fail with the shortest flag line that still fails, if any draw does.

    Args:
        cases: draws.
        world_size: ranks of each.
        check_shapes: check annotated shapes too, which takes twice as long.

    Raises:
        AssertionError: with that line and what is off.
    """
    found = all_failures(cases, world_size, check_shapes=check_shapes)
    for case, wrong in zip(cases, found, strict=True):
        if wrong:
            fails = partial(what_fails, world_size=world_size, check_shapes=check_shapes)
            least = shrink(case, fails, world_size)
            lines = "\n  ".join(fails(least))
            raise AssertionError(f"{command_line(least, world_size)}\n  {lines}")


def all_failures(
    cases: list[Draw], world_size: int, *, check_shapes: bool = False
) -> list[list[str]]:
    """Hold draws to one rank in one world; if one raises, each in a world of its own."""
    try:
        options = {"timeout_s": 600.0, "check_shapes": check_shapes}
        return run_ranks(failures_of, world_size, cases, **options)[0]
    except RuntimeError:
        return [what_fails(case, world_size, check_shapes) for case in cases]


def what_fails(draw: Draw, world_size: int, check_shapes: bool) -> list[str]:
    """Run one draw in a world of its own; an exception counts as a failure."""
    options = {"timeout_s": 60.0, "check_shapes": check_shapes}
    try:
        return run_ranks(failures_of, world_size, [draw], **options)[0][0]
    except RuntimeError as error:
        return [str(error).strip().splitlines()[-1]]


def shrink(draw: Draw, fails: Callable[[Draw], Any], world_size: int) -> Draw:
    """Leave out one flag after the other as long as what is left is valid and fails."""
    smaller = next((d for d in _without_one(draw, world_size) if fails(d)), None)
    return draw if smaller is None else shrink(smaller, fails, world_size)


def _without_one(draw: Draw, world_size: int) -> Iterator[Draw]:
    for name in draw:
        rest = {key: value for key, value in draw.items() if key != name}
        if is_valid(rest, world_size):
            yield rest


def command_line(draw: Draw, world_size: int) -> str:
    """Spell a draw as the command that shows it."""
    values = json.loads(json.dumps(BASE | draw))
    return f"mcore-train verify gpt --nproc {world_size} {' '.join(to_flags(values))}"
