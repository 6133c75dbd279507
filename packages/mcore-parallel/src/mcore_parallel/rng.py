"""Initial weights that do not depend on the rank grid, and named random streams for dropout.

Weights: ``fill_normal_`` draws any box of a logical tensor in tiles. A tile's seed is a hash of
(seed, name, position of the tile), so every rank grid gets bitwise equal weights, and a rank
draws only the tiles that overlap its boxes.

Dropout: ``RngStreams`` holds named generator states. Dropout on a tensor that all tensor ranks
replicate uses ``replicated``, so that all of them drop the same elements; dropout on a tensor
that tensor ranks split uses ``tensor_parallel``.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_parallel.dtensors import is_dtensor
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.random_tiles import Fill, hash_words, plan_fills, run_fills
from mcore_parallel.sharding import NamedParameter, Shard, named_parameters, shards_of


def fill_normal_(
    view: Float[Tensor, "..."],
    *,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    std: float,
    num_threads: int = 0,
) -> None:
    """Fill a box of a logical tensor with normal random numbers, in place.

    An element gets the same bits in every box that contains it. Numbers are drawn on the CPU in
    float32 and cast, about 150 million per second and thread; each thread holds a few tiles
    (for a view on another device, also one row of tiles). Another torch build or kind of CPU
    may give other bits. A tensor of more than two dimensions is filled as a stack of matrices.

    Args:
        view: memory of the box, any device, dtype and strides.
        seed: seed of the model.
        name: logical name, so that tensors of one model get different numbers.
        shape: shape of the logical tensor.
        offsets: first element of the box in the logical tensor.
        std: standard deviation; the mean is 0.
        num_threads: threads that draw; 0: one for each core, at most 16. (torch's own number of
            threads is often 1, set by launchers.)

    Raises:
        ValueError: if the box is not inside the tensor.
    """
    fills = plan_fills(view, seed=seed, name=name, shape=shape, offsets=offsets, std=std)
    run_fills(fills, num_threads)


def fill_parameter_(named: NamedParameter, *, seed: int, std: float) -> None:
    """Fill every part of a local parameter by ``fill_normal_``, padding with zeros, in place.

    For a DTensor (FSDP2), each rank draws the full tensor and keeps its own shard.
    """
    parameter = named.parameter.detach()
    if is_dtensor(parameter):
        local = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        fill_parameter_(replace(named, parameter=nn.Parameter(local)), seed=seed, std=std)
        from torch.distributed.tensor import distribute_tensor  # loaded, as this is a DTensor

        # src_data_rank=None: no broadcast, since all ranks have drawn equal numbers.
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.copy_(distribute_tensor(local, mesh, placements, src_data_rank=None))
        return
    parameter.zero_()
    shards = shards_of([(named, parameter)])
    fill_shards_([(name, shard, std) for name, shard in shards.items()], seed=seed)


def fill_shards_(shards: Iterable[tuple[str, Shard, float]], *, seed: int) -> None:
    """Fill this rank's pieces of many logical tensors by ``fill_normal_``, in place.

    Threads are started once for all tensors.

    Args:
        shards: logical name, shard and standard deviation of each tensor.
        seed: seed of the model.
    """
    fills: list[Fill] = []
    devices: set[torch.device] = set()
    for name, shard, std in shards:
        for piece in shard.pieces:
            devices.add(piece.data.device)
            fills += plan_fills(
                piece.data,
                seed=seed,
                name=name,
                shape=shard.shape,
                offsets=piece.offsets,
                std=std,
            )
    for device in devices:
        if device.type == "cuda":
            # The threads write on their own streams: work queued on the memory must end first.
            torch.cuda.current_stream(device).synchronize()
    run_fills(fills)


def reset_weight_(layer: nn.Module, *, std: float, seed: int | None = None) -> None:
    """Fill a layer's ``weight`` with normal numbers, its other direct parameters with zeros.

    Args:
        layer: holds a parameter ``weight``; logical names are relative to the layer.
        std: standard deviation; 0.0 fills with zeros and draws nothing.
        seed: None draws a seed from torch's default CPU generator.
    """
    with torch.no_grad():
        for parameter in layer.parameters(recurse=False):
            parameter.zero_()
    if std == 0.0 or layer.weight.is_meta:
        return
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    for named in named_parameters(layer):
        if named.parameter is layer.weight:
            fill_parameter_(named, seed=seed, std=std)


class RngStreams:
    """Named random streams of one rank, for dropout.

    - ``replicated``: equal over tensor ranks, different over context, data and pipeline
      ranks. For tensors that all tensor ranks replicate.
    - ``tensor_parallel``: different on every rank of the dense grid. For tensors split over
      tensor ranks, by features or, under sequence parallelism, by tokens.
    - ``expert``: different on every rank of the expert grid. For tokens inside experts.
    """

    NAMES = ("replicated", "tensor_parallel", "expert")

    def __init__(self, seed: int, ctx: ParallelContext) -> None:
        """Seed every stream from ``seed`` and this rank's coordinates in ``ctx``."""
        self.device = ctx.device
        data = (ctx.cp.rank, ctx.dp.rank, ctx.pp.rank)
        coordinates = {
            "replicated": data,
            "tensor_parallel": (ctx.tp.rank, *data),
            "expert": (ctx.expert_tp.rank, ctx.ep.rank, ctx.expert_dp.rank, ctx.pp.rank),
        }
        self._states = {
            name: _state_of(
                torch.Generator(self.device).manual_seed(
                    hash_words(seed, name, *coordinates[name])
                )
            )
            for name in self.NAMES
        }

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Let the device's default generator draw from stream ``name`` inside the block.

        The stream continues where its last fork ended; afterwards the default generator has
        its state from before the block. Nested forks of one stream are refused, because the
        inner fork would repeat the numbers of the outer one.

        Raises:
            KeyError: if no stream has this name.
            RuntimeError: if the stream is already in use.
        """
        if name not in self.NAMES:
            raise KeyError(f"no random stream {name!r}: use one of {self.NAMES}")
        if name not in self._states:
            raise RuntimeError(f"random stream {name!r} is already in use around this block")
        outside = _default_state(self.device)
        _set_default_state(self.device, self._states.pop(name))
        try:
            yield
        finally:
            self._states[name] = _default_state(self.device)
            _set_default_state(self.device, outside)

    def state(self) -> dict[str, Tensor]:
        """Return a copy of every stream's state, by name, for a checkpoint.

        Raises:
            RuntimeError: inside a ``fork``, while a stream is in use.
        """
        self._check_idle()
        return {name: _copy_of(self._states[name]) for name in self.NAMES}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the states that ``state`` returned.

        Raises:
            ValueError: if ``state`` has other names of streams.
            RuntimeError: inside a ``fork``.
        """
        self._check_idle()
        if set(state) != set(self.NAMES):
            raise ValueError(f"random streams are {self.NAMES}, the state has {sorted(state)}")
        for name in self.NAMES:
            stream = self._states[name]
            if isinstance(stream, torch.Generator):
                stream.set_state(state[name])  # in place: a CUDA graph may refer to the object
            else:
                self._states[name] = state[name].clone()

    def generators(self) -> list[torch.Generator]:
        """Return the streams' generators on CUDA, for ``CUDAGraph.register_generator_state``.

        A graph captured with these generators draws new numbers at each replay, equal to the
        numbers of the same calls without a graph.

        Raises:
            RuntimeError: inside a ``fork``.
        """
        self._check_idle()
        return [s for s in self._states.values() if isinstance(s, torch.Generator)]

    def _check_idle(self) -> None:
        if len(self._states) < len(self.NAMES):
            used = sorted(set(self.NAMES) - set(self._states))
            raise RuntimeError(f"random streams {used} are in use: leave their fork first")


class StreamDropout(nn.Module):
    """Dropout whose mask is drawn from a named stream."""

    def __init__(self, prob: float, streams: RngStreams, stream: str) -> None:
        """Set the probability and the stream.

        Args:
            prob: probability that an element is zeroed, 0 <= prob < 1.
            streams: random streams of this rank.
            stream: ``replicated``, ``tensor_parallel`` or ``expert``, by how ranks share the
                input (see ``RngStreams``).

        Raises:
            ValueError: if ``prob`` or ``stream`` is out of range.
        """
        super().__init__()
        if not 0.0 <= prob < 1.0:
            raise ValueError(f"dropout probability {prob} must be at least 0 and below 1")
        if stream not in RngStreams.NAMES:
            raise ValueError(f"no random stream {stream!r}: use one of {RngStreams.NAMES}")
        self.prob, self.streams, self.stream = prob, streams, stream

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Zero elements with probability ``prob``, scale the others; the identity in eval."""
        if self.prob == 0.0 or not self.training:
            return x
        with self.streams.fork(self.stream):
            return F.dropout(x, self.prob)

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        return f"{self.prob}, stream={self.stream}"


State = Tensor | torch.Generator
"""State of a generator. On CUDA a generator that shares the state: it can be swapped in while a
CUDA graph is captured, when the host cannot read state. On the CPU the bytes of the state."""


def _state_of(generator: torch.Generator) -> State:
    if generator.device.type == "cuda":
        return generator.graphsafe_get_state()
    return generator.get_state()


def _copy_of(state: State) -> Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _default_state(device: torch.device) -> State:
    return _state_of(_default_generator(device))


def _set_default_state(device: torch.device, state: State) -> None:
    generator = _default_generator(device)
    if isinstance(state, torch.Generator):
        generator.graphsafe_set_state(state)
    else:
        generator.set_state(state)
