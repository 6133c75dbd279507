"""Base class of objectives: defines batches, losses, their averages and metrics.

A run holds one ``Objective``. Each of its losses is a sum over the entries of a mask: the mask
times the loss, divided by the mask's sum over all micro-batches, data and context ranks of the
step. With this rule the gradient does not depend on how the batch is split. ``Objective``
itself is pretraining, with the losses of the model. docs/objectives.md shows how to write an
objective.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_models.protocol import LM_LOSS, LOSS_MASK, BatchEntry, MicroBatch, TrainableModel
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_train.composition import TrainConfig
from mcore_train.objectives.config import OBJECTIVES

if TYPE_CHECKING:
    from mcore_train.assembly import Run

REFERENCE_LOG_PROBS = "reference_log_probs"
"""Entry ``[B, S]``: the reference's log-probability of each token of an answer; 0 elsewhere."""


class Objective:
    """Losses of a run, over the entries of its batches; pretraining unless overridden.

    Attributes:
        config: all options of the run.
        ctx: the layout.
        model: the trained model: its last stage on ranks that compute losses.
        reference: the same stage of the frozen model; None if the objective has none or its
            results are stored. Set before the first batch.
    """

    added_entries: Mapping[str, BatchEntry] = MappingProxyType({})
    """Entries of a batch that the losses read besides those of the model, ``[B, S, ...]``."""

    def __init__(
        self, config: TrainConfig, ctx: ParallelContext, model: TrainableModel
    ) -> None:
        self.config, self.ctx, self.model = config, ctx, model
        self.reference: TrainableModel | None = None

    @property
    def has_reference(self) -> bool:
        """Whether a frozen model computes ``reference_entries`` of each batch."""
        return False

    @property
    def stored_entries(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Reference entries for ``--reference-cache``: dtype, and sizes after ``S``."""
        return {}

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Return the losses by name, the main one first, with their factors in the sum.

        A loss with the factor 0 is a metric: averaged and logged like a loss, without gradient.
        """
        return self.model.loss_coefficients

    def masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "..."]]:
        """Return the weight of each entry of each loss on this rank, in the shape of the loss.

        Called before the first forward pass of a step.
        """
        return self.model.loss_masks(batch)

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "..."]]:
        """Return each loss before masks, factors and sums, float32 or wider.

        Args:
            output: result of the model's last stage, see ``run_stage``.
            batch: with the entries of the frozen model, if there is one.
        """
        return self.model.unreduced_losses(output, batch)

    def losses(
        self, output: Payload, batch: MicroBatch, weights: Mapping[str, Tensor]
    ) -> Mapping[str, Float[Tensor, ""]]:
        """Sum each loss with weights: mask x factor / sum of the mask over the step.

        Override this method for a fused loss; the model's own losses are fused too.
        """
        if type(self).unreduced_losses is Objective.unreduced_losses:
            return self.model.losses(output, batch, weights)
        token_losses = self.unreduced_losses(output, batch)
        return {
            # A masked entry may be NaN, and 0 * NaN is NaN.
            name: (loss.where(weights[name] != 0, 0.0) * weights[name]).sum()
            for name, loss in token_losses.items()
        }

    def reference_entries(
        self, _output: Payload, _batch: MicroBatch, /
    ) -> Mapping[str, Tensor]:
        """Return the frozen model's entries of a batch, ``[B, S/cp, ...]``, without gradient.

        Args:
            _output: result of ``reference`` for the batch.
            _batch: of the step.
        """
        return {}

    def open_batches(self, _run: "Run", /) -> Iterator[list[MicroBatch]]:
        """Yield a rank's steps from the run's progress on: lists of placed micro-batches.

        Called only if a subclass overrides it; otherwise the run's datasets are read.
        """
        return iter(())

    @classmethod
    def makes_batches(cls) -> bool:
        """Whether the objective makes its own batches by ``open_batches``."""
        return cls.open_batches is not Objective.open_batches


class AnswerObjective(Objective):
    """Loss that depends on log-probabilities of answers, by the model and a reference.

    Attributes:
        loss_name: name of the loss in the log.
        metrics: names of the other results of ``unreduced_losses``, which have no gradient.
    """

    loss_name: str
    metrics: tuple[str, ...]

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Return the loss, and metrics under the names that trl logs."""
        return {self.loss_name: 1.0, **dict.fromkeys(self.metrics, 0.0)}

    def reference_entries(self, output: Payload, batch: MicroBatch, /) -> Mapping[str, Tensor]:
        """Return the reference's log-probabilities of the answers' tokens."""
        assert self.reference is not None
        return {REFERENCE_LOG_PROBS: answer_log_probs(self.reference, output, batch)}


class SupervisedFineTuning(Objective):
    """Cross-entropy of the assistant's tokens in packed chats (``--sft`` sets the mask)."""


def token_log_probs(
    model: TrainableModel, output: Payload, batch: MicroBatch
) -> Float[Tensor, "B S"]:
    """Return the log-probability of every label, differentiable, equal on all tensor ranks.

    The result is the model's negated token loss; with ``--batch-invariant-mode`` its bits equal
    an engine's. The micro-batch's logits are held in memory: this rank's columns of S x B x V.

    Args:
        model: last stage of a causal model.
        output: its result.
        batch: with labels.
    """
    return -model.unreduced_losses(output, batch)[LM_LOSS]


def answer_log_probs(
    model: TrainableModel, output: Payload, batch: MicroBatch
) -> Float[Tensor, "B S"]:
    """Return ``token_log_probs`` of a batch's labels, 0 where its loss mask is 0."""
    log_probs = token_log_probs(model, output, batch)
    return torch.where(batch[LOSS_MASK] > 0, log_probs, 0.0)


def objective_class(config: TrainConfig) -> type[Objective]:
    """Import the class that ``--objective`` names; no communication.

    Raises:
        ValueError: if the user's class cannot be imported or is no ``Objective``.
    """
    name = config.objective.objective
    loaded = load_named(OBJECTIVES.get(name, name), "--objective")
    if not (isinstance(loaded, type) and issubclass(loaded, Objective)):
        raise ValueError(
            f"--objective {name} is not a class derived from "
            "mcore_train.objectives.objective.Objective."
        )
    return loaded


def load_named(text: str, flag: str) -> Any:
    """Import an object by ``module:name`` or ``FILE.py:name``.

    Args:
        text: the value of the option.
        flag: the option, for errors.

    Raises:
        ValueError: if there is no such file, module or name.
    """
    origin, _, name = text.rpartition(":")
    if not origin or not name:
        raise ValueError(f"{flag} {text}: give module:name, or FILE.py:name.")
    try:
        if origin.endswith(".py"):
            return getattr(_load_file(Path(origin)), name)
        return getattr(importlib.import_module(origin), name)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ValueError(f"{flag} {text} cannot be imported: {error}.") from error


def _load_file(path: Path) -> Any:
    name = f"mcore_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module
