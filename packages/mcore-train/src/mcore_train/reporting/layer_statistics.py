"""Statistics of a step by layer: weights, gradients, updates, activations, attention logits.

They are computed on the device in steps that ``--layer-statistics-interval`` divides and read
at the next report, so that nothing waits for the device between. Sums run over each logical
element once, whatever the layout. An update is estimated from every k-th element of a
parameter, so that no second copy of the weights is needed; k is 1 for small ones.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_models.qk_clip.row_factors import attention_layers, track_scores
from mcore_parallel.data_parallel.gradient_sync import OwnedRange
from mcore_parallel.sharding import held_share, layer_stacks
from mcore_train.assembly import Run

REST = "rest"
"""Where embeddings, heads and final norms are counted."""
SAMPLES = 1 << 18
"""Elements of a parameter from which its update is estimated, about."""
_LAYER = re.compile(r"(?:^|\.)(?P<stack>\w+)\.(?P<number>\d+)\.")

Sums = dict[str, Tensor]
"""By layer and statistic, such as ``layer_3/weights``: sums on the device."""


class LayerStatistics:
    """Measures a run's layers in the steps that are due."""

    def __init__(self, run: Run) -> None:
        """Measure nothing yet; no communication."""
        self._run = run
        self._interval = run.plan.config.logging.layer_statistics_interval
        self._handles: list[Any] = []
        self._sums: Sums = {}
        self._before: list[tuple[OwnedRange, float, Tensor, Tensor]] = []
        self._recorded: tuple[int, Sums] | None = None

    def is_due(self, step: int) -> bool:
        """Whether a step is measured."""
        return self._interval > 0 and step % self._interval == 0

    def before(self, step: int) -> None:
        """Watch the forward of a step that is due."""
        if not self.is_due(step):
            return
        self._sums = {}
        if self._run.recorder is not None:
            return  # a graph repeats kernels, not the hooks of modules
        for chunk in self._run.chunks:
            for names, block in _blocks(chunk):
                self._handles.append(block.register_forward_hook(self._note(names)))
            if not self._run.plan.config.qk_clipping.qk_clip:
                track_scores(chunk)

    def before_update(self, step: int) -> None:
        """Measure complete gradients and weights; keep samples of the weights."""
        if not self.is_due(step):
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._take_scores()
        replicas = self._run.data_parallel.replica_axes()

        def share(owned: OwnedRange) -> float:
            layout = owned.named.layout
            copies = replicas[layout.data].size * layout.tied.size
            return held_share(layout) / copies

        gradients = [
            (owned, share(owned), owned.view(unit.own_grads()))
            for unit in self._run.data_parallel.units
            for owned in unit.owned_ranges()
        ]
        weights = [(o, share(o), view) for o, view in self._run.optimizer.main_ranges()]
        self._add("gradients", gradients)
        self._add("weights", weights)
        for owned, weight, view in gradients:
            layer = layer_of(owned.named.name)
            self._plus(f"{layer}/zeros", weight * (view == 0).sum())
            self._plus(f"{layer}/elements", torch.tensor(weight * view.numel()))
        self._before = [
            (owned, weight, view[:: _stride(view)].clone(), view)
            for owned, weight, view in weights
        ]

    def after(self, step: int) -> None:
        """Measure the update of a step that is due; waits for nothing."""
        if not self.is_due(step):
            return
        strides = [_stride(view) for _, _, _, view in self._before]
        changes = [
            (owned, weight * stride, view[::stride] - before)
            for (owned, weight, before, view), stride in zip(self._before, strides, strict=True)
        ]
        self._add("updates", changes)
        self._before = []
        self._recorded = step, self._sums

    @property
    def has_recorded(self) -> bool:
        """Whether a step was measured since the last report; equal on all ranks."""
        return self._recorded is not None

    def report(self) -> tuple[int, dict[str, float]]:
        """Return the step that was measured last, and its numbers; gathers over the world.

        Keys are a statistic and a layer, such as ``gradient_norm/layer_3``.
        """
        assert self._recorded is not None
        step, sums = self._recorded
        self._recorded, self._sums = None, {}
        own = dict(zip(sums, _tolist(sums.values()), strict=True))
        found: dict[str, float] = defaultdict(float)
        for rank in gather_json(own, self._run.ctx.world):
            for name, value in rank.items():
                is_largest = name.endswith("/logits")
                found[name] = max(found[name], value) if is_largest else found[name] + value
        return step, _numbers(found)

    def _note(self, layer: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # a recomputation, of an activation that was counted
            x = output if isinstance(output, Tensor) else output[0]
            x = x.detach()
            self._plus(
                f"{layer}/squares", torch.linalg.vector_norm(x, dtype=torch.float32) ** 2
            )
            self._plus(f"{layer}/zero_activations", (x == 0).sum())
            self._plus(f"{layer}/activations", torch.tensor(x.numel()))

        return hook

    def _take_scores(self) -> None:
        clips = self._run.plan.config.qk_clipping.qk_clip
        for name, layer in attention_layers(self._run.chunks).items():
            if layer.tracker is not None and layer.tracker.largest is not None:
                self._sums[f"{layer_of(name)}/logits"] = layer.tracker.largest.max().clone()
            if not clips:
                layer.tracker = None

    def _add(self, what: str, parts: Sequence[tuple[OwnedRange, float, Tensor]]) -> None:
        """Add the squares of some views to the sums of their layers."""
        parts = [part for part in parts if part[2].numel()]
        by_dtype: dict[torch.dtype, list[tuple[OwnedRange, float, Tensor]]] = defaultdict(list)
        for part in parts:
            by_dtype[part[2].dtype].append(part)
        for dtype, same in by_dtype.items():
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm([view for _, _, view in same], 2.0, dtype=wide)
            squares = torch.stack(norms).double().square()
            squares = squares * squares.new_tensor([weight for _, weight, _ in same])
            for (owned, _, _), square in zip(same, squares.unbind(), strict=True):
                self._plus(f"{layer_of(owned.named.name)}/{what}", square)

    def _plus(self, name: str, value: Tensor) -> None:
        before = self._sums.get(name)
        self._sums[name] = value if before is None else before + value


def layer_of(name: str) -> str:
    """Return the layer of a parameter or module by its name, such as ``layer_3``."""
    found = _LAYER.search(name)
    if found is None:
        return REST
    # blocks.3.mlp of a GPT, encoder.blocks.3.mlp of a T5, mtp.0.block.mlp
    part = name[: found.start()] if found["stack"] == "blocks" else found["stack"]
    return f"{part}_{found['number']}" if part else f"layer_{found['number']}"


def _blocks(chunk: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    blocks = {block for stack in layer_stacks(chunk) for block in stack}
    return [
        (layer_of(f"{name}."), module)
        for name, module in chunk.named_modules()
        if module in blocks
    ]


def _stride(view: Tensor) -> int:
    return max(1, view.numel() // SAMPLES)


def _tolist(values: Iterable[Tensor]) -> list[float]:
    """Bring sums to the host, all that are on one device at once."""
    values = list(values)
    places = [value.device for value in values]
    found: list[float] = [0.0] * len(values)
    for device in set(places):
        chosen = [place for place, each in enumerate(places) if each == device]
        numbers = torch.stack([values[place].double() for place in chosen]).tolist()
        for place, number in zip(chosen, numbers, strict=True):
            found[place] = number
    return found


def _numbers(sums: Mapping[str, float]) -> dict[str, float]:
    """Turn sums by layer into norms, shares and maxima, and add those of the whole model."""
    found: dict[str, float] = {}
    whole: dict[str, float] = defaultdict(float)
    for name, value in sorted(sums.items(), key=lambda entry: _order(entry[0])):
        layer, _, what = name.partition("/")
        if what in ("weights", "gradients", "updates"):
            found[f"{what[:-1]}_norm/{layer}"] = math.sqrt(value)
            whole[f"{what[:-1]}_norm"] += value
        elif what == "zeros":
            found[f"zero_gradient_share/{layer}"] = value / sums[f"{layer}/elements"]
            whole["zero_gradients"] += value
        elif what == "squares":
            count = sums[f"{layer}/activations"]
            found[f"activation_rms/{layer}"] = math.sqrt(value / count)
            zeros = sums[f"{layer}/zero_activations"]
            found[f"zero_activation_share/{layer}"] = zeros / count
        elif what == "logits":
            found[f"largest_attention_logit/{layer}"] = value
            whole["largest_attention_logit"] = max(whole["largest_attention_logit"], value)
    for name, value in whole.items():
        found[name] = math.sqrt(value) if name.endswith("_norm") else value
    return found


def _order(name: str) -> tuple[str, int, str]:
    layer, _, what = name.partition("/")
    stack, _, number = layer.rpartition("_")
    return stack, int(number) if number.isdecimal() else -1, what
