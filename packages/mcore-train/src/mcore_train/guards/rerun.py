"""Computes a suspicious step again, to tell a broken device from an honest result.

A step is suspicious if its gradient norm is not finite or far above those before it, or if
replicas of weights have come apart. Weights are still those before the step, so it can be
computed again:

1. by the same ranks: another result means that a device erred once, and the new result counts;
2. by every replica of the model on one micro-batch share, the most suspicious one, with its
   random numbers: replicas have equal weights, so a rank whose result is unlike that of the
   others has a broken device;
3. where all agree, the result is that of data and weights, and the usual checks go on.

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
"""Relative difference of two computations of one gradient that kernels with atomic sums may
have; on a CPU and with --deterministic-mode two computations must be equal to the last bit."""

Step = tuple[Sequence[MicroBatch], Mapping[str, Tensor]]
"""Micro-batches of a rank, and the states of its random streams before them."""


class BrokenDeviceError(RuntimeError):
    """A rank computes another result than the replicas of its weights.

    Attributes:
        ranks: global ranks whose results are unlike the others'; all that may be at fault
            where two replicas differ.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True, slots=True)
class Vote:
    """What the replicas of the model computed from one share of a step."""

    odd: tuple[int, ...]
    """Global ranks with another result than most of their replicas."""
    is_tie: bool
    """Whether no majority shows which of them is wrong."""


class Rerun:
    """Checks each step of a run before its update; all ranks call every method together.

    The host reads the gradient norm before the update, so it waits for the device once a step.

    Attributes:
        num_transient: steps whose second computation had another result than the first.
    """

    def __init__(self, run: Run, spike_factor: float) -> None:
        """Remember nothing yet.

        Args:
            run: whose steps are checked; weights are replicated over ``dp``.
            spike_factor: a norm so many times the largest of the last ones is suspicious.
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
        """Return losses and norm of the step, computed again if they are suspicious.

        Gradients are those of the result.

        Raises:
            BrokenDeviceError: on all ranks, if a rank is found to compute wrongly.
        """
        value = norm.item()
        if not (reason := self._suspicion(value)):
            return losses, norm
        number = self._run.progress.iteration + 1
        log.warning("step %d is computed again: %s", number, reason)
        vote = self.vote()
        again, new_norm = self._compute_again()
        new_value = new_norm.item()
        first, second = (torch.stack([*each.named.values()]) for each in (losses, again))
        mine = not self._is_close(first, second)
        unlike = [
            r for r, differs in enumerate(gather_json(mine, self._run.ctx.world)) if differs
        ]
        is_transient = bool(unlike) or not self._is_close(norm, new_norm)
        self._end_if_broken(vote, f"step {number} was suspicious ({reason})")
        if is_transient:
            self.num_transient += 1
            who = f", of ranks {_numbers(unlike)}" if unlike else ""
            log.warning(
                "step %d had another result the second time%s: gradient norm %g, then %g. A "
                "device erred once; the second result counts. The same rank again: leave its "
                "host out.",
                number,
                who,
                value,
                new_value,
            )
        else:
            log.warning(
                "step %d has the same result on %s: no device is at fault, the result is that "
                "of data and weights (mcore-data trace lists the documents of the step)",
                number,
                _tries(self._run),
            )
        return again, new_norm

    def explain(self, error: UnlikeWeightsError) -> None:
        """Find out why replicas of weights came apart, after the check that found it.

        The run ends after it: weights of all replicas become those of the first.

        Raises:
            BrokenDeviceError: on all ranks, if a rank is found to compute wrongly.
            UnlikeWeightsError: else, with what was tried.
        """
        data = self._run.ctx.dp
        if data.size == 1:  # tied copies differ: there is no replica to compare with
            raise error
        for chunk in self._run.chunks:
            for parameter in chunk.parameters():
                dist.broadcast(parameter.data, data.ranks[0], group=data.group)
        self._end_if_broken(self.vote(), str(error))
        raise UnlikeWeightsError(
            f"{error} From equal weights all replicas compute one result now: a device or a "
            "link erred once, and no host needs to be left out yet."
        ) from error

    def vote(self) -> Vote:
        """Let every replica compute one share of the last step; gradients are lost.

        Micro-batches of packed documents stay with their ranks: nothing is compared then.
        """
        ctx = self._run.ctx
        assert self._step is not None
        if any(batch.documents is not None for batch in self._step[0]):
            return Vote((), False)
        own = self._fingerprint(self._step)
        # The share to repeat: that of the data rank whose gradients are not finite or largest.
        size = own[-1].item()
        sizes = gather_json(size if math.isfinite(size) else 1e300, ctx.world)
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
        """Compute a step without its sums over data ranks; return losses and sums, float64."""
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
        certain = (
            "one of them computes wrongly: try each host alone (mcore-train doctor)"
            if vote.is_tie
            else "its replicas agree with each other: leave the host out"
        )
        raise BrokenDeviceError(
            f"broken device: {who} computes another result than its replicas from equal "
            f"weights and data; {certain}. Computed again since {why}.",
            vote.odd,
        )


def _from_rank(step: Step, axis: Axis, source: int) -> Step:
    """Return the step of one rank of an axis on all of its ranks; broadcasts over it."""
    if axis.size == 1:
        return step

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_meta:  # no stage of this rank reads it
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
        rows: of each global rank, the ranks that hold the same weights, and its result.
        tolerance: relative difference that is no difference.
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
        return "the same GPU (there is no replica to try another)"
    return f"{run.ctx.dp.size} replicas of the model"


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
