"""How layers become pipeline stages and in which order these work: plain frozen data."""

from dataclasses import dataclass

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev")
"""Names of pipeline schedules."""
V_SHAPED = ("zb-v", "dualpipev")
"""Those with two stages on a rank, in a V."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How layers are given to pipeline stages, and in which order stages work."""

    pipeline_schedule: str = ""
    """Order of forwards and backwards: 1f1b, interleaved, zb-h1, and with two stages on each
    rank in a V, the first rank at both ends of the model, zb-v and dualpipev; auto: the fastest
    that fits, by simulation. Empty: interleaved when ranks hold several stages, else 1f1b."""

    pipeline_memory_cap: str = ""
    """Memory of a rank that --pipeline-schedule auto may plan with: GiB, or a GPU's name, such
    as h200, for nine tenths of its memory. Empty: any."""

    num_virtual_stages_per_pipeline_rank: int = 1
    """Stages (model chunks) that each pipeline rank holds; above 1 the schedule interleaves."""

    microbatch_group_size_per_virtual_pipeline_stage: int = 0
    """Micro-batches that run through one chunk before the next chunk's turn; 0: the
    pipeline-parallel size."""

    overlap_p2p_communication: bool = True
    """Let messages between stages travel under computation; off: wait for each where it is
    posted."""

    batch_p2p_communication: bool = True
    """Post messages between stages that stand together as one operation; off: one by one, so
    that a stage waits for its own input alone."""

    overlap_moe_expert_parallel_comm: bool = False
    """Run each forward beside the backward of another micro-batch, so that the exchanges of
    experts travel under the computation of the other. More micro-batches are held: 2 on one
    pipeline rank, up to twice as many in 1f1b, one chunk more in interleaved."""

    pipeline_model_parallel_layout: str = ""
    """Stages spelled out, such as ``Et*3|(tt|)*2,L``: E embedding, t layer, m
    multi-token-prediction layer, L loss, | next stage, x*n and (..)*n repeat."""

    decoder_first_pipeline_num_layers: int = 0
    """Layers on the first pipeline rank; 0: as many as on the others."""

    decoder_last_pipeline_num_layers: int = 0
    """Layers on the last pipeline rank; 0: as many as on the others."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are shared out."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the head and loss as one layer when layers are shared out."""

    def __post_init__(self) -> None:
        if self.pipeline_schedule not in ("", "auto", *SCHEDULES):
            raise ValueError(
                f"--pipeline-schedule {self.pipeline_schedule} is not known: "
                f"use {', '.join(SCHEDULES)} or auto."
            )
        if self.pipeline_memory_cap and self.pipeline_schedule != "auto":
            raise ValueError(
                "--pipeline-memory-cap has no effect without --pipeline-schedule auto: leave "
                "it out."
            )
        if self.overlap_moe_expert_parallel_comm and (
            self.pipeline_schedule not in ("", "1f1b", "interleaved", "dualpipev")
        ):
            raise ValueError(
                "--overlap-moe-expert-parallel-comm pairs forwards with whole backwards, and "
                f"--pipeline-schedule {self.pipeline_schedule} has none: use 1f1b, interleaved "
                "or dualpipev."
            )
        num_chunks = self.num_virtual_stages_per_pipeline_rank
        if num_chunks < 1:
            raise ValueError(
                f"--num-virtual-stages-per-pipeline-rank {num_chunks} must be 1 or more."
            )
        if self.v_shaped and num_chunks > 2:
            raise ValueError(
                f"--pipeline-schedule {self.pipeline_schedule} runs two stages on a rank, but "
                f"--num-virtual-stages-per-pipeline-rank is {num_chunks}: leave that out."
            )
        if num_chunks > 1 and self.pipeline_schedule == "auto":
            raise ValueError(
                "--pipeline-schedule auto chooses the stages of a rank too: leave "
                "--num-virtual-stages-per-pipeline-rank out, or use interleaved."
            )
        if num_chunks > 1 and self.pipeline_schedule in ("1f1b", "zb-h1"):
            raise ValueError(
                f"--pipeline-schedule {self.pipeline_schedule} runs one stage on a rank, but "
                f"--num-virtual-stages-per-pipeline-rank is {num_chunks}: use interleaved."
            )
        if num_chunks == 1 and self.microbatch_group_size_per_virtual_pipeline_stage:
            raise ValueError(
                "--microbatch-group-size-per-virtual-pipeline-stage has no effect with one "
                "stage on a rank: leave it out or raise --num-virtual-stages-per-pipeline-rank."
            )
        for name in (
            "microbatch_group_size_per_virtual_pipeline_stage",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ):
            if getattr(self, name) < 0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {getattr(self, name)} must be 0 (derive) or more.")
        self._check_one_way_of_splitting()

    @property
    def v_shaped(self) -> bool:
        """Whether each rank holds two stages, of which the second ones lie backwards."""
        return self.pipeline_schedule in V_SHAPED

    @property
    def num_chunks(self) -> int:
        """Stages on each rank."""
        return 2 if self.v_shaped else self.num_virtual_stages_per_pipeline_rank

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from those of inputs."""
        return self.pipeline_schedule in ("zb-h1", *V_SHAPED)

    def _check_one_way_of_splitting(self) -> None:
        ways = {
            "--pipeline-model-parallel-layout": bool(self.pipeline_model_parallel_layout),
            "--decoder-first/last-pipeline-num-layers": bool(
                self.decoder_first_pipeline_num_layers or self.decoder_last_pipeline_num_layers
            ),
            "--account-for-embedding/loss-in-pipeline-split": (
                self.account_for_embedding_in_pipeline_split
                or self.account_for_loss_in_pipeline_split
            ),
        }
        chosen = [flag for flag, is_set in ways.items() if is_set]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} contradict: split layers in one way.")
