"""Statistics of a step by layer: weights, gradients, updates, activations, attention logits.

Statistics are computed on the device in every ``--layer-statistics-interval``-th step and read
at the next report, so the host does not wait for the device in between. Sums count each logical
element once, in every layout. An update is estimated from every k-th element of a parameter, so
that no second copy of the weights is needed; k is 1 for small parameters.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_models.qk_clip.row_factors import attention_layers, track_scores
from mcore_parallel.data_parallel.gradient_sync import OwnedRange
from mcore_parallel.sharding import held_share, layer_stacks
from mcore_train.assembly import Run

REST = "rest"
"""Name of the layer that counts embeddings, heads and final norms."""
SAMPLES = 1 << 18
"""Approximate number of elements of a parameter from which its update is estimated."""
_LAYER = re.compile(r"(?:^|\.)(?P<stack>\w+)\.(?P<number>\d+)\.")


NORMS = ("weights", "gradients", "updates", "activations")
"""Statistics that are measured as norms and summed as squares."""

Part = tuple[OwnedRange, float, Tensor]
"""A range of a parameter, its share in sums over the world, and a view of its values."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One number of a layer."""

    name: str
    """Layer and statistic, such as ``layer_3/weights``; several entries may have one name."""
    share: float
    """Factor of the number in the sum of its name."""
    value: Tensor
    """Scalar on the device."""


class LayerStatistics:
    """Measures statistics of a run's layers at an interval of steps."""

    def __init__(self, run: Run) -> None:
        """Store the run and the interval; no communication."""
        self._run = run
        self._interval = run.plan.config.logging.layer_statistics_interval
        self._handles: list[Any] = []
        self._entries: list[Entry] = []
        self._counts: dict[str, float] = defaultdict(float)  # known to the host
        self._before: list[tuple[Part, Tensor]] = []
        self._is_watching = False  # from ``before`` to ``before_update``
        self._recorded_step = 0

    def is_due(self, step: int) -> bool:
        """Whether a step is measured."""
        return self._interval > 0 and step % self._interval == 0

    def before(self, step: int) -> None:
        """Add hooks to the blocks if the step is measured."""
        if not self.is_due(step):
            return
        self._entries, self._counts, self._is_watching = [], defaultdict(float), True
        if self._run.recorder is not None:
            return  # a CUDA graph replays kernels without calling hooks
        for chunk in self._run.chunks:
            for names, block in _blocks(chunk):
                self._handles.append(block.register_forward_hook(self._note(names)))
            if not self._run.plan.config.qk_clipping.qk_clip:
                track_scores(chunk)

    def before_update(self, step: int) -> None:
        """Measure reduced gradients and weights; copy samples of the weights."""
        if not self.is_due(step):
            return
        self._stop_watching()
        replicas = self._run.data_parallel.replica_axes()

        def share(owned: OwnedRange) -> float:
            layout = owned.named.layout
            copies = replicas[layout.data].size * layout.tied.size
            return held_share(layout) / copies

        gradients = [
            (owned, share(owned), view)
            for unit in self._run.data_parallel.units
            for owned in unit.owned_ranges()
            if (view := owned.view(unit.own_grads())).numel()
        ]
        ranges = self._run.optimizer.main_ranges()
        weights = [(owned, share(owned), view) for owned, view in ranges if view.numel()]
        self._add_norms("gradients", gradients)
        self._add_norms("weights", weights)
        self._add("zeros", gradients, [(view == 0).sum() for _, _, view in gradients])
        for owned, share_of_owned, view in gradients:
            layer = layer_of(owned.named.name)
            self._counts[f"{layer}/elements"] += share_of_owned * view.numel()
        self._before = [(part, part[2][:: _stride(part[2])].clone()) for part in weights]

    def after(self, step: int) -> None:
        """Measure the update if the step is measured, without waiting for the device."""
        if not self.is_due(step):
            return
        if self._is_watching:  # the update was skipped, since gradients overflowed
            self._stop_watching()
            return
        changes = [
            (owned, share * stride, view[::stride] - before)
            for (owned, share, view), before in self._before
            for stride in [_stride(view)]
        ]
        self._add_norms("updates", changes)
        self._before = []
        self._recorded_step = step

    @property
    def has_recorded(self) -> bool:
        """Whether a step was measured since the last report; equal on all ranks."""
        return self._recorded_step > 0

    def report(self) -> tuple[int, dict[str, float]]:
        """Return the last measured step and its numbers; gathers over the world.

        Keys are a statistic and a layer, such as ``gradient_norm/layer_3``.
        """
        step, self._recorded_step = self._recorded_step, 0
        local_sums = _sums(self._entries, self._counts)
        self._entries, self._counts = [], defaultdict(float)
        sums: dict[str, float] = defaultdict(float)
        for rank_sums in gather_json(local_sums, self._run.ctx.world):
            for name, value in rank_sums.items():
                is_maximum = name.endswith("/logits")
                sums[name] = max(sums[name], value) if is_maximum else sums[name] + value
        return step, _numbers(sums)

    def _note(self, layer: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # a recomputation in backward: the activation is already counted
            x = output if isinstance(output, Tensor) else output[0]
            x = x.detach()
            norm = torch.linalg.vector_norm(x, dtype=torch.float32)
            self._entries.append(Entry(f"{layer}/activations", 1.0, norm))
            self._entries.append(Entry(f"{layer}/zero_activations", 1.0, (x == 0).sum()))
            self._counts[f"{layer}/outputs"] += x.numel()

        return hook

    def _stop_watching(self) -> None:
        """Remove the hooks; record the largest attention logits."""
        self._is_watching = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        clips = self._run.plan.config.qk_clipping.qk_clip
        for name, layer in attention_layers(self._run.chunks).items():
            if layer.tracker is not None and layer.tracker.largest is not None:
                largest = layer.tracker.largest.max()
                self._entries.append(Entry(f"{layer_of(name)}/logits", 1.0, largest))
            if not clips:
                layer.tracker = None

    def _add_norms(self, what: str, parts: Sequence[Part]) -> None:
        """Add the norms of some views to the entries of their layers."""
        by_dtype: dict[torch.dtype, list[Part]] = defaultdict(list)
        for part in parts:
            by_dtype[part[2].dtype].append(part)
        for dtype, same in by_dtype.items():
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm([view for _, _, view in same], 2.0, dtype=wide)
            self._add(what, same, norms)

    def _add(self, what: str, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
        """Add one number of each part to the entries of its layer."""
        for (owned, share, _), value in zip(parts, values, strict=True):
            self._entries.append(Entry(f"{layer_of(owned.named.name)}/{what}", share, value))


def layer_of(name: str) -> str:
    """Return the layer of a parameter or module by its name, such as ``layer_3``."""
    match = _LAYER.search(name)
    if match is None:
        return REST
    # blocks.3.mlp of a GPT, encoder.blocks.3.mlp of a T5, mtp.0.block.mlp
    part = name[: match.start()] if match["stack"] == "blocks" else match["stack"]
    return f"{part}_{match['number']}" if part else f"layer_{match['number']}"


def _blocks(chunk: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    blocks = {block for stack in layer_stacks(chunk) for block in stack}
    return [
        (layer_of(f"{name}."), module)
        for name, module in chunk.named_modules()
        if module in blocks
    ]


def _stride(view: Tensor) -> int:
    return max(1, view.numel() // SAMPLES)


def _sums(entries: Sequence[Entry], counts: Mapping[str, float]) -> dict[str, float]:
    """Read the entries from the device; return sums and maxima by name, and the counts."""
    sums: dict[str, float] = defaultdict(float, counts)
    for entry, value in zip(entries, _to_host([each.value for each in entries]), strict=True):
        statistic = entry.name.rpartition("/")[2]
        if statistic == "logits":
            sums[entry.name] = max(sums[entry.name], value)
        else:
            sums[entry.name] += entry.share * (value**2 if statistic in NORMS else value)
    return sums


def _to_host(scalars: Sequence[Tensor]) -> list[float]:
    """Copy scalars to the host, all of one device and dtype at once."""
    indices: dict[Any, list[int]] = defaultdict(list)
    for index, scalar in enumerate(scalars):
        indices[scalar.device, scalar.dtype].append(index)
    values = [0.0] * len(scalars)
    for same in indices.values():
        group = torch.stack([scalars[index] for index in same]).tolist()
        for index, value in zip(same, group, strict=True):
            values[index] = value
    return values


def _numbers(sums: Mapping[str, float]) -> dict[str, float]:
    """Convert sums by layer to norms, shares and maxima; add the totals of the model."""
    numbers: dict[str, float] = {}
    totals: dict[str, float] = defaultdict(float)
    for name, value in sorted(sums.items(), key=lambda entry: _order(entry[0])):
        layer, _, statistic = name.partition("/")
        if statistic in ("weights", "gradients", "updates"):
            numbers[f"{statistic[:-1]}_norm/{layer}"] = math.sqrt(value)
            totals[f"{statistic[:-1]}_norm"] += value
        elif statistic == "zeros":
            numbers[f"zero_gradient_share/{layer}"] = value / sums[f"{layer}/elements"]
            totals["zero_gradients"] += value
        elif statistic == "activations":
            count = sums[f"{layer}/outputs"]
            numbers[f"activation_rms/{layer}"] = math.sqrt(value / count)
            zeros = sums[f"{layer}/zero_activations"]
            numbers[f"zero_activation_share/{layer}"] = zeros / count
        elif statistic == "logits":
            numbers[f"largest_attention_logit/{layer}"] = value
            totals["largest_attention_logit"] = max(totals["largest_attention_logit"], value)
    for name, value in totals.items():
        numbers[name] = math.sqrt(value) if name.endswith("_norm") else value
    return numbers


def _order(name: str) -> tuple[str, int, str]:
    layer, _, what = name.partition("/")
    stack, _, number = layer.rpartition("_")
    return stack, int(number) if number.isdecimal() else -1, what
