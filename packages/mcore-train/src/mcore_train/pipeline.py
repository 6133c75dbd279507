"""Runs micro-batches through the pipeline stages of one rank, by a cached schedule.

A rank without pipeline neighbours has one stage, and its schedule has no messages.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from mcore_models.protocol import MicroBatch, TrainableModel
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.actions import Action
from mcore_parallel.pipeline_parallel.forward_backward_overlap import ForwardBackwardOverlap
from mcore_parallel.pipeline_parallel.runner import (
    Payload,
    PayloadShape,
    StageFunction,
    StageOutput,
    run_schedule,
)
from mcore_parallel.pipeline_parallel.schedule import build_schedule, forward_only
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue
from mcore_train.composition import TrainConfig


class ChunkSync(Protocol):
    """Starts the sums of a chunk's gradients over data ranks, as ``GradientSync`` does."""

    def start_sync(self, chunk: int) -> None:
        """Mark the next backward of a chunk as its last."""

    def start_weight_sync(self, chunk: int) -> None:
        """Mark the next deferred weight gradients of a chunk as its last."""


class Pipeline:
    """Runs micro-batches through this rank's stages: with gradients, or forward only.

    Attributes:
        weight_queue: deferred weight gradients of linears, for schedules that split backward;
            None for other schedules.
        overlap: runs a forward and a backward pass concurrently
            (``--overlap-moe-expert-parallel-comm``); None if passes run one after the other.
        built_actions: this rank's part of each schedule used so far, by its kind (``train`` or
            ``evaluate``) and number of micro-batches. Thousands of actions are built once.
    """

    def __init__(
        self,
        config: TrainConfig,
        ctx: ParallelContext,
        chunks: Sequence[TrainableModel],
        dtype: torch.dtype,
    ) -> None:
        """Attach the weight queue and the overlap to layers, if the schedule uses them.

        Must run before the data-parallel engine is built, which reads from the weights when
        their gradients are complete. No communication.
        """
        self._config, self._ctx, self._chunks, self._dtype = config, ctx, chunks, dtype
        self.built_actions: dict[tuple[str, int], Sequence[Action]] = {}
        self.weight_queue: WeightQueue | None = None
        if config.pipeline.splits_backward:
            self.weight_queue = WeightQueue()
            self.weight_queue.attach(*chunks)
        self.overlap: ForwardBackwardOverlap | None = None
        if config.pipeline.overlap_moe_expert_parallel_comm:
            self.overlap = ForwardBackwardOverlap()
            self.overlap.attach(*chunks)
        self._warmed_up: set[str] = set()

    def train(
        self,
        stages: Mapping[int, StageFunction],
        batches: Sequence[MicroBatch],
        sync: ChunkSync,
        after_first_weights: Callable[[int], None] | None = None,
    ) -> None:
        """Run forward and backward of all micro-batches; gradients add up in the parameters.

        Args:
            stages: what each model chunk of this rank computes, by chunk number.
            batches: this rank's micro-batches.
            sync: begins to sum a chunk's gradients before its last backward.
            after_first_weights: as of ``run_schedule``.
        """
        self._run(
            "train",
            stages,
            batches,
            before_last_backward=sync.start_sync,
            before_last_weights=sync.start_weight_sync,
            after_first_weights=after_first_weights,
            weight_queue=self.weight_queue,
            pair_overlap=self.overlap,
        )

    def forward(
        self,
        batches: Sequence[MicroBatch],
        at_end: Callable[[TrainableModel, Payload, int], None],
    ) -> None:
        """Run micro-batches through all stages, forward only; all ranks call it together.

        Args:
            batches: this rank's micro-batches.
            at_end: called on the last stage with the model, its output and the number of the
                micro-batch.
        """

        def build(number: int) -> StageFunction:
            model = self._chunks[number]

            def run_stage(x: Payload | None, microbatch: int) -> StageOutput:
                output, aux = model.run_stage(batches[microbatch], x)
                if not model.stage.has_loss:
                    return StageOutput(output, None)
                at_end(model, output, microbatch)
                return StageOutput(aux.new_zeros(()), None)

            return run_stage

        stages = {number: build(number) for number in range(len(self._chunks))}
        self._run("evaluate", stages, batches)

    def actions(self, kind: str, num_microbatches: int) -> Sequence[Action]:
        """Return this rank's actions in the schedule of ``num_microbatches`` micro-batches."""
        key = kind, num_microbatches
        if key not in self.built_actions:
            pp, options = self._ctx.pp, self._config.pipeline
            schedule = (
                build_schedule(options, pp.size, num_microbatches)
                if kind == "train"
                else forward_only(
                    pp.size,
                    num_microbatches,
                    vpp=len(self._chunks),
                    v_shaped=options.v_shaped,
                )
            )
            self.built_actions[key] = schedule[pp.rank]
        return self.built_actions[key]

    def payload_shape(
        self, batches: Sequence[MicroBatch], microbatch: int, sender: int
    ) -> PayloadShape:
        """Return the local shape of the activations that stage ``sender`` sends.

        The shape follows from the micro-batch, which every stage has, so that lengths may
        differ from one micro-batch to the next without a message.
        """
        cuts = self._ctx.tp.size if self._config.parallelism.sequence_parallel else 1
        return self._chunks[0].payload_shape(batches[microbatch], sender, cuts)

    def _run(
        self,
        kind: str,
        stages: Mapping[int, StageFunction],
        batches: Sequence[MicroBatch],
        **options,
    ) -> None:
        pipeline = self._config.pipeline
        run_schedule(
            self.actions(kind, len(batches)),
            stages,
            axis=self._ctx.pp,
            back=self._ctx.pp_back,
            shape=partial(self.payload_shape, batches),
            dtype=self._dtype,
            device=self._ctx.device,
            v_shaped=pipeline.v_shaped,
            # The first pass of each kind waits on the host for each message (run_schedule).
            rendezvous=kind not in self._warmed_up,
            overlap=pipeline.overlap_p2p_communication,
            batched=pipeline.batch_p2p_communication,
            **options,
        )
        self._warmed_up.add(kind)
