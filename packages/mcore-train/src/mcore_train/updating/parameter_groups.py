"""Rates of single parameters: which rule, learning rate and decay each has.

The learning rate of a parameter in a step, computed by ``DistributedOptimizer``, is

    schedule(lr) * batch_lr_factor * lr_factor / width

- ``schedule(lr)``: ``learning_rate`` of ``--lr``, or of the group's own ``lr`` or of
  ``--decoupled-lr`` (``named_rates``). The training loop multiplies it by ``batch_lr_factor``.
- ``lr_factor``: of the matching entry of ``--parameter-groups``, times ``--layer-lr-decay``.
- ``width``: muP's divisor (``mup.step_width``); 1 without muP, for vectors and tables, and for
  Muon, except in the scale mode ``spectral``. A matrix rule also multiplies its directions by a
  factor of the matrix's shape (``MatrixRule.factor``).

Of the entries of ``--parameter-groups`` that match a parameter, a later one wins.
``--decoupled-lr``, ``--layer-lr-decay`` and ``--apply-wd-to-qk-layernorm`` come before them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_models.mup import step_width
from mcore_models.parameter_kinds import parameter_kind
from mcore_parallel.data_parallel.optimizer_segments import has_weight_decay
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.optimizers.muon import Muon
from mcore_parallel.optimizers.update_rule import AnyRule, MatrixRule, UpdateGroup
from mcore_parallel.sharding import NamedParameter
from mcore_train.composition import TrainConfig
from mcore_train.config import ParameterRatesConfig
from mcore_train.updating.group_entries import GroupEntry, read_entries
from mcore_train.updating.lr_schedule import LRSchedule, learning_rate

_DECOUPLED = "decoupled"
_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


def named_rates(
    options: ParameterRatesConfig, schedule: LRSchedule, samples: int
) -> Mapping[str, float]:
    """Return learning rates after ``samples`` sequences, by name, of groups with their own."""
    entries = read_entries(options.parameter_groups)
    ends = {f"group {i}": (each.lr, each.min_lr) for i, each in enumerate(entries) if each.lr}
    if options.decoupled_lr:
        ends[_DECOUPLED] = options.decoupled_lr, options.decoupled_min_lr
    return {
        name: learning_rate(replace(schedule, max_lr=high, min_lr=low), samples)
        for name, (high, low) in ends.items()
    }


class ParameterGroups:
    """Update groups of a run's parameters.

    Attributes:
        entries: of ``--parameter-groups``.
    """

    def __init__(self, config: TrainConfig, rule: AnyRule) -> None:
        """Read the options.

        Args:
            config: of the run.
            rule: of ``--optimizer``.

        Raises:
            ValueError: see ``read_entries``.
        """
        self._config, self._rule = config, rule
        self.entries = read_entries(config.parameter_rates.parameter_groups)
        self._adam = AdamW(config.adam)
        self._other_betas: dict[tuple[float | None, float | None], AdamW] = {}

    def group_of(self, named: NamedParameter) -> UpdateGroup:
        """Return update rule, learning rate and weight decay of a parameter."""
        options, model = self._config.parameter_rates, self._config.model
        tensors = [(part.name, part.shape) for part in named.layout.parts]
        names, kind = [name for name, _ in tensors], parameter_kind(tensors)
        matching = list(self._matching(names, kind))
        entry = {k: v for each in matching for k, v in each.items()}
        is_adam = entry.get("optimizer") == "adam"
        rule = self._rule
        if isinstance(rule, MatrixRule) and (is_adam or kind != "matrix"):
            rule = self._adam
        if "beta1" in entry or "beta2" in entry:
            rule = self._with_betas(rule, entry)
        decays = has_weight_decay(named)
        if options.apply_wd_to_qk_layernorm:
            decays |= all(re.search(r"\.[qk]_norm\.weight$", name) for name in names)
        lr_name = ""
        if options.decoupled_lr and kind in ("embedding", "head"):
            lr_name = _DECOUPLED
        if "lr" in entry:
            lr_name = entry["lr_name"]
        factor = entry.get("lr_factor", 1.0) * self._layer_factor(names[0], kind)
        is_unit = isinstance(rule, Muon) and rule.config.muon_scale_mode != "spectral"
        return UpdateGroup(
            rule,
            lr_name=lr_name,
            lr_factor=factor,
            decay_factor=entry.get("decay_factor", float(decays)),
            # Updates of fixed spectral norm already fit every width.
            width=1.0 if is_unit else step_width(tensors, model),
            joins_parts=(
                isinstance(rule, Muon)
                and not rule.config.muon_split_qkv
                and named.name.endswith("attention.qkv.weight")
            ),
        )

    def _matching(self, names: Sequence[str], kind: str) -> Iterator[dict[str, Any]]:
        """Yield the values that matching entries set, first to last."""
        for index, entry in enumerate(self.entries):
            if entry.matches(names, kind):
                default = GroupEntry(pattern=entry.pattern)
                keys = ("lr", "lr_factor", "decay_factor", "beta1", "beta2", "optimizer")
                values = {key: getattr(entry, key) for key in keys}
                given = {k: v for k, v in values.items() if v != getattr(default, k)}
                yield given | ({"lr_name": f"group {index}"} if entry.lr else {})

    def _with_betas(self, rule: AnyRule, entry: Mapping[str, Any]) -> AdamW:
        if not isinstance(rule, AdamW):
            raise ValueError(
                "--parameter-groups: beta1 and beta2 are AdamW's. Leave them out, or, for "
                "matrices of a matrix optimizer, give optimizer=adam in the same entry."
            )
        betas = entry.get("beta1"), entry.get("beta2")
        if betas not in self._other_betas:
            names = ("adam_beta1", "adam_beta2")
            given = {n: b for n, b in zip(names, betas, strict=True) if b is not None}
            config: AdamConfig = replace(self._config.adam, **given)
            self._other_betas[betas] = AdamW(config)
        return self._other_betas[betas]

    def _layer_factor(self, name: str, kind: str) -> float:
        """Return the factor of ``--layer-lr-decay``; 1 after the last layer."""
        decay, depth = (
            self._config.parameter_rates.layer_lr_decay,
            self._config.model.num_layers,
        )
        if decay == 1.0:
            return 1.0
        block = _BLOCK.search(name)
        if block is not None:
            return decay ** (depth - 1 - int(block[1]))
        return decay**depth if kind == "embedding" else 1.0
