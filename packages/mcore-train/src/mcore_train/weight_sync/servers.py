"""Pushes weights to running servers of vLLM and SGLang over their protocols.

HTTP requests announce names, dtypes and shapes; the tensors are broadcast over a group that the
workers join. Neither program is imported. The requests are those of vLLM 0.25 (four phases,
backend ``nccl``) and SGLang 0.5 (``update_weights_from_distributed`` and ``..._from_disk``).

A server is paused while it is updated. It remains paused after a failed push, since it then has
weights of two versions and must not answer. The next push builds a new group, sends all weights
again and resumes the server.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from mcore_ckpt.save_load.rank_agreement import raise_on_all_ranks
from mcore_parallel.launch.launcher import free_port
from mcore_train.weight_sync.broadcast import (
    GROUP_NAME,
    TIMEOUT_S,
    Broadcast,
    JoinGroup,
    NcclGroup,
    TorchGroup,
)
from mcore_train.weight_sync.hf_weights import HFWeights, NamedTensors, combined_digest

_POLL_S = 0.0005

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class PushReport:
    """Counts of one push."""

    version: int
    num_tensors: int
    """Tensors that this rank sent; 0 on ranks other than the first."""
    num_bytes: int
    """Bytes of all tensors."""
    digest: int
    """``combined_digest`` of the tensors in the order of sending; 0 on ranks other than the
    first, and without ``with_digest``."""
    seconds: float


class ServerProtocol(Protocol):
    """The requests of a server; each returns when the server has answered."""

    def count_workers(self) -> int:
        """Request the number of workers in the group."""

    def announce_group(self, address: str, port: int, world_size: int, backend: str) -> None:
        """Make the workers join the group; returns when they have joined."""

    def leave_group(self) -> None:
        """Make the workers leave a lost group."""

    def begin_update(self) -> None:
        """Pause the server and prepare its model."""

    def announce_bucket(self, tensors: NamedTensors, version: int) -> None:
        """Make the workers receive a bucket; returns when they have loaded it."""

    def messages(self, tensors: NamedTensors) -> list[Tensor]:
        """Return the tensors that are broadcast for a bucket, in order."""

    def end_update(self) -> None:
        """Activate the new weights and resume the server."""


class Server:
    """A server whose weights are replaced by those of a run.

    Attributes:
        version: version of the last complete push; 0 before the first push.
    """

    def __init__(
        self, weights: HFWeights, protocol: ServerProtocol, build_group: Callable[[], Broadcast]
    ) -> None:
        """Build the first group; called by ``join_vllm`` and ``join_sglang``.

        Args:
            weights: weights of the run.
            protocol: protocol of the server.
            build_group: builds a group of the first rank and the workers.
        """
        self.version = 0
        self._weights, self._protocol, self._build_group = weights, protocol, build_group
        self._group: Broadcast | None = None
        self._has_failed = False
        with raise_on_all_ranks(weights.world):
            if weights.is_root:
                self._group = build_group()

    def push(self, version: int | None = None, *, with_digest: bool = False) -> PushReport:
        """Send all weights; when this returns, the server uses them. Collective over training.

        Args:
            version: version of these weights, above the last; None: the last version plus 1.
            with_digest: whether to compute the digest of the sent tensors.

        Raises:
            ValueError: if the version is not above the last.
            RuntimeError: on all ranks, if the server reports an error or is lost. The server
                remains paused.
        """
        begin, weights, protocol = time.perf_counter(), self._weights, self._protocol
        number = self.version + 1 if version is None else version
        if number <= self.version:
            raise ValueError(
                f"push of version {number} after version {self.version}: give a number above "
                "the last."
            )
        num_tensors, total = 0, 0
        with self._fail_together():
            if weights.is_root:
                self._renew_group()
                protocol.begin_update()
        for tensors in weights.buckets():
            with self._fail_together():
                if weights.is_root:
                    self._send(tensors, number)
                    total = combined_digest(total, tensors) if with_digest else 0
            num_tensors += len(tensors)
        with self._fail_together():
            if weights.is_root:
                protocol.end_update()
        self.version = number
        seconds = time.perf_counter() - begin
        return PushReport(number, num_tensors, weights.num_bytes, total, seconds)

    def close(self) -> None:
        """Leave the group; the server keeps its weights."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @contextmanager
    def _fail_together(self) -> Iterator[None]:
        """Raise on all ranks if a rank fails, and mark the group, whose broadcasts may hang."""
        try:
            with raise_on_all_ranks(self._weights.world):
                yield
        except Exception:
            self._has_failed = True
            raise

    def _renew_group(self) -> None:
        if not self._has_failed:
            return
        lost = self._group
        if lost is not None:
            lost.abort()
            self._protocol.leave_group()
        # The old group is freed after the workers have left: freeing a gloo group waits for its
        # broadcasts.
        self._group = self._build_group()
        self._has_failed = False
        del lost

    def _send(self, tensors: NamedTensors, version: int) -> None:
        assert self._group is not None
        reply = _in_thread(partial(self._protocol.announce_bucket, tensors, version))
        for message in self._protocol.messages(tensors):
            handle = self._group.send(message.contiguous())
            _wait_for(handle.is_completed, reply)
            handle.wait()
        reply.result()


def join_vllm(
    weights: HFWeights,
    url: str,
    *,
    address: str,
    port: int,
    num_workers: int = 0,
    join: JoinGroup = NcclGroup,
) -> Server:
    """Connect a run to a server of vLLM 0.25; collective over the ranks of training.

    The server needs ``--weight-transfer-config '{"backend": "nccl"}'`` and, for the routes,
    ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        weights: weights of the run.
        url: URL such as ``http://host:8000``.
        address: address of the first rank's host, reachable by the workers.
        port: free port of this host; 0: a free port is chosen for every group.
        num_workers: GPUs of the server; 0: the number is requested from the server.
        join: builds the group.

    Raises:
        RuntimeError: on all ranks, if the server does not answer or reports an error.

    Reference:
        https://docs.vllm.ai/en/v0.25.1/training/weight_transfer/
    """
    return _join(weights, _VLLM(url), address, port, num_workers, join)


def join_sglang(
    weights: HFWeights,
    url: str,
    *,
    address: str,
    port: int,
    num_workers: int = 0,
    join: JoinGroup = TorchGroup,
) -> Server:
    """Connect a run to a server of SGLang 0.5; collective over the ranks of training.

    The server reports the version with every answer. Arguments and errors are those of
    ``join_vllm``.

    Reference:
        https://docs.sglang.io/advanced_features/sglang_for_rl.html
    """
    return _join(weights, _SGLang(url), address, port, num_workers, join)


def load_weights_folder(url: str, folder: str | Path, version: int) -> None:
    """Make a server of SGLang load a Hugging Face folder; returns when the server uses it.

    Args:
        url: URL such as ``http://host:30000``.
        folder: folder of ``save_weights_folder``, as a path on the server's host.
        version: version that the server reports with its answers.

    Raises:
        RuntimeError: if the server reports an error; it keeps its weights.
    """
    body = {"model_path": str(folder), "weight_version": str(version)}
    _request_success(f"{url.rstrip('/')}/update_weights_from_disk", body)


def _join(
    weights: HFWeights,
    protocol: ServerProtocol,
    address: str,
    port: int,
    num_workers: int,
    join: JoinGroup,
) -> Server:
    def build_group() -> Broadcast:
        group_args = (
            *(address, port or free_port()),
            1 + (num_workers or protocol.count_workers()),
        )
        backend = "nccl" if weights.device.type == "cuda" else "gloo"
        # The request returns when all ranks have joined, and joining waits for the workers, so
        # both must run at the same time.
        reply = _in_thread(partial(protocol.announce_group, *group_args, backend))
        joined = _in_thread(partial(join, *group_args, weights.device))
        _wait_for(joined.done, reply)
        group = joined.result()
        reply.result()
        return group

    return Server(weights, protocol, build_group)


class _VLLM:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def count_workers(self) -> int:
        return int(request_json(f"{self._url}/get_world_size")["world_size"])

    def announce_group(self, address: str, port: int, world_size: int, backend: str) -> None:  # noqa: ARG002
        info = {"master_address": address, "master_port": port}
        info |= {"rank_offset": 1, "world_size": world_size}
        request_json(f"{self._url}/init_weight_transfer_engine", {"init_info": info})

    def leave_group(self) -> None:
        """A later group replaces the lost one."""

    def begin_update(self) -> None:
        # Running requests finish with the old weights, then the prefix cache is cleared.
        request_json(f"{self._url}/pause?mode=wait", {})
        request_json(f"{self._url}/start_weight_update", {})

    def announce_bucket(self, tensors: NamedTensors, version: int) -> None:  # noqa: ARG002
        info = {
            **_describe(tensors, "dtype_names"),
            "packed": True,
            # A message ends with the tensor that exceeds this size, so a bucket is one message.
            "packed_buffer_size_bytes": sum(tensor.nbytes for _, tensor in tensors),
            "packed_num_buffers": 1,
        }
        request_json(f"{self._url}/update_weights", {"update_info": info})

    def messages(self, tensors: NamedTensors) -> list[Tensor]:
        return [torch.cat([t.contiguous().view(-1).view(torch.uint8) for _, t in tensors])]

    def end_update(self) -> None:
        request_json(f"{self._url}/finish_weight_update", {})
        request_json(f"{self._url}/resume", {})


class _SGLang:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def count_workers(self) -> int:
        info = request_json(f"{self._url}/get_server_info")
        return int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))

    def announce_group(self, address: str, port: int, world_size: int, backend: str) -> None:
        body = {"master_address": address, "master_port": port, "backend": backend}
        body |= {"rank_offset": 1, "world_size": world_size, "group_name": GROUP_NAME}
        _request_success(f"{self._url}/init_weights_update_group", body)

    def leave_group(self) -> None:
        _request_success(
            f"{self._url}/destroy_weights_update_group", {"group_name": GROUP_NAME}
        )

    def begin_update(self) -> None:
        # Running requests return to the queue and are computed again with the new weights.
        request_json(f"{self._url}/pause_generation", {"mode": "retract"})

    def announce_bucket(self, tensors: NamedTensors, version: int) -> None:
        body = _describe(tensors, "dtypes")
        body |= {"group_name": GROUP_NAME, "flush_cache": False}
        body |= {"weight_version": str(version)}
        _request_success(f"{self._url}/update_weights_from_distributed", body)

    def messages(self, tensors: NamedTensors) -> list[Tensor]:
        return [tensor for _, tensor in tensors]

    def end_update(self) -> None:
        request_json(f"{self._url}/flush_cache", {})
        request_json(f"{self._url}/continue_generation", {})


def request_json(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a POST request, or a GET request without a body; return the JSON reply.

    Raises:
        RuntimeError: if no server answers, or the reply is an error.
    """
    content = None if body is None else json.dumps(body).encode()
    request = Request(url, content, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=TIMEOUT_S) as reply:
            answer = reply.read()
    except HTTPError as error:
        text = error.read()[:500].decode(errors="replace")
        raise RuntimeError(f"{url}: status {error.code}: {text}") from None
    except OSError as error:
        raise RuntimeError(f"{url}: {error}") from None
    try:
        return json.loads(answer)
    except ValueError:  # some routes answer with plain text
        return {}


def _request_success(url: str, body: Mapping[str, Any]) -> None:
    """Send a request whose reply carries ``success``."""
    reply = request_json(url, body)
    if not reply.get("success"):
        raise RuntimeError(f"{url}: {reply.get('message', reply)}")


def _describe(tensors: NamedTensors, dtypes: str) -> dict[str, Any]:
    return {
        "names": [name for name, _ in tensors],
        dtypes: [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


def _in_thread(work: Callable[[], Value]) -> "Future[Value]":
    """Run a function in a thread that does not keep the process alive."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def _wait_for(is_over: Callable[[], bool], reply: "Future[None]") -> None:
    """Wait until ``is_over``; raise if the server has refused, which then receives nothing."""
    while not is_over():
        if reply.done():
            reply.result()
        time.sleep(_POLL_S)
