"""Runs a model on a text; collects statistics of matrices' inputs and of keys and values."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_infer.kv_cache import StaticCache
from mcore_infer.quantization.loading import linears
from mcore_models.protocol import LanguageModel, LayerState
from mcore_moe.dispatch.permutation import RowPlan, permute
from mcore_moe.experts.experts import Experts
from mcore_parallel.precision.gemm import Gemm, Operands

log = logging.getLogger(__name__)


class InputStatistics:
    """Statistics of all inputs of one matrix.

    Attributes:
        num_rows: number of tokens.
        amax: largest magnitude of each channel.
        abs_sum: sum of magnitudes of each channel.
        moments: sums of squares of the channels, or ``[D, D]`` sums of products of all pairs.
    """

    def __init__(self, width: int, device: torch.device, *, has_pairs: bool) -> None:
        self.num_rows = 0
        self.amax = torch.zeros(width, device=device)
        self.abs_sum = torch.zeros(width, device=device)
        shape = (width, width) if has_pairs else (width,)
        self.moments = torch.zeros(shape, device=device)

    def add(self, x: Float[Tensor, "T D"]) -> None:
        """Add the inputs of T tokens to the statistics."""
        if not x.shape[0]:
            return
        x = x.detach().float()
        self.num_rows += x.shape[0]
        self.amax = torch.maximum(self.amax, x.abs().amax(0))
        self.abs_sum += x.abs().sum(0)
        self.moments += x.t() @ x if self.moments.dim() == 2 else x.square().sum(0)

    @property
    def hessian(self) -> Float[Tensor, "D D"]:
        """Mean products of all pairs of channels; a diagonal if only squares were recorded."""
        mean = self.moments / max(1, self.num_rows)
        return mean if mean.dim() == 2 else mean.diag()

    def output_error(self, weight: Float[Tensor, "F D"], error: Float[Tensor, "F D"]) -> float:
        """Return the relative error of the outputs, computed from the inputs' second moments.

        sum over tokens of |E x|^2 = trace(E M E^T), where M has the sums of products x x^T.
        """
        return (self._power(error) / self._power(weight).clamp(min=1e-30)).sqrt().item()

    def _power(self, matrix: Tensor) -> Tensor:
        if self.moments.dim() == 2:
            return ((matrix @ self.moments) * matrix).sum().clamp(min=0)
        return (matrix.square() * self.moments).sum()


@dataclass(frozen=True)
class _ObservedGemm:
    """A GEMM that records statistics of its inputs."""

    inner: Gemm
    seen: InputStatistics

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:  # noqa: ARG002
        return self

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Operands]:
        self.seen.add(x.flatten(0, -2))
        return self.inner.forward(x, weight, bias)

    def keep(self, x: Tensor) -> Operands:
        return self.inner.keep(x)

    def prepare(self, grad: Tensor) -> Operands:
        return self.inner.prepare(grad)

    def input_grad(self, grad: Operands, weight: Tensor) -> Tensor:
        return self.inner.input_grad(grad, weight)

    def weight_grad(self, grad: Operands, kept: Operands, slot: object) -> Tensor | None:
        return self.inner.weight_grad(grad, kept, slot)  # pyrefly: ignore[bad-argument-type]


@contextmanager
def _watching(model: nn.Module, seen: Mapping[str, InputStatistics]) -> Iterator[None]:
    """Within the context, record statistics of the inputs of matrices, by path."""
    with ExitStack() as stack:
        for path, linear in linears(model).items():
            if path in seen:
                plain = linear.gemm
                linear.gemm = _ObservedGemm(plain, seen[path])
                stack.callback(setattr, linear, "gemm", plain)
        for path, module in model.named_modules():
            if isinstance(module, Experts) and any(p.startswith(f"{path}.") for p in seen):
                stack.callback(
                    module.register_forward_pre_hook(_expert_hook(path, seen)).remove
                )
        yield


def _expert_hook(
    path: str, seen: Mapping[str, InputStatistics]
) -> Callable[[Experts, tuple[Tensor, Tensor, RowPlan]], None]:
    def note(experts: Experts, arguments: tuple[Tensor, Tensor, RowPlan]) -> None:
        x, _, plan = arguments
        rows = permute(x, plan)
        ends = plan.offsets.tolist()
        for expert in range(experts.num_local_experts):
            expert_rows = rows[ends[expert] : ends[expert + 1]]
            first, second = (seen.get(f"{path}.{expert}.{name}") for name in ("fc1", "fc2"))
            if first is not None:
                first.add(expert_rows)
            if second is None:
                continue
            hidden = F.linear(expert_rows, experts.fc1_weight[expert])
            if experts.fc1_bias is not None:
                hidden = hidden + experts.fc1_bias[expert]
            # Routing weights multiply an expert's output, not the input of its second matrix.
            second.add(experts.network.activate(hidden))

    return note


def observe(
    model: LanguageModel,
    windows: Sequence[Int[Tensor, "_ S"]],
    widths: Mapping[str, int],
    *,
    has_pairs: bool,
    what: str = "",
) -> dict[str, InputStatistics]:
    """Run a model on windows of text; return the statistics of the inputs of its matrices.

    Args:
        model: model in eval mode.
        windows: token ids.
        widths: number of input channels of each matrix, by path.
        has_pairs: record products of all pairs of channels, not only squares.
        what: name of the pass in the log.
    """
    device = next(model.parameters()).device
    seen = {
        path: InputStatistics(width, device, has_pairs=has_pairs)
        for path, width in widths.items()
    }
    step = max(1, len(windows) // 4)
    with torch.no_grad(), _watching(model, seen):
        for number, window in enumerate(windows, 1):
            model(window.to(device))
            if number % step == 0 or number == len(windows):
                log.info("calibrating%s: %d of %d windows", what, number, len(windows))
    return seen


class _WatchedLayer:
    """A layer's state that records the largest magnitudes of keys and values."""

    def __init__(self, inner: LayerState, tops: dict[str, Tensor]) -> None:
        self._inner, self._tops = inner, tops

    def attend(self, q: Tensor, k: Tensor, v: Tensor | None, **options: object) -> Tensor:
        for name, tensor in (("k", k), ("v", k if v is None else v)):
            top = tensor.abs().amax().float()
            self._tops[name] = torch.maximum(self._tops.get(name, top), top)
        return self._inner.attend(q, k, v, **options)  # pyrefly: ignore[bad-argument-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class _WatchedCache(StaticCache):
    def __init__(self, capacity: int, tops: dict[int, dict[str, Tensor]]) -> None:
        super().__init__(capacity)
        self._tops = tops

    def layer(self, number: int) -> Any:
        return _WatchedLayer(super().layer(number), self._tops.setdefault(number, {}))


def largest_keys_and_values(
    model: LanguageModel, windows: Sequence[Int[Tensor, "_ S"]]
) -> dict[int, dict[str, Tensor]]:
    """Run a model on a text; return the largest keys and values by layer and ``k`` or ``v``."""
    device = next(model.parameters()).device
    tops: dict[int, dict[str, Tensor]] = {}
    with torch.no_grad():
        for window in windows:
            cache = _WatchedCache(window.shape[1], tops)
            model(window.to(device), state=cache)
    return tops
