"""Options of a mixture-of-experts layer, and the rules that they must satisfy together.

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
WIDEST_GATHERED = 2048
"""Most rows of one expert's fc1 weight on a rank for which GEMMs gather tokens. For wider
experts a copy of the tokens' rows and a GEMM of sorted rows are faster (H200)."""
_NO_MAIN_GRADS = "as there are no main gradients in float32"


def _has_whole_experts(values: Any) -> bool:
    """Return whether experts are distributed over several ranks, each complete on one rank."""
    return values.expert_model_parallel_size > 1 and values.expert_tensor_size == 1


def _wrong_groups(values: Any) -> str:
    """Return the error of options for groups of experts; empty: no error."""
    groups, group_topk = values.moe_router_num_groups, values.moe_router_group_topk
    num_experts, topk = values.num_experts, values.moe_router_topk
    if groups == 0 and group_topk == 0:
        return ""
    if groups < 1 or not 1 <= group_topk <= groups:
        return (
            f"--moe-router-group-topk {group_topk} must be from 1 to --moe-router-num-groups "
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
    if (not scored and topk % group_topk) or topk > group_topk * size:
        return (
            f"--moe-router-topk {topk} must be a multiple of --moe-router-group-topk "
            f"{group_topk}, and at most the experts of the chosen groups, {group_topk * size}."
        )
    return ""


def _idle_rate(values: Any) -> str:
    """Return the error of an expert bias rate without effect or with PEFT; empty otherwise."""
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
    """Experts in each mixture-of-experts layer; 0: the model is dense."""

    moe_router_topk: int = 2
    """Number of experts that process each token."""

    moe_ffn_hidden_size: int = option(0, minimum=0)
    """Width of one expert; 0: the width of the dense feed-forward layer."""

    moe_latent_size: int = option(0, minimum=0, shrinks_to=12)
    """Width of the inputs and outputs of routed experts: tokens are projected down to it before
    they are dispatched, and results are projected up again; 0: --hidden-size."""

    moe_layer_freq: str = "1"
    """Layers with experts: "N" for every N-th layer from layer 0, or a list with 0 or 1 for
    each layer, which may be written with + and *: "[0]*3+[1]*58"."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = (
        "softmax"
    )
    """Function from logits to scores. sparsemixer (Phi-3.5-MoE): the weight of the best expert
    is its share of a softmax over experts with similar logits; the weight of the second expert
    is its share of a softmax without the best. Training does not sample experts, and chooses
    as inference does."""

    moe_router_sparsemixer_eps: float = option(
        0.01, minimum=0, part_of={"moe_router_score_function": "sparsemixer"}
    )
    """With sparsemixer: the softmax excludes logits that differ from the best by more than
    twice this share of their magnitude."""

    moe_router_pre_softmax: bool = option(
        False,
        idle_with={
            "moe_router_score_function": ("sigmoid", "sqrtsoftplus", "sparsemixer"),
        },
    )
    """Apply the softmax to all experts before the choice (weights do not sum to 1); by default
    it is applied to the chosen experts."""

    moe_router_norm_topk_prob: bool = option(
        True, idle_with={"moe_router_score_function": ("softmax", "sparsemixer")}
    )
    """With sigmoid or sqrtsoftplus: divide the scores of the chosen experts by their sum."""

    moe_router_topk_scaling_factor: float = option(0.0, minimum=0)
    """Factor on the weights of the chosen experts; 0: none."""

    moe_router_num_groups: int = 0
    """Groups of neighbouring experts for group-limited routing; 0: off."""

    moe_router_group_topk: int = 0
    """Groups that each token may use."""

    moe_router_group_score_topk: int = option(0, needs={"moe_router_num_groups": ON})
    """Number of a group's best experts whose scores are summed as the group's score; 0:
    --moe-router-topk / --moe-router-group-topk."""

    moe_router_enable_expert_bias: bool = option(
        False, idle_with={"moe_router_load_balancing_type": "sinkhorn"}
    )
    """Balance experts by a bias that is added to scores for the choice only and updated after
    each step."""

    moe_router_bias: bool = False
    """Give the router's linear a bias, which changes both the choice and the weights."""

    moe_router_bias_update_rate: float = option(1e-3, minimum=0)
    """Amount by which a step raises or lowers the expert bias."""

    moe_router_dtype: Literal["", "fp32", "fp64"] = ""
    """Precision of the router's GEMM; empty: the dtype of the activations."""

    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"
    ] = "aux_loss"
    """Balancing of experts: a loss over the micro-batch (aux_loss), each sequence
    (seq_aux_loss) or the batch of the step (global_aux_loss); a balanced assignment of tokens
    (sinkhorn); or none."""

    moe_aux_loss_coeff: float = option(
        0.0, minimum=0, idle_with={"moe_router_load_balancing_type": ("sinkhorn", "none")}
    )
    """Coefficient of the load-balancing loss, such as 1e-2."""

    moe_z_loss_coeff: float = option(0.0, minimum=0)
    """Coefficient of the z-loss, which keeps router logits small, such as 1e-3."""

    moe_router_force_load_balancing: bool = False
    """For benchmarks: ignore scores in the choice of experts, and give every expert equally
    many tokens and each token experts on several ranks (with 2, 3, 4 or 6 experts: neighbouring
    experts, possibly on one rank). The router then learns weights only."""

    moe_input_jitter_eps: float = option(0.0, minimum=0, shrinks_to=0.0)
    """Multiply the router's input by uniform noise in [1-eps, 1+eps] in training."""

    moe_expert_capacity_factor: float = option(
        0.0, minimum=0, zero="no token is dropped", shrinks_to=0.0
    )
    """Rows that an expert accepts from a rank, as a multiple of the even share; 0: no token is
    dropped."""

    moe_pad_expert_input_to_capacity: bool = option(
        False,
        needs={
            "moe_expert_capacity_factor": ON,
            "moe_token_dispatcher_type": "alltoall",
        },
        shrinks_to=False,
    )
    """Pad every expert's rows with zeros to its capacity, so that all sizes are fixed."""

    moe_token_drop_policy: Literal["probs", "position"] = option(
        "probs", needs={"moe_expert_capacity_factor": ON}
    )
    """Tokens that an expert with too many tokens keeps: those with the largest weights (probs),
    or the first ones (position)."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "deepep", "symmetric"] = option(
        "alltoall", selects_path="dispatch.{moe_token_dispatcher_type}"
    )
    """Exchange of tokens between the ranks of the experts: alltoall, allgather, deepep (kernels
    of the DeepEP library), or symmetric (each GPU reads its rows from the memory of the other
    GPUs of the node). Megatron's default: allgather."""

    moe_dispatch_dtype: Literal["", "fp8"] = option("", idle_with=_GIVEN_KERNELS)
    """Format in which tokens are sent to the ranks of their experts; empty: the model's dtype;
    fp8: e4m3 with a scale for each token, which halves the bytes. One rank rounds tokens in the
    same way. Results and gradients keep the model's dtype."""

    moe_experts_dtype: Literal["", "fp8"] = option(
        "", excludes={"moe_grouped_gemm": Because("as it multiplies in a grouped GEMM", False)}
    )
    """Format of the experts' GEMMs; empty: the model's dtype; fp8: e4m3 with a scale for each
    row of tokens, gradients and weights; weight gradients keep the model's dtype. On an H200
    faster than bf16 for experts of width 2048 and more, and slower below a width of 1024."""

    moe_apply_probs_on_input: bool = False
    """Multiply an expert's input, not its output, by the router's weight (Llama 4)."""

    moe_expert_rows_limit: float = option(
        0.0, idle_with={"moe_token_dispatcher_type": "deepep"}
    )
    """Rows that a rank computes at once, as a multiple of the mean over the ranks; more rows
    are computed in parts, and again in backward, so that uneven routing does not need more
    memory; 0: no limit. 2 is a good limit. With allgather and symmetric each part has this
    fixed number of rows, and the host waits for no counts; there is one part if the limit is
    --expert-model-parallel-size or more, for symmetric also if it is 0."""

    moe_grouped_gemm: bool = True
    """Compute all experts of a rank in one grouped GEMM, if the device supports it. Megatron's
    default: off."""

    moe_wgrad_micro_batches: int | Literal["auto"] = option(
        "auto",
        minimum=1,
        neutral=1,
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
                "which overwrites the rows in the next micro-batch", "local"
            ),
            "transformer_impl": Because(
                "which adds each micro-batch separately", "transformer_engine"
            ),
            "moe_grouped_gemm": Because("which has no such GEMM", False),
            "peft": Because("which freezes these weights", "lora", "dora"),
        },
    )
    """Number of micro-batches whose weight gradients of experts one grouped GEMM adds to the
    main gradients, which are then read and written once: faster in bf16 with a few hundred
    rows per expert, not in float32. Memory: for each choice of a token the inputs of both
    GEMMs and the gradients of their outputs, of all but one of these micro-batches. auto: on
    GPUs in bf16, 2, 4 or 8 if the planner predicts a gain of 2 % or more and the memory fits,
    as the run's header states; elsewhere 1."""

    moe_shared_expert_intermediate_size: int = option(0, minimum=0)
    """Width of the shared expert, which processes every token; 0: no shared expert."""

    moe_shared_expert_overlap: bool = option(
        False,
        needs={"moe_shared_expert_intermediate_size": ON},
        idle_with=_GIVEN_KERNELS,
    )
    """Compute the shared expert while tokens are sent to the ranks of their experts, and its
    backward while gradients are returned."""

    moe_split_batch_overlap: bool = option(
        False, needs={"moe_token_dispatcher_type": "alltoall"}
    )
    """Split the rows of a micro-batch in two halves, in the order of their experts, and run the
    all-to-all of one half during the GEMMs of the other, in forward and backward."""

    moe_shared_expert_gate: bool = option(
        False, needs={"moe_shared_expert_intermediate_size": ON}
    )
    """Multiply the output of the shared expert by a learned sigmoid of the token."""

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
            "1 (the mean).",
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

    @property
    def num_wgrads_together(self) -> int:
        """``moe_wgrad_micro_batches`` as a number; 1 for ``auto``."""
        number = self.moe_wgrad_micro_batches
        return 1 if number == "auto" else number


def expert_capacity(num_tokens: int, num_experts: int, topk: int, factor: float) -> int:
    """Return the rows that an expert accepts from a rank: factor x even share, rounded up."""
    return ceil(num_tokens * topk / num_experts * factor)


def one_step_option(config: Any) -> str:
    """Return the error if an option excludes exchanges in two steps; empty otherwise.

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
            return f"{name}, {flag(other)} requires a single step: leave out one of the two."
    return ""
