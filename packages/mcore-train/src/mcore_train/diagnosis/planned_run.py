"""Rebuilds the planner's inputs from a run folder: options, ranks and constants of the GPUs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.families import Family
from mcore_train.composition import FAMILY_COMMANDS, TrainConfig, compose, field_types
from mcore_train.planning.expert_wgrads import (
    has_automatic_wgrads,
    set_wgrad_micro_batches,
    with_chosen_wgrads,
)
from mcore_train.planning.gain import Changes, Gain, predict_gains, smaller_changes
from mcore_train.planning.step_time import StepTime, predict_step
from mcore_train.planning.system import System, system_of_device
from mcore_train.resolution import load_tokenizer, resolve

LEAST_SAVING = 0.05
"""Share of a rank's memory that an option must save to be recommended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """Options, ranks and GPUs of a run."""

    config: TrainConfig
    family: Family
    world_size: int
    vocab_size: int
    system: System

    def gains(self, candidates: Iterable[Changes]) -> list[Gain]:
        """Predict the gains of changes that are valid for the run, the fastest first."""
        run = self.family, self.world_size, self.vocab_size, self.system
        return predict_gains(self.config, candidates, *run)

    def step(self) -> StepTime:
        """Predict the time of a step of the run."""
        run = self.family, self.world_size, self.vocab_size, self.system
        return predict_step(with_chosen_wgrads(self.config, *run), *run)

    def cheapest_saving(self, needed_bytes: float) -> Gain | None:
        """Return the change that saves ``needed_bytes`` at the least cost in time.

        If no change saves so much, the change that saves most is returned; None if no change
        saves ``LEAST_SAVING``.
        """
        gains = self.gains(smaller_changes(self.config))
        candidates = [g for g in gains if g.saved_bytes > LEAST_SAVING * g.before.bytes]
        sufficient = [g for g in candidates if g.saved_bytes >= needed_bytes]
        if sufficient:
            return sufficient[0]
        return max(candidates, key=lambda gain: gain.saved_bytes, default=None)


def plan_run(header: Mapping[str, Any], options: Mapping[str, Any]) -> PlannedRun:
    """Compose the config of a run from its header and the options that it changed.

    Args:
        header: row of kind ``run`` of metrics.jsonl.
        options: fields that differ from their defaults.

    Raises:
        ValueError: if the planner cannot predict the run; the message gives the reason.
    """
    if not options:
        raise ValueError("the run recorded no options")
    device = next(iter(header.get("devices", {})), "")
    system = system_of_device(device)
    if system is None:
        raise ValueError(f"the planner has no constants of {device or 'a device without name'}")
    commands = FAMILY_COMMANDS.values()
    command = next((c for c in commands if set(options) <= set(field_types(c.run))), None)
    if command is None:
        raise ValueError("the run has options that this version does not have")
    config = compose(options, command.run)
    if has_automatic_wgrads(config) and "moe_wgrad_micro_batches" not in header:
        # A run of an earlier version, whose default was 1.
        config = set_wgrad_micro_batches(config, 1)
    vocab_size = config.tokenizer.vocab_size
    if not vocab_size:
        tokenizer = load_tokenizer(config)
        vocab_size = tokenizer.vocab_size if tokenizer else 0
    world_size = header.get("world_size") or sum(header["devices"].values())
    resolve(config, world_size, tokenizer_vocab_size=vocab_size, family=command.family)
    return PlannedRun(
        config=config,
        family=command.family,
        world_size=world_size,
        vocab_size=vocab_size,
        system=system,
    )
