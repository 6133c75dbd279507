"""Broadcasts tensors from a trainer to the workers of a server, over a separate group.

The protocol of the server determines the group: SGLang uses a group of torch, vLLM a
communicator of NCCL whose id the trainer writes to a TCP store. The trainer is rank 0 of both.
"""

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_S = 300.0
"""Time limit for all workers to join, and for one broadcast."""
GROUP_NAME = "weight_update_group"
"""Name of the group in SGLang's requests, and the prefix of its keys in the store."""


class Handle(Protocol):
    """A broadcast in progress."""

    def is_completed(self) -> bool:
        """Whether the tensor has been sent."""

    def wait(self) -> Any:
        """Wait until the tensor may be changed; raise if a worker is lost."""


class Broadcast(Protocol):
    """A group in which the trainer is rank 0."""

    def send(self, tensor: Tensor) -> Handle:
        """Start the broadcast of a contiguous tensor to all workers."""

    def close(self) -> None:
        """Leave the group."""

    def abort(self) -> None:
        """Leave the group without waiting for pending broadcasts."""


JoinGroup = Callable[[str, int, int, torch.device], Broadcast]
"""Called with the trainer's address and port, the number of ranks, and the trainer's device."""


class TorchGroup:
    """Process group of torch with SGLang's workers, separate from the trainer's groups.

    The keys of the store are those of a group that torch builds by name: the prefix is the
    name, then the name again, then the device type.
    """

    def __init__(self, address: str, port: int, world_size: int, device: torch.device) -> None:
        """Listen at an address, and wait until all ranks have joined.

        Args:
            address: address of this host, reachable by the workers.
            port: free port of this host.
            world_size: number of ranks: the trainer and all workers.
            device: device of the tensors; NCCL on a GPU, gloo on a CPU.
        """
        timeout = timedelta(seconds=TIMEOUT_S)
        store: dist.Store = dist.TCPStore(address, port, world_size, True, timeout)
        store = dist.PrefixStore(f"{GROUP_NAME}/", dist.PrefixStore(GROUP_NAME, store))
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            store = dist.PrefixStore("cuda/", store)
            self._group: Any = dist.ProcessGroupNCCL(store, 0, world_size, options)
        else:
            store = dist.PrefixStore("cpu/", store)
            self._group = dist.ProcessGroupGloo(store, 0, world_size, timeout)

    def send(self, tensor: Tensor) -> Handle:
        """Start to send a contiguous tensor to all workers."""
        return self._group.broadcast(tensor, 0)

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    def abort(self) -> None:
        """Leave the group; under gloo a broadcast that hangs ends after its timeout."""
        self._group.abort()


_ID_BYTES = 128  # of NCCL's unique id
_FLOAT32, _UINT8, _SUM = 7, 1, 0  # NCCL's numbers of types and sums


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


class NcclGroup:
    """NCCL communicator that vLLM's workers join by an id from a TCP store.

    The key of the id and the first all-reduce of one number are those of vLLM 0.25.
    """

    def __init__(self, address: str, port: int, world_size: int, device: torch.device) -> None:
        """Listen at an address, and wait until all ranks have joined.

        Args:
            address: address of this host, reachable by the workers.
            port: free port of this host.
            world_size: number of ranks: the trainer and all workers.
            device: GPU of the tensors.

        Raises:
            ValueError: if the device is not a GPU.
            RuntimeError: if NCCL reports an error.
        """
        if device.type != "cuda":
            raise ValueError(
                "vLLM's backend nccl needs weights on a GPU: train on a GPU, or write a folder."
            )
        self._nccl, self._device = ctypes.CDLL("libnccl.so.2"), device
        timeout = timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(
            address, port, world_size, True, timeout, wait_for_workers=False
        )
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        store: Any = self._store  # accepts bytes, although its annotation is str
        store.set("broadcast_from/0/0", pickled_unique_id(bytes(unique_id.internal)))
        self._comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._call("ncclCommInitRank", ctypes.byref(self._comm), world_size, unique_id, 0)
            number = torch.zeros(1, device=device)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            pointer = ctypes.c_void_p(number.data_ptr())
            size = ctypes.c_size_t(1)
            self._call(
                "ncclAllReduce", pointer, pointer, size, _FLOAT32, _SUM, self._comm, stream
            )
            torch.cuda.current_stream().synchronize()

    def send(self, tensor: Tensor) -> Handle:
        """Start to send a contiguous tensor to all workers, on the current stream."""
        content = tensor.view(-1).view(torch.uint8)
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            pointer = ctypes.c_void_p(content.data_ptr())
            self._call(
                "ncclBroadcast",
                pointer,
                pointer,
                ctypes.c_size_t(content.numel()),
                _UINT8,
                0,
                self._comm,
                ctypes.c_void_p(stream.cuda_stream),
            )
            event = torch.cuda.Event()
            event.record(stream)
        return _StreamEvent(event)

    def close(self) -> None:
        """Leave the group."""
        self._call("ncclCommDestroy", self._comm)

    def abort(self) -> None:
        """Leave the group without waiting for broadcasts that workers do not receive."""
        self._call("ncclCommAbort", self._comm)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nccl, name)(*arguments):
            raise RuntimeError(f"{name} failed with NCCL's code {code}.")


class _StreamEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


def pickled_unique_id(content: bytes) -> bytes:
    """Return the pickle of a NCCL id that vLLM's workers read from the store.

    The pickle of vLLM's class is composed from opcodes (Python's ``pickletools``), so that
    neither vLLM nor pickle must be imported.
    """
    if len(content) != _ID_BYTES:
        raise ValueError(f"an id of NCCL has {_ID_BYTES} bytes, not {len(content)}")

    def word(text: str) -> bytes:
        return b"\x8c" + bytes([len(text)]) + text.encode()  # SHORT_BINUNICODE

    module = "vllm.distributed.device_communicators.pynccl_wrapper"
    function = word("_ctypes") + word("_unpickle") + b"\x93"  # STACK_GLOBAL
    kind = word(module) + word("ncclUniqueId") + b"\x93"
    state = b"}" + b"C" + bytes([_ID_BYTES]) + content + b"\x86"  # ({}, content)
    return b"\x80\x04" + function + kind + state + b"\x86R."  # function(kind, state)
