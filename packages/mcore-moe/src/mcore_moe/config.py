"""Options of a mixture-of-experts layer as plain frozen data, and the checks among them.

Field names are Megatron's flags with underscores; each field's docstring is its help text.
``num_experts=0`` means no experts; 0 or an empty string turns a feature off. The standard
library only.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from mcore_base.field_checks import check_at_least, check_choices


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Routing, balancing, dispatch and experts of every mixture-of-experts layer."""

    num_experts: int = 0
    """Experts in each such layer; 0: the model is dense."""

    moe_router_topk: int = 2
    """Experts that each token goes to."""

    moe_ffn_hidden_size: int = 0
    """Width of one expert; 0: the width of the dense feed-forward layer."""

    moe_latent_size: int = 0
    """Width in which routed experts compute: tokens are projected down to it before they are
    dispatched, and the results up again; 0: the model's own."""

    moe_layer_freq: str = "1"
    """Which layers have experts: "N" for every N-th from layer 0, or a list of 0 and 1, one
    a layer, which may be written with + and *: "[0]*3+[1]*58"."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """How logits become scores."""

    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice (weights do not sum to 1), not after it."""

    moe_router_topk_scaling_factor: float = 0.0
    """Factor on the weights of the chosen experts; 0: none."""

    moe_router_num_groups: int = 0
    """Groups of neighbouring experts for group-limited routing; 0: off."""

    moe_router_group_topk: int = 0
    """Groups that each token may use."""

    moe_router_group_score_topk: int = 0
    """Best experts of a group whose scores sum to its own; 0: as many as it may give,
    --moe-router-topk / --moe-router-group-topk."""

    moe_router_enable_expert_bias: bool = False
    """Balance by a bias on the choice, moved after each step, instead of by a loss."""

    moe_router_bias: bool = False
    """Give the router's linear map a bias, which takes part in choice and weights alike."""

    moe_router_bias_update_rate: float = 1e-3
    """How far the expert bias moves a step."""

    moe_router_dtype: Literal["", "fp32", "fp64"] = ""
    """Precision of the router's GEMM; empty: that of the activations."""

    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"
    ] = "aux_loss"
    """Balance over the micro-batch, each sequence, the whole step's batch, by assignment, or
    not at all."""

    moe_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss; 1e-2 is a usual start."""

    moe_z_loss_coeff: float = 0.0
    """Weight of the loss on large router logits; 1e-3 is a usual start."""

    moe_router_force_load_balancing: bool = False
    """Give every expert as many tokens, and each token experts of several ranks (with 2, 3, 4
    or 6 experts: neighbours, which may be of one rank), whatever the scores, for benchmarks:
    the router then learns weights only."""

    moe_input_jitter_eps: float = 0.0
    """Multiply the router's input by uniform noise in [1-eps, 1+eps] in training."""

    moe_expert_capacity_factor: float = 0.0
    """Rows an expert takes from a rank, in units of the even share; 0: no token is dropped."""

    moe_pad_expert_input_to_capacity: bool = False
    """Fill every expert's rows with zeros up to its capacity: all sizes become fixed."""

    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens stay when an expert is full: those of the largest weights, or the first."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "deepep", "symmetric"] = (
        "alltoall"
    )
    """How tokens are sent to the ranks of their experts; deepep: by that library's kernels;
    symmetric: each GPU reads its rows from the memory of the others of its node. Megatron's
    default: allgather."""

    moe_dispatch_dtype: Literal["", "fp8"] = ""
    """Format in which tokens are sent to the ranks of their experts; empty: the model's own;
    fp8: e4m3 with a scale for each token, half the bytes, and the same numbers on one rank.
    Results and gradients keep the model's."""

    moe_experts_dtype: Literal["", "fp8"] = ""
    """Format of the experts' GEMMs; empty: the model's own; fp8: e4m3 with a scale for each row
    of tokens, gradients and weights; weights' gradients keep the model's. On an H200 faster
    for experts of width 2048 and more; below a width of 1024 slower than bf16."""

    moe_apply_probs_on_input: bool = False
    """Multiply an expert's input by the weight of the choice, not its output (Llama 4)."""

    moe_expert_rows_limit: float = 0.0
    """Rows that a rank computes at once, in units of the mean over the ranks; with more it
    computes in parts and again in backward, so that routing never costs memory; 0: no limit.
    2 is a good limit. With allgather and symmetric these are the rows that experts always get,
    so that the host waits for no number: in one part if it is --expert-model-parallel-size or
    more, for symmetric also if it is 0."""

    moe_grouped_gemm: bool = True
    """Compute all experts of a rank in one grouped GEMM where the device has one. Megatron's
    default: off."""

    moe_wgrad_micro_batches: int = 1
    """Micro-batches whose rows one grouped GEMM adds to the main gradients of the experts'
    weights, which are read and written once for all of them: faster with a few hundred rows an
    expert in bf16, and no faster in float32. Keeps the rows of all but one: for a choice of a
    token the inputs of both GEMMs and the gradients of their results."""

    moe_shared_expert_intermediate_size: int = 0
    """Width of the expert that every token passes through; 0: none."""

    moe_shared_expert_overlap: bool = False
    """Compute the shared expert while tokens are sent to the ranks of their experts, and in
    backward while their gradients are returned."""

    moe_split_batch_overlap: bool = False
    """Cut the rows of a micro-batch in two, in the order of their experts, and run the
    all-to-all of one half during the GEMMs of the other, forward and backward."""

    moe_shared_expert_gate: bool = False
    """Weigh the shared expert by a learned sigmoid of the token."""

    def __post_init__(self) -> None:
        if self.num_experts < 0:
            raise ValueError(f"--num-experts {self.num_experts} must be 0 (off) or more.")
        if self.num_experts == 0:
            return
        check_choices(self)
        check_at_least(self, 0, "moe_ffn_hidden_size", "moe_latent_size")
        check_at_least(self, 0, "moe_shared_expert_intermediate_size")
        check_at_least(self, 0, "moe_router_topk_scaling_factor", "moe_router_bias_update_rate")
        check_at_least(self, 1, "moe_wgrad_micro_batches")
        self._check_choice()
        self._check_groups()
        self._check_losses()
        self._check_dispatch()
        self._check_capacity()

    def _check_choice(self) -> None:
        if not 1 <= self.moe_router_topk <= self.num_experts:
            raise ValueError(
                f"--moe-router-topk {self.moe_router_topk} must be from 1 to --num-experts "
                f"{self.num_experts}."
            )
        softmax = self.moe_router_score_function == "softmax"
        after = softmax and not self.moe_router_pre_softmax
        sinkhorn = self.moe_router_load_balancing_type == "sinkhorn"
        if self.moe_router_topk == 1 and after and not sinkhorn:
            raise ValueError(
                "--moe-router-topk 1 with softmax after the choice gives every token weight 1, "
                "and the router no gradient. Add --moe-router-pre-softmax, or use "
                "--moe-router-score-function sigmoid."
            )
        if sinkhorn and not (after and self.moe_router_num_groups == 0):
            raise ValueError(
                "--moe-router-load-balancing-type sinkhorn has its own scores: leave out "
                "--moe-router-score-function, --moe-router-pre-softmax and "
                "--moe-router-num-groups."
            )
        if self.moe_router_pre_softmax and not softmax:
            raise ValueError(
                "--moe-router-pre-softmax has no effect with --moe-router-score-function "
                f"{self.moe_router_score_function}: leave it out."
            )
        if self.moe_router_enable_expert_bias and sinkhorn:
            raise ValueError(
                "--moe-router-enable-expert-bias has no effect with "
                "--moe-router-load-balancing-type sinkhorn: leave one of them out."
            )

    def _check_groups(self) -> None:
        groups, kept = self.moe_router_num_groups, self.moe_router_group_topk
        if groups == 0 and kept == 0:
            if self.moe_router_group_score_topk:
                raise ValueError(
                    "--moe-router-group-score-topk has no effect without "
                    "--moe-router-num-groups: leave it out."
                )
            return
        if groups < 1 or not 1 <= kept <= groups:
            raise ValueError(
                f"--moe-router-group-topk {kept} must be from 1 to --moe-router-num-groups "
                f"{groups}: give both, or neither."
            )
        if self.num_experts % groups:
            raise ValueError(
                f"--moe-router-num-groups {groups} must divide --num-experts "
                f"{self.num_experts}."
            )
        size, scored = self.num_experts // groups, self.moe_router_group_score_topk
        if not 0 <= scored <= size:
            raise ValueError(
                f"--moe-router-group-score-topk {scored} must be from 0 to the experts of a "
                f"group, {size}."
            )
        if (not scored and self.moe_router_topk % kept) or self.moe_router_topk > kept * size:
            raise ValueError(
                f"--moe-router-topk {self.moe_router_topk} must be a multiple of "
                f"--moe-router-group-topk {kept}, and fit into the experts of the kept groups "
                f"({kept * size})."
            )

    def _check_losses(self) -> None:
        losses = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps")
        check_at_least(self, 0, *losses)
        has_loss = self.moe_router_load_balancing_type.endswith("aux_loss")
        if self.moe_aux_loss_coeff and not has_loss:
            raise ValueError(
                f"--moe-aux-loss-coeff {self.moe_aux_loss_coeff} has no effect with "
                f"--moe-router-load-balancing-type {self.moe_router_load_balancing_type}: "
                "set it to 0, or choose aux_loss."
            )
        for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
            if getattr(self, name) and not self.moe_shared_expert_intermediate_size:
                raise ValueError(
                    f"--{name.replace('_', '-')} has no effect without a shared expert: set "
                    "--moe-shared-expert-intermediate-size."
                )

    def _check_dispatch(self) -> None:
        if self.moe_split_batch_overlap and self.moe_token_dispatcher_type != "alltoall":
            raise ValueError(
                "--moe-split-batch-overlap cuts what an all-to-all sends: use "
                "--moe-token-dispatcher-type alltoall, or leave it out."
            )
        self._check_kernels()
        if self.moe_experts_dtype and not self.moe_grouped_gemm:
            raise ValueError(
                f"--moe-experts-dtype {self.moe_experts_dtype} multiplies in a grouped GEMM: "
                "leave out --no-moe-grouped-gemm."
            )

    def _check_kernels(self) -> None:
        kind = self.moe_token_dispatcher_type
        if kind not in ("deepep", "symmetric"):
            return
        names = ("moe_dispatch_dtype", "moe_shared_expert_overlap")
        for name in (*names, "moe_expert_rows_limit") if kind == "deepep" else names:
            if getattr(self, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} has no effect with "
                    f"--moe-token-dispatcher-type {kind}: leave it out, or use alltoall."
                )
        if kind == "deepep" and self.moe_router_dtype == "fp64":
            raise ValueError(
                "--moe-token-dispatcher-type deepep sends weights in float32: use "
                "--moe-router-dtype fp32, or alltoall."
            )

    def _check_capacity(self) -> None:
        limit = self.moe_expert_rows_limit
        if limit < 0 or 0 < limit < 1:
            raise ValueError(
                f"--moe-expert-rows-limit {limit} must be 0 (no limit) or at least 1, the mean."
            )
        if self.moe_expert_capacity_factor < 0:
            raise ValueError(
                f"--moe-expert-capacity-factor {self.moe_expert_capacity_factor} must be 0 "
                "(no token is dropped) or more."
            )
        if self.moe_token_drop_policy != "probs" and not self.moe_expert_capacity_factor:
            raise ValueError(
                f"--moe-token-drop-policy {self.moe_token_drop_policy} has no effect without "
                "--moe-expert-capacity-factor: leave it out."
            )
        if not self.moe_pad_expert_input_to_capacity:
            return
        if self.moe_expert_capacity_factor == 0:
            raise ValueError(
                "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor."
            )
        if self.moe_token_dispatcher_type != "alltoall":
            raise ValueError(
                "--moe-pad-expert-input-to-capacity needs --moe-token-dispatcher-type alltoall."
            )


def expert_capacity(num_tokens: int, num_experts: int, topk: int, factor: float) -> int:
    """Rows that one expert takes from one rank: its even share times ``factor``, rounded up."""
    return ceil(num_tokens * topk / num_experts * factor)


def one_step_option(config: MoEConfig) -> str:
    """Return why an option excludes exchanges in two steps; empty: no option does."""
    flag = "--hierarchical-expert-parallel-size sends tokens in two steps"
    if config.moe_token_dispatcher_type != "alltoall":
        return f"{flag}: use --moe-token-dispatcher-type alltoall, or leave it out."
    for name in (
        "moe_expert_rows_limit",
        "moe_split_batch_overlap",
        "moe_pad_expert_input_to_capacity",
    ):
        if getattr(config, name):
            return f"{flag}, --{name.replace('_', '-')} needs one: leave out one of the two."
    return ""
