"""Computes a suspicious step again, to distinguish a broken device from a correct result.

A step is suspicious if its gradient norm is not finite or far above earlier norms, or if
replicas of the weights differ. The weights have not been updated yet, so the step can be
computed again:

1. by the same ranks: a different result means a transient error of a device; the new result is
   used;
2. by every replica of the model on the same data, the most suspicious rank's share of the batch
   with its random numbers: replicas have equal weights, so a rank with a different result has a
   broken device;
3. if all results agree, data and weights cause them, and the usual checks apply.

Megatron-Core's rerun state machine separates the same three causes over a restart of the job.
"""

import logging
import math
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_models.protocol import MicroBatch
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError
from mcore_parallel.mesh import Axis
from mcore_train.assembly import Run
from mcore_train.losses import StepLosses
from mcore_train.step import backward_of_rank, synced_backward

log = logging.getLogger(__name__)

GPU_TOLERANCE = 1e-2
"""Largest relative difference of two computations of a gradient, for kernels with atomic sums;
on a CPU and with --deterministic-mode two computations must be equal to the last bit."""

Step = tuple[Sequence[MicroBatch], Mapping[str, Tensor]]
"""Micro-batches of a rank, and the states of its random streams before them."""


class BrokenDeviceError(RuntimeError):
    """A rank computes another result than the replicas of its weights.

    Attributes:
        ranks: global ranks whose results differ; if two replicas differ, both of them.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True, slots=True)
class Vote:
    """Comparison of the results of all replicas for one share of a step."""

    odd: tuple[int, ...]
    """Global ranks whose result differs from that of most of their replicas."""
    is_tie: bool
    """Whether there is no majority, so that any of the ranks may be wrong."""


class Rerun:
    """Checks each step of a run before its update; every method is collective.

    The host reads the gradient norm before the update, so it waits for the device once per
    step.

    Attributes:
        num_transient: steps whose second computation differed from the first.
    """

    def __init__(self, run: Run, spike_factor: float) -> None:
        """Store the run and the threshold.

        Args:
            run: the run; its weights are replicated over ``dp``.
            spike_factor: a norm above this multiple of the largest recent norm is suspicious.
        """
        self.num_transient = 0
        self._run, self._spike_factor = run, spike_factor
        assert run.recent is not None
        self._recent = run.recent
        self._step: Step | None = None
        is_exact = run.ctx.device.type == "cpu" or run.plan.config.run.deterministic_mode
        self._tolerance = 0.0 if is_exact else GPU_TOLERANCE

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Record the inputs of a step before the step is computed."""
        self._step = batches, self._run.streams.state()

    def check(
        self, losses: StepLosses, norm: Float[Tensor, ""]
    ) -> tuple[StepLosses, Float[Tensor, ""]]:
        """Return losses and norm of the step; compute the step again if they are suspicious.

        Afterwards the gradients belong to the returned losses.

        Raises:
            BrokenDeviceError: on all ranks, if a rank computes wrong results.
        """
        value = norm.item()
        if not (reason := self._suspicion(value)):
            return losses, norm
        number = self._run.progress.iteration + 1
        log.warning("computing step %d again: %s", number, reason)
        vote = self.vote()
        new_losses, new_norm = self._compute_again()
        new_value = new_norm.item()
        first, second = (torch.stack([*each.named.values()]) for each in (losses, new_losses))
        differs = gather_json(not self._is_close(first, second), self._run.ctx.world)
        different_ranks = [rank for rank, is_different in enumerate(differs) if is_different]
        is_transient = bool(different_ranks) or not self._is_close(norm, new_norm)
        self._end_if_broken(vote, f"step {number} was suspicious ({reason})")
        if is_transient:
            self.num_transient += 1
            ranks = ", ".join(map(str, different_ranks))
            log.warning(
                "step %d had another result the second time%s: gradient norm %g, then %g. The "
                "second result is used after a transient error of a device. If the same rank "
                "is reported again, leave its host out.",
                number,
                f", on ranks {ranks}" if ranks else "",
                value,
                new_value,
            )
        else:
            log.warning(
                "step %d has the same result on %s: no device is at fault, data and weights "
                "cause the result (mcore-train explain lists the documents of the step)",
                number,
                _tries(self._run),
            )
        return new_losses, new_norm

    def explain(self, error: UnlikeWeightsError) -> None:
        """Find the cause of different replicas of the weights, and raise an error.

        Overwrites the weights of all replicas with those of the first replica.

        Raises:
            BrokenDeviceError: on all ranks, if a rank computes wrong results.
            UnlikeWeightsError: otherwise.
        """
        data = self._run.ctx.dp
        if data.size == 1:  # tied copies within a replica differ, and there is no other replica
            raise error
        for chunk in self._run.chunks:
            for parameter in chunk.parameters():
                dist.broadcast(parameter.data, data.ranks[0], group=data.group)
        self._end_if_broken(self.vote(), str(error))
        raise UnlikeWeightsError(
            f"{error} From equal weights all replicas now compute equal results: a device or a "
            "link had a transient error, and no host needs to be left out yet."
        ) from error

    def vote(self) -> Vote:
        """Compute one share of the last step on every replica; overwrites the gradients.

        Micro-batches of packed documents cannot be broadcast; nothing is compared then.
        """
        ctx = self._run.ctx
        assert self._step is not None
        if any(batch.documents is not None for batch in self._step[0]):
            return Vote((), False)
        # Repeat the share of the data rank whose gradients are not finite, or are the largest.
        squares = self._fingerprint(self._step)[-1].item()
        sizes = gather_json(squares if math.isfinite(squares) else 1e300, ctx.world)
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        data_rank = gather_json(ctx.dp.rank, ctx.world)[largest]
        result = self._fingerprint(_from_rank(self._step, ctx.dp, data_rank))
        rows = gather_json([list(ctx.dp.ranks), result.tolist()], ctx.world)
        return _compare(rows, self._tolerance)

    def _suspicion(self, norm: float) -> str:
        if not math.isfinite(norm):
            return f"its gradient norm is {norm}"
        usual = self._recent.largest_norm()
        if not usual or norm <= self._spike_factor * usual:
            return ""
        return f"its gradient norm is {norm:.4g}, the largest before was {usual:.4g}"

    def _compute_again(self) -> tuple[StepLosses, Float[Tensor, ""]]:
        assert self._step is not None
        batches, states = self._step
        self._run.streams.set_state(states)
        losses = synced_backward(self._run, batches)
        return losses, self._run.optimizer.grad_norm()

    def _fingerprint(self, step: Step) -> Float[Tensor, " n"]:
        """Compute a step without data-parallel sums; return losses and gradient sums."""
        batches, states = step
        self._run.streams.set_state(states)
        losses = backward_of_rank(self._run, batches)
        sums, squares = [], []
        for unit in self._run.data_parallel.units:
            grads: Tensor = unit.grads  # pyrefly: ignore[missing-attribute]
            wide = grads.double()
            sums.append(wide.sum())
            squares.append(wide.square().sum())
        named = torch.stack([*losses.named.values()])
        total = torch.stack([torch.stack(sums).sum(), torch.stack(squares).sum()])
        return torch.cat([named, total]).cpu()

    def _is_close(self, first: Tensor, second: Tensor) -> bool:
        return torch.allclose(
            first.double(), second.double(), rtol=self._tolerance, atol=0.0, equal_nan=True
        )

    def _end_if_broken(self, vote: Vote, why: str) -> None:
        """Raise on all ranks if replicas computed different results."""
        if not vote.odd:
            return
        hosts = gather_json(socket.gethostname(), self._run.ctx.world)
        who = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in vote.odd)
        advice = (
            "one of them computes wrongly: try each host alone (mcore-train doctor)"
            if vote.is_tie
            else "its replicas agree with each other: leave the host out"
        )
        raise BrokenDeviceError(
            f"broken device: {who} computes another result than its replicas from equal "
            f"weights and data; {advice}. Reason of the check: {why}.",
            vote.odd,
        )


def _from_rank(step: Step, axis: Axis, source: int) -> Step:
    """Broadcast the inputs of a step from one rank of an axis to all of its ranks."""
    if axis.size == 1:
        return step

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_meta:  # no pipeline stage of this rank reads the tensor
            return tensor
        sent = tensor.clone()
        dist.broadcast(sent, axis.ranks[source], group=axis.group)
        return sent

    batches = [
        replace(
            batch,
            entries={name: copy(entry) for name, entry in batch.entries.items()},
            positions=None if batch.positions is None else copy(batch.positions),
        )
        for batch in step[0]
    ]
    return batches, {name: copy(state) for name, state in step[1].items()}


def _compare(rows: Sequence[tuple[Sequence[int], Sequence[float]]], tolerance: float) -> Vote:
    """Compare the results of each group of replicas.

    Args:
        rows: for each global rank the ranks with the same weights, and its result.
        tolerance: largest relative difference of equal results.
    """
    odd: set[int] = set()
    is_tie = False
    for ranks in {tuple(ranks) for ranks, _ in rows}:
        results = [torch.tensor(rows[rank][1], dtype=torch.float64) for rank in ranks]
        alike = [
            tuple(
                torch.allclose(x, y, rtol=tolerance, atol=0.0, equal_nan=True) for y in results
            )
            for x in results
        ]
        (usual, count), *others = Counter(alike).most_common()
        if not others:
            continue
        if 2 * count > len(ranks):
            odd |= {rank for rank, row in zip(ranks, alike, strict=True) if row != usual}
        else:
            odd |= set(ranks)
            is_tie = True
    return Vote(tuple(sorted(odd)), is_tie)


def _tries(run: Run) -> str:
    if run.ctx.dp.size == 1:
        return "the same GPU (without a replica, no other GPU was tried)"
    return f"{run.ctx.dp.size} replicas of the model"
