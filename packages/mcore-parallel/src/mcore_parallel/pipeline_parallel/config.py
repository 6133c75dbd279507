"""Pipeline options: how layers are split into stages, and the schedule of the stages."""

from dataclasses import dataclass
from typing import Any

from mcore_base.options import Because, Options, Rule, When, option
from mcore_parallel.config import fully_sharded

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev")
"""Names of pipeline schedules."""
V_SHAPED = ("zb-v", "dualpipev")
"""Schedules with two stages on each rank, placed in a V."""
SPLIT_BACKWARD = ("zb-h1", *V_SHAPED)
"""Schedules that compute weight gradients separately from input gradients."""
_SPREAD_EXPERTS = "experts that --expert-model-parallel-size 2 or more spreads"


def _wrong_num_stages(values: Any) -> str:
    """Return an error if the schedule cannot run so many stages per rank, else ''."""
    schedule, stages = values.pipeline_schedule, values.num_virtual_stages_per_pipeline_rank
    name = "--num-virtual-stages-per-pipeline-rank"
    if schedule in V_SHAPED and stages > 2:
        return (
            f"--pipeline-schedule {schedule} runs two stages on a rank, but {name} is "
            f"{stages}: leave that out."
        )
    if schedule == "auto" and stages > 1:
        return (
            f"--pipeline-schedule auto chooses the stages of a rank too: leave {name} out, or "
            "use interleaved."
        )
    if schedule in ("1f1b", "zb-h1") and stages > 1:
        return (
            f"--pipeline-schedule {schedule} runs one stage on a rank, but {name} is {stages}: "
            "use interleaved."
        )
    return ""


def _conflicting_splits(values: Any) -> str:
    """Return the error message if several options split the layers, else ''."""
    options = {
        "--pipeline-model-parallel-layout": bool(values.pipeline_model_parallel_layout),
        "--decoder-first/last-pipeline-num-layers": bool(
            values.decoder_first_pipeline_num_layers or values.decoder_last_pipeline_num_layers
        ),
        "--account-for-embedding/loss-in-pipeline-split": (
            values.account_for_embedding_in_pipeline_split
            or values.account_for_loss_in_pipeline_split
        ),
    }
    chosen = [name for name, is_set in options.items() if is_set]
    message = f"{' and '.join(chosen)} contradict: split layers in one way."
    return message if len(chosen) > 1 else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(Options):
    """How layers are split into pipeline stages, and in which order stages are computed."""

    pipeline_schedule: str = option("", selects_path="pipeline.{pipeline_schedule}")
    """Order of forwards and backwards: 1f1b, interleaved or zb-h1; zb-v or dualpipev, with two
    stages on each rank in a V, so that the first rank holds both ends of the model; auto: the
    fastest schedule that fits in memory, by simulation. Empty: interleaved when ranks hold
    several stages, else 1f1b."""

    pipeline_memory_cap: str = option("", needs={"pipeline_schedule": "auto"})
    """Memory of a rank that --pipeline-schedule auto may use: GiB, or a GPU's name, such as
    h200, for nine tenths of that GPU's memory. Empty: no limit."""

    num_virtual_stages_per_pipeline_rank: int = option(1, minimum=1)
    """Stages (model chunks) that each pipeline rank holds; above 1 the schedule interleaves."""

    microbatch_group_size_per_virtual_pipeline_stage: int = option(
        0,
        minimum=0,
        zero="derive",
        idle_with={"num_virtual_stages_per_pipeline_rank": 1},
    )
    """Micro-batches that a rank runs through one chunk before it goes to the next chunk; 0: the
    pipeline-parallel size."""

    overlap_p2p_communication: bool = option(
        True, idle_with={"pipeline_model_parallel_size": 1}
    )
    """Overlap messages between stages with computation; off: wait for each message where it is
    posted."""

    batch_p2p_communication: bool = option(True, idle_with={"pipeline_model_parallel_size": 1})
    """Post consecutive messages between stages as one operation; off: one by one, so that a
    stage waits for its own input only."""

    overlap_moe_expert_parallel_comm: bool = option(
        False,
        needs=(
            When("num_experts", bool, _SPREAD_EXPERTS),
            When("expert_model_parallel_size", lambda ranks: ranks > 1, _SPREAD_EXPERTS),
        ),
        idle_with={
            "hierarchical_expert_parallel_size": Because("whose two exchanges do not overlap"),
            "moe_token_dispatcher_type": Because(
                "whose exchanges do not overlap",
                *("deepep", "symmetric"),
                instead="use alltoall or allgather",
            ),
        },
        excludes={
            "is_fully_sharded": fully_sharded(
                "since a layer's forward and backward run at one time, and the strategy "
                "gathers its weights for one of them"
            ),
            "cpu_offloading": Because(
                "since there is no order in which --cpu-offloading could fetch"
            ),
        },
    )
    """Run each forward together with the backward of another micro-batch, so that the expert
    all-to-alls of one overlap with the computation of the other. More micro-batches are in
    memory: 2 on a single pipeline rank, up to twice as many in 1f1b, one chunk more in
    interleaved."""

    pipeline_model_parallel_layout: str = ""
    """Stages spelled out, such as ``Et*3|(tt|)*2,L``: E embedding, t layer, m
    multi-token-prediction layer, L loss, | next stage, x*n and (..)*n repeat."""

    decoder_first_pipeline_num_layers: int = option(0, minimum=0, zero="derive")
    """Layers on the first pipeline rank; 0: as many as on the others."""

    decoder_last_pipeline_num_layers: int = option(0, minimum=0, zero="derive")
    """Layers on the last pipeline rank; 0: as many as on the others."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are split over stages."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the head and loss as one layer when layers are split over stages."""

    rules = (
        Rule(
            ("pipeline_schedule",),
            lambda v: v.pipeline_schedule not in ("", "auto", *SCHEDULES),
            "--pipeline-schedule {pipeline_schedule} is not known: use "
            f"{', '.join(SCHEDULES)} or auto.",
        ),
        Rule(
            ("overlap_moe_expert_parallel_comm", "pipeline_schedule"),
            lambda v: (
                v.overlap_moe_expert_parallel_comm
                and v.pipeline_schedule not in ("", "1f1b", "interleaved", "dualpipev")
            ),
            "--overlap-moe-expert-parallel-comm pairs forwards with whole backwards, and "
            "--pipeline-schedule {pipeline_schedule} has none: use 1f1b, interleaved or "
            "dualpipev.",
        ),
        Rule(
            ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank"),
            _wrong_num_stages,
        ),
        Rule(
            ("overlap_moe_expert_parallel_comm", "moe_expert_rows_limit"),
            lambda v: (
                v.overlap_moe_expert_parallel_comm
                and v.moe_token_dispatcher_type == "alltoall"
                and v.moe_expert_rows_limit
            ),
            "--overlap-moe-expert-parallel-comm needs equally many exchanges on all ranks, and "
            "--moe-expert-rows-limit splits exchanges by routing: leave one out, or use "
            "--moe-token-dispatcher-type allgather.",
        ),
        Rule(
            ("pipeline_schedule", "recompute_granularity"),
            lambda v: v.splits_backward and v.recompute_granularity == "full",
            "--recompute-granularity full avoids keeping what --pipeline-schedule "
            "{pipeline_schedule} keeps until weight gradients are computed: use 1f1b, or "
            "selective recomputation.",
        ),
        Rule(
            ("pipeline_schedule", "pipeline_model_parallel_size"),
            lambda v: v.pipeline_schedule == "auto" and v.pipeline_model_parallel_size == 1,
            "--pipeline-schedule auto has no effect with --pipeline-model-parallel-size 1: "
            "leave it out.",
        ),
        Rule(
            (
                *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"),
                *("decoder_last_pipeline_num_layers", "account_for_loss_in_pipeline_split"),
                "account_for_embedding_in_pipeline_split",
            ),
            _conflicting_splits,
        ),
    )

    @property
    def v_shaped(self) -> bool:
        """Whether each rank holds two stages, the second ones in reverse rank order."""
        return self.pipeline_schedule in V_SHAPED

    @property
    def num_chunks(self) -> int:
        """Number of stages on each rank."""
        return 2 if self.v_shaped else self.num_virtual_stages_per_pipeline_rank

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed separately from input gradients."""
        return self.pipeline_schedule in SPLIT_BACKWARD
