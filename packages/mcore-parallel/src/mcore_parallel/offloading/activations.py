"""Offloads activations to host memory between a layer's forward and its backward.

Tensors that autograd saves in a layer are copied to pinned host memory on a separate stream
while the next layer computes; then the device's copy is freed. Backward of a layer prefetches
the tensors of the preceding layer, so that copies overlap with computation. Weights and small
tensors stay on the device; a tensor that several operations save is copied once. Results do not
change. On a CPU tensors are copied too, so that tests run the same code.

Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 5.1.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mcore_parallel.dtensors import is_dtensor

LEAST_ELEMENTS = 1 << 20
"""Smallest number of elements of a tensor that is offloaded from a GPU."""


class ActivationOffload:
    """Offloads the tensors that autograd saves in the first layers of a model chunk.

    Attributes:
        host_bytes: bytes of host memory allocated so far.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        num_layers: int,
        device: torch.device,
        least_elements: int = 0,
    ) -> None:
        """Register hooks on the layers; no communication.

        Args:
            layers: layers of a chunk, in forward order.
            num_layers: number of first layers to offload; fewer than all, since backward needs
                the last layer's tensors at once.
            device: device of the layers.
            least_elements: smallest number of elements of an offloaded tensor; 0:
                ``LEAST_ELEMENTS`` on a GPU, 1 on a CPU.
        """
        if num_layers >= len(layers):
            raise ValueError(
                f"--cpu-offloading-num-layers {num_layers} must be less than the "
                f"{len(layers)} layers of a stage: backward needs the last layer's activations "
                "immediately."
            )
        self._on_gpu = device.type == "cuda"
        self._least = least_elements or (LEAST_ELEMENTS if self._on_gpu else 1)
        self.host_bytes = 0
        self._layers, self._weights = layers, set[int]()
        if self._on_gpu:
            self._to_host, self._to_device = (
                torch.cuda.Stream(device),
                torch.cuda.Stream(device),
            )
        self._free: dict[int, list[_Buffer]] = {}
        self._latest: _SavedLayer | None = None
        self._open = ExitStack()
        self._handles = []
        # The layer after the last offloaded one has a hook too: at its end, the copies of the
        # last offloaded layer have had a layer's time, and that layer's tensors are freed.
        for index, layer in enumerate(layers[: num_layers + 1]):
            if index < num_layers:
                enter = partial(self._enter, is_first=index == 0)
                self._handles.append(layer.register_forward_pre_hook(enter))
            leave = partial(self._leave, is_inside=index < num_layers)
            self._handles.append(layer.register_forward_hook(leave, always_call=True))

    def remove_hooks(self) -> None:
        """Stop offloading: remove the hooks from the layers."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, _arguments: tuple, *, is_first: bool) -> None:
        if not torch.is_grad_enabled():
            return
        if is_first:
            self._weights = set().union(*map(_whole_weights, self._layers))
        self._latest = _SavedLayer(self, None if is_first else self._latest)
        pack = partial(self._pack, self._latest, module)
        self._open.enter_context(saved_tensors_hooks(pack, _SavedTensor.restore))

    def _leave(
        self, _module: nn.Module, _arguments: tuple, _output: Any, *, is_inside: bool
    ) -> None:
        if not torch.is_grad_enabled() or self._latest is None:
            return
        self._open.close()
        self._latest.by_key.clear()
        done = self._latest.preceding if is_inside else self._latest
        if done is not None:
            done.free_on_device()

    def _pack(self, layer: "_SavedLayer", module: nn.Module, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage().data_ptr()
        if tensor.numel() < self._least or storage in self._weights:
            return tensor
        if storage in _whole_weights(module):
            return tensor
        key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in layer.by_key:
            layer.by_key[key] = saved = _SavedTensor(layer, tensor, self.send(tensor))
            layer.saved.append(ref(saved))
        return layer.by_key[key]

    def send(self, tensor: Tensor) -> "_Buffer":
        """Launch the copy of a tensor to a host buffer; return the buffer."""
        size = tensor.numel() * tensor.element_size()
        free = self._free.setdefault(size, [])
        if free:
            buffer = free.pop()
        else:
            buffer = _Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu))
            self.host_bytes += size
        if not self._on_gpu:
            buffer.shaped(tensor).copy_(tensor)
            return buffer
        if buffer.event is not None:  # the copy of its previous content must have ended
            self._to_host.wait_event(buffer.event)
        self._to_host.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._to_host):
            buffer.shaped(tensor).copy_(tensor, non_blocking=True)
        buffer.event = self._to_host.record_event()
        return buffer

    def fetch(self, saved: "_SavedTensor") -> None:
        """Launch the copy of a tensor back to the device."""
        tensor = torch.empty_strided(
            saved.shape, saved.strides, dtype=saved.dtype, device=saved.device
        )
        source = saved.buffer.shaped(tensor)
        if self._on_gpu:
            # Queued operations may still use the memory that the allocator has given out.
            self._to_device.wait_stream(torch.cuda.current_stream(saved.device))
            with torch.cuda.stream(self._to_device):
                tensor.copy_(source, non_blocking=True)
            saved.buffer.event = self._to_device.record_event()
        else:
            tensor.copy_(source)
        saved.tensor = tensor

    def recycle(self, buffer: "_Buffer") -> None:
        """Return a buffer to the pool, once its tensor is no longer needed."""
        self._free[buffer.memory.numel()].append(buffer)


@dataclass(slots=True)
class _Buffer:
    """Host memory of one tensor."""

    memory: Tensor
    event: Any = None
    """Event at the end of the latest copy from or to the memory."""

    def shaped(self, like: Tensor) -> Tensor:
        """Return a view of the memory with the dtype, shape and strides of a tensor."""
        flat = self.memory.view(like.dtype)
        return flat.as_strided(like.shape, _dense_strides(like))


class _SavedLayer:
    """The tensors that one layer saved in one forward, and the layer before it."""

    def __init__(self, owner: ActivationOffload, preceding: "_SavedLayer | None") -> None:
        self.owner, self.preceding = owner, preceding
        self.by_key: dict[Any, _SavedTensor] = {}
        self.saved: list[ReferenceType[_SavedTensor]] = []
        self.is_fetched = False

    def each(self, apply: Callable[["_SavedTensor"], None]) -> None:
        """Call a function with every tensor that backward still needs."""
        for saved in [each() for each in self.saved]:
            if saved is not None:
                apply(saved)

    def free_on_device(self) -> None:
        """Free the copies on the device."""
        self.each(_SavedTensor.free_on_device)

    def fetch(self) -> None:
        """Launch the copies of all tensors back to the device, once."""
        if not self.is_fetched:
            self.is_fetched = True
            self.each(_SavedTensor.prefetch)


class _SavedTensor:
    """A tensor saved by autograd, on the device, on the host or on both."""

    def __init__(self, layer: _SavedLayer, tensor: Tensor, buffer: _Buffer) -> None:
        self.layer, self.buffer = layer, buffer
        self.tensor: Tensor | None = tensor
        self.shape, self.strides = tensor.shape, _dense_strides(tensor)
        self.dtype, self.device = tensor.dtype, tensor.device

    def free_on_device(self) -> None:
        """Free the tensor on the device, after the current stream has waited for the copy."""
        if self.tensor is not None and self.buffer.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.buffer.event)
        self.tensor = None

    def prefetch(self) -> None:
        """Launch the copy back to the device, unless the device still holds the tensor."""
        if self.tensor is None:
            self.layer.owner.fetch(self)

    @staticmethod
    def restore(packed: Any) -> Tensor:
        """Return the tensor for backward, and prefetch the tensors of the preceding layer."""
        if isinstance(packed, Tensor):
            return packed
        layer = packed.layer
        layer.fetch()
        if layer.preceding is not None:
            layer.preceding.fetch()
        packed.prefetch()
        if packed.buffer.event is not None:
            torch.cuda.current_stream(packed.device).wait_event(packed.buffer.event)
        return packed.tensor

    def __del__(self) -> None:
        """Return the host buffer to the pool, when autograd releases the tensor."""
        self.layer.owner.recycle(self.buffer)


def _whole_weights(module: nn.Module) -> set[int]:
    """Return the storage addresses of the weights that are not DTensors now.

    ``fully_shard`` replaces a layer's DTensors by gathered weights before its forward.
    """
    weights = (p for p in module.parameters() if not is_dtensor(p))
    return {parameter.untyped_storage().data_ptr() for parameter in weights}


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides, or contiguous strides if the tensor's memory has gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
