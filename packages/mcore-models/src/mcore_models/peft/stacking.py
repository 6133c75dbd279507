"""Several LoRA adapters of one model in one forward pass: each token uses at most one of them.

The adapters are stacked along their rank: A has the rows of all adapters, B the columns of all.
Each token's hidden vector between A and B is set to zero outside the columns of the token's
adapter. A forward pass costs as much as one adapter with the sum of the ranks, for any mix of
tokens. No size depends on the mix, so the pass can be recorded in a CUDA graph.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mcore_models.peft.config import ADAPTER, PeftConfig
from mcore_models.peft.experts import ExpertsAdapter
from mcore_models.peft.lora import LinearAdapter


def stacked_config(configs: Mapping[str, PeftConfig]) -> PeftConfig:
    """Return the config of one adapter that holds all given adapters, stacked.

    Raises:
        ValueError: for DoRA, whose magnitudes scale the complete weight.
    """
    for name, config in configs.items():
        if config.peft == "dora":
            raise ValueError(
                f"adapter {name}: DoRA adapters cannot share a batch with other adapters. "
                "Merge this adapter with its base (mcore-ckpt convert) and serve the result."
            )
    rank = sum(config.lora_dim for config in configs.values())
    targets = {t: None for config in configs.values() for t in config.lora_target_modules}
    # Each adapter's factor is part of its B, so the factor of the stack is 1.
    return PeftConfig(
        peft="lora", lora_dim=rank, lora_alpha=rank, lora_target_modules=tuple(targets)
    )


class StackedAdapters:
    """The stacked adapters of a model, and the adapter of each token of the next forward pass.

    Attributes:
        names: of the adapters, in the order of their numbers.
        mask: whether a token uses a column of the stacked rank, ``[T, R]``; None: no token of
            the pass has an adapter, and nothing is added.
    """

    def __init__(
        self, model: nn.Module, configs: Mapping[str, PeftConfig], device: torch.device
    ) -> None:
        """Use the adapters of a model that was built with ``stacked_config``.

        Args:
            model: with adapters of zeros, which ``fill`` overwrites.
            configs: of the adapters, by name.
            device: of the model.
        """
        self.names = tuple(configs)
        self.mask: Bool[Tensor, "T R"] | None = None
        ranks = [config.lora_dim for config in configs.values()]
        self._begins = [0, *accumulate(ranks)]
        numbers = torch.arange(len(ranks), device=device)
        self._owners = numbers.repeat_interleave(torch.tensor(ranks, device=device))
        self._stacks = {
            path: adapter
            for path, adapter in model.named_modules()
            if isinstance(adapter, LinearAdapter)
        }
        for adapter in self._stacks.values():
            adapter.stack = self

    @contextmanager
    def chosen(self, numbers: Int[Tensor, " T"] | None) -> Iterator[None]:
        """Return a context in which forward passes apply to each token its adapter.

        Args:
            numbers: number of each token's adapter, -1 for no adapter; None: no token has an
                adapter.
        """
        self.mask = None if numbers is None else numbers[:, None] == self._owners
        try:
            yield
        finally:
            self.mask = None

    def select(self, hidden: Float[Tensor, "*T C"]) -> Float[Tensor, "*T C"]:
        """Return A's output with the columns of other adapters set to zero."""
        assert self.mask is not None
        T, R = self.mask.shape
        of_outputs = hidden.reshape(T, -1, R)  # [T, outputs * R] -> [T, outputs, R]
        return of_outputs.masked_fill(~self.mask[:, None], 0.0).view_as(hidden)

    def fill(self, name: str, model: nn.Module) -> None:
        """Copy an adapter into its columns of the stack, in place; no communication.

        Args:
            name: of the adapter.
            model: the same model on the same ranks, with only this adapter.

        Raises:
            ValueError: if the adapter changes weights that cannot be masked by token: those of
                routed experts, or MLA's ``kv_up``.
        """
        begin = self._begins[self.names.index(name)]
        for path, adapter in model.named_modules():
            if isinstance(adapter, ExpertsAdapter) or path.endswith(f".kv_up.{ADAPTER}"):
                raise ValueError(
                    f"adapter {name} has matrices of {path.removesuffix(f'.{ADAPTER}')}, which "
                    "cannot share a batch with other adapters. Merge this adapter with its "
                    "base (mcore-ckpt convert) and serve the result."
                )
            if isinstance(adapter, LinearAdapter):
                self._fill_linear(self._stacks[path], adapter, begin)

    @torch.no_grad()
    def _fill_linear(self, stack: LinearAdapter, adapter: LinearAdapter, begin: int) -> None:
        rank, targets = adapter.rank, dict(_matrices(stack))
        for output, (down, up) in _matrices(adapter):
            stacked_down, stacked_up = targets[output]
            stacked_down[begin : begin + rank].copy_(down)
            stacked_up[:, begin : begin + rank].copy_(up * adapter.scale)


def _matrices(adapter: LinearAdapter) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield A and B of each adapted output as views, with the index of the output."""
    adapted = [i for i, has in enumerate(adapter.is_adapted) if has]
    downs = adapter.lora_A.split(adapter.rank)
    ups = adapter.lora_B.split([adapter.sizes[i] for i in adapted])
    yield from zip(adapted, zip(downs, ups, strict=True), strict=True)
