"""Options of a mixture-of-experts layer as plain frozen data, and the checks among them.

Field names are Megatron's flags with underscores; each field's docstring is its help text.
``num_experts=0`` means no experts; 0 or an empty string turns a feature off. The standard
library only.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Literal

from mcore_base.options import ON, Because, Options, Rule, When, flag, option

_GIVEN_KERNELS = {
    "moe_token_dispatcher_type": Because(
        "which has its own kernels", "deepep", "symmetric", instead="use alltoall"
    )
}
_NO_MAIN_GRADS = "as there are no main gradients in float32"


def _has_whole_experts(values: Any) -> bool:
    """Whether experts are spread over several ranks, and none is split."""
    return values.expert_model_parallel_size > 1 and values.expert_tensor_size == 1


def _wrong_groups(values: Any) -> str:
    """Return the fault of options for groups of experts; empty: no fault."""
    groups, kept = values.moe_router_num_groups, values.moe_router_group_topk
    num_experts, topk = values.num_experts, values.moe_router_topk
    if groups == 0 and kept == 0:
        return ""
    if groups < 1 or not 1 <= kept <= groups:
        return (
            f"--moe-router-group-topk {kept} must be from 1 to --moe-router-num-groups "
            f"{groups}: give both, or neither."
        )
    if num_experts % groups:
        return f"--moe-router-num-groups {groups} must divide --num-experts {num_experts}."
    size, scored = num_experts // groups, values.moe_router_group_score_topk
    if not 0 <= scored <= size:
        return (
            f"--moe-router-group-score-topk {scored} must be from 0 to the experts of a "
            f"group, {size}."
        )
    if (not scored and topk % kept) or topk > kept * size:
        return (
            f"--moe-router-topk {topk} must be a multiple of --moe-router-group-topk {kept}, "
            f"and fit into the experts of the kept groups ({kept * size})."
        )
    return ""


def _idle_rate(values: Any) -> str:
    """Return why a rate of the expert bias has no effect, or cannot have it; empty: it has."""
    rate, is_on = values.moe_router_bias_update_rate, values.moe_router_enable_expert_bias
    if values.num_experts and not is_on and rate != 1e-3:
        return (
            f"--moe-router-bias-update-rate {rate} has no effect without "
            "--moe-router-enable-expert-bias: leave it out, or give both."
        )
    if values.num_experts and is_on and rate and values.peft != "none":
        return (
            f"--moe-router-bias-update-rate {rate} would change routers that --peft freezes: "
            "set it to 0."
        )
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig(Options):
    """Routing, balancing, dispatch and experts of every mixture-of-experts layer."""

    part_of: ClassVar = {"num_experts": ON}

    num_experts: int = option(0, minimum=0, zero="off")
    """Experts in each such layer; 0: the model is dense."""

    moe_router_topk: int = 2
    """Experts that each token goes to."""

    moe_ffn_hidden_size: int = option(0, minimum=0)
    """Width of one expert; 0: the width of the dense feed-forward layer."""

    moe_latent_size: int = option(0, minimum=0, shrinks_to=12)
    """Width in which routed experts compute: tokens are projected down to it before they are
    dispatched, and the results up again; 0: the model's own."""

    moe_layer_freq: str = "1"
    """Which layers have experts: "N" for every N-th from layer 0, or a list of 0 and 1, one
    a layer, which may be written with + and *: "[0]*3+[1]*58"."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = (
        "softmax"
    )
    """How logits become scores. sparsemixer (Phi-3.5-MoE): the weight of the best expert is its
    share of a softmax over all experts with logits near its own, that of the second its share
    of one without the best; training chooses as inference does, and samples no experts."""

    moe_router_sparsemixer_eps: float = option(
        0.01, minimum=0, part_of={"moe_router_score_function": "sparsemixer"}
    )
    """With sparsemixer: logits that differ from the best by more than twice this share of their
    magnitude are left out of the softmax."""

    moe_router_pre_softmax: bool = option(
        False,
        idle_with={
            "moe_router_score_function": ("sigmoid", "sqrtsoftplus", "sparsemixer"),
        },
    )
    """Softmax over all experts before the choice (weights do not sum to 1), not after it."""

    moe_router_norm_topk_prob: bool = option(
        True, idle_with={"moe_router_score_function": ("softmax", "sparsemixer")}
    )
    """Divide the scores of the chosen experts by their sum, with sigmoid or sqrtsoftplus."""

    moe_router_topk_scaling_factor: float = option(0.0, minimum=0)
    """Factor on the weights of the chosen experts; 0: none."""

    moe_router_num_groups: int = 0
    """Groups of neighbouring experts for group-limited routing; 0: off."""

    moe_router_group_topk: int = 0
    """Groups that each token may use."""

    moe_router_group_score_topk: int = option(0, needs={"moe_router_num_groups": ON})
    """Best experts of a group whose scores sum to its own; 0: as many as it may give,
    --moe-router-topk / --moe-router-group-topk."""

    moe_router_enable_expert_bias: bool = option(
        False, idle_with={"moe_router_load_balancing_type": "sinkhorn"}
    )
    """Balance by a bias on the choice, moved after each step, instead of by a loss."""

    moe_router_bias: bool = False
    """Give the router's linear map a bias, which takes part in choice and weights alike."""

    moe_router_bias_update_rate: float = option(1e-3, minimum=0)
    """How far the expert bias moves a step."""

    moe_router_dtype: Literal["", "fp32", "fp64"] = ""
    """Precision of the router's GEMM; empty: that of the activations."""

    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"
    ] = "aux_loss"
    """Balance over the micro-batch, each sequence, the whole step's batch, by assignment, or
    not at all."""

    moe_aux_loss_coeff: float = option(
        0.0, minimum=0, idle_with={"moe_router_load_balancing_type": ("sinkhorn", "none")}
    )
    """Weight of the load-balancing loss; 1e-2 is a usual start."""

    moe_z_loss_coeff: float = option(0.0, minimum=0)
    """Weight of the loss on large router logits; 1e-3 is a usual start."""

    moe_router_force_load_balancing: bool = False
    """Give every expert as many tokens, and each token experts of several ranks (with 2, 3, 4
    or 6 experts: neighbours, which may be of one rank), whatever the scores, for benchmarks:
    the router then learns weights only."""

    moe_input_jitter_eps: float = option(0.0, minimum=0, shrinks_to=0.0)
    """Multiply the router's input by uniform noise in [1-eps, 1+eps] in training."""

    moe_expert_capacity_factor: float = option(
        0.0, minimum=0, zero="no token is dropped", shrinks_to=0.0
    )
    """Rows an expert takes from a rank, in units of the even share; 0: no token is dropped."""

    moe_pad_expert_input_to_capacity: bool = option(
        False,
        needs={
            "moe_expert_capacity_factor": ON,
            "moe_token_dispatcher_type": "alltoall",
        },
        shrinks_to=False,
    )
    """Fill every expert's rows with zeros up to its capacity: all sizes become fixed."""

    moe_token_drop_policy: Literal["probs", "position"] = option(
        "probs", needs={"moe_expert_capacity_factor": ON}
    )
    """Which tokens stay when an expert is full: those of the largest weights, or the first."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "deepep", "symmetric"] = option(
        "alltoall", selects_path="dispatch.{moe_token_dispatcher_type}"
    )
    """How tokens are sent to the ranks of their experts; deepep: by that library's kernels;
    symmetric: each GPU reads its rows from the memory of the others of its node. Megatron's
    default: allgather."""

    moe_dispatch_dtype: Literal["", "fp8"] = option("", idle_with=_GIVEN_KERNELS)
    """Format in which tokens are sent to the ranks of their experts; empty: the model's own;
    fp8: e4m3 with a scale for each token, half the bytes, and the same numbers on one rank.
    Results and gradients keep the model's."""

    moe_experts_dtype: Literal["", "fp8"] = option(
        "", excludes={"moe_grouped_gemm": Because("as it multiplies in a grouped GEMM", False)}
    )
    """Format of the experts' GEMMs; empty: the model's own; fp8: e4m3 with a scale for each row
    of tokens, gradients and weights; weights' gradients keep the model's. On an H200 faster
    for experts of width 2048 and more; below a width of 1024 slower than bf16."""

    moe_apply_probs_on_input: bool = False
    """Multiply an expert's input by the weight of the choice, not its output (Llama 4)."""

    moe_expert_rows_limit: float = option(
        0.0, idle_with={"moe_token_dispatcher_type": "deepep"}
    )
    """Rows that a rank computes at once, in units of the mean over the ranks; with more it
    computes in parts and again in backward, so that routing never costs memory; 0: no limit.
    2 is a good limit. With allgather and symmetric these are the rows that experts always get,
    so that the host waits for no number: in one part if it is --expert-model-parallel-size or
    more, for symmetric also if it is 0."""

    moe_grouped_gemm: bool = True
    """Compute all experts of a rank in one grouped GEMM where the device has one. Megatron's
    default: off."""

    moe_wgrad_micro_batches: int = option(
        1,
        minimum=1,
        excludes={
            "pipeline_schedule": Because(
                "which has its own time for weight gradients", "zb-h1", "zb-v", "dualpipev"
            ),
            "is_fully_sharded": When(
                "is_fully_sharded",
                bool,
                "--data-parallel-sharding-strategy optim_grads or optim_grads_params",
                "which sums gradients in every backward",
            ),
            "main_grads_dtype": Because(_NO_MAIN_GRADS, "bf16"),
            "grad_reduce_in_bf16": Because(_NO_MAIN_GRADS),
            "cuda_graph_impl": Because(
                "which writes rows of the next micro-batch over these", "local"
            ),
            "transformer_impl": Because("which adds each by itself", "transformer_engine"),
            "moe_grouped_gemm": Because("which has no such GEMM", False),
            "peft": Because("which freezes these weights", "lora", "dora"),
        },
    )
    """Micro-batches whose rows one grouped GEMM adds to the main gradients of the experts'
    weights, which are read and written once for all of them: faster with a few hundred rows an
    expert in bf16, and no faster in float32. Keeps the rows of all but one: for a choice of a
    token the inputs of both GEMMs and the gradients of their results."""

    moe_shared_expert_intermediate_size: int = option(0, minimum=0)
    """Width of the expert that every token passes through; 0: none."""

    moe_shared_expert_overlap: bool = option(
        False,
        needs={"moe_shared_expert_intermediate_size": ON},
        idle_with=_GIVEN_KERNELS,
    )
    """Compute the shared expert while tokens are sent to the ranks of their experts, and in
    backward while their gradients are returned."""

    moe_split_batch_overlap: bool = option(
        False, needs={"moe_token_dispatcher_type": "alltoall"}
    )
    """Cut the rows of a micro-batch in two, in the order of their experts, and run the
    all-to-all of one half during the GEMMs of the other, forward and backward."""

    moe_shared_expert_gate: bool = option(
        False, needs={"moe_shared_expert_intermediate_size": ON}
    )
    """Weigh the shared expert by a learned sigmoid of the token."""

    rules = (
        Rule(
            ("moe_router_topk", "num_experts"),
            lambda v: v.num_experts and not 1 <= v.moe_router_topk <= v.num_experts,
            "--moe-router-topk {moe_router_topk} must be from 1 to --num-experts "
            "{num_experts}.",
        ),
        Rule(
            ("moe_router_topk", "scores_chosen", "moe_router_load_balancing_type"),
            lambda v: (
                v.num_experts
                and v.moe_router_topk == 1
                and v.scores_chosen
                and v.moe_router_load_balancing_type != "sinkhorn"
            ),
            "--moe-router-topk 1 with softmax after the choice gives every token weight 1, and "
            "the router no gradient. Add --moe-router-pre-softmax, or use "
            "--moe-router-score-function sigmoid.",
        ),
        Rule(
            (
                *("moe_router_score_function", "moe_router_topk", "moe_router_num_groups"),
                "moe_router_enable_expert_bias",
            ),
            lambda v: (
                v.moe_router_score_function == "sparsemixer"
                and (
                    v.moe_router_topk != 2
                    or v.moe_router_num_groups
                    or v.moe_router_enable_expert_bias
                )
            ),
            "--moe-router-score-function sparsemixer chooses 2 of all experts: use "
            "--moe-router-topk 2 without --moe-router-num-groups and "
            "--moe-router-enable-expert-bias.",
        ),
        Rule(
            ("moe_router_load_balancing_type", "scores_chosen", "moe_router_num_groups"),
            lambda v: (
                v.moe_router_load_balancing_type == "sinkhorn"
                and (not v.scores_chosen or v.moe_router_num_groups)
            ),
            "--moe-router-load-balancing-type sinkhorn has its own scores: leave out "
            "--moe-router-score-function, --moe-router-pre-softmax and "
            "--moe-router-num-groups.",
        ),
        Rule(
            (
                *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk"),
                *("moe_router_group_score_topk", "num_experts"),
            ),
            _wrong_groups,
        ),
        Rule(
            ("moe_router_dtype", "moe_token_dispatcher_type"),
            lambda v: v.moe_token_dispatcher_type == "deepep" and v.moe_router_dtype == "fp64",
            "--moe-token-dispatcher-type deepep sends weights in float32: use "
            "--moe-router-dtype fp32, or alltoall.",
        ),
        Rule(
            ("moe_expert_rows_limit",),
            lambda v: v.moe_expert_rows_limit < 0 or 0 < v.moe_expert_rows_limit < 1,
            "--moe-expert-rows-limit {moe_expert_rows_limit} must be 0 (no limit) or at least "
            "1, the mean.",
        ),
        Rule(
            ("hierarchical_expert_parallel_size", "moe_token_dispatcher_type"),
            lambda v: v.hierarchical_expert_parallel_size and one_step_option(v),
        ),
        Rule(
            ("moe_router_bias_update_rate", "moe_router_enable_expert_bias", "peft"),
            _idle_rate,
        ),
        *(
            Rule(
                (name, "expert_tensor_size", "expert_model_parallel_size"),
                lambda v, name=name: getattr(v, name) and not _has_whole_experts(v),
                f"{flag(name)} has an effect only with --expert-model-parallel-size above 1 "
                "and --expert-tensor-parallel-size 1: leave it out.",
            )
            for name in ("moe_shared_expert_overlap", "moe_split_batch_overlap")
        ),
        Rule(
            ("moe_token_dispatcher_type", "expert_tensor_size", "bf16"),
            lambda v: (
                v.moe_token_dispatcher_type == "deepep"
                and not (v.bf16 and _has_whole_experts(v))
            ),
            "--moe-token-dispatcher-type deepep sends bfloat16 tokens of whole experts over "
            "--expert-model-parallel-size: use --bf16, an --expert-model-parallel-size above 1 "
            "and --expert-tensor-parallel-size 1, or another dispatcher.",
        ),
        Rule(
            ("moe_token_dispatcher_type", "expert_tensor_size"),
            lambda v: v.moe_token_dispatcher_type == "symmetric" and not _has_whole_experts(v),
            "--moe-token-dispatcher-type symmetric reads rows of whole experts over "
            "--expert-model-parallel-size: use one above 1 and --expert-tensor-parallel-size "
            "1, or another dispatcher.",
        ),
        Rule(
            ("moe_experts_dtype", "fp8_format"),
            lambda v: v.moe_experts_dtype and not v.fp8_format,
            "--moe-experts-dtype {moe_experts_dtype} needs --fp8-format, as other linears do: "
            "give it, or leave it out.",
        ),
        Rule(
            ("moe_experts_dtype", "expert_tensor_size"),
            lambda v: v.moe_experts_dtype and v.expert_tensor_size > 1,
            "--moe-experts-dtype {moe_experts_dtype} scales whole rows, which "
            "--expert-tensor-parallel-size {expert_tensor_size} cuts: use 1.",
        ),
    )

    @property
    def scores_chosen(self) -> bool:
        """Whether scores are a softmax over the chosen experts alone."""
        is_softmax = self.moe_router_score_function == "softmax"
        return is_softmax and not self.moe_router_pre_softmax


def expert_capacity(num_tokens: int, num_experts: int, topk: int, factor: float) -> int:
    """Rows that one expert takes from one rank: its even share times ``factor``, rounded up."""
    return ceil(num_tokens * topk / num_experts * factor)


def one_step_option(config: Any) -> str:
    """Return why an option excludes exchanges in two steps; empty: no option does.

    Args:
        config: a ``MoEConfig``, or values that have its fields.
    """
    name = "--hierarchical-expert-parallel-size sends tokens in two steps"
    if config.moe_token_dispatcher_type != "alltoall":
        return f"{name}: use --moe-token-dispatcher-type alltoall, or leave it out."
    for other in (
        "moe_expert_rows_limit",
        "moe_split_batch_overlap",
        "moe_pad_expert_input_to_capacity",
    ):
        if getattr(config, other):
            return f"{name}, {flag(other)} needs one: leave out one of the two."
    return ""
