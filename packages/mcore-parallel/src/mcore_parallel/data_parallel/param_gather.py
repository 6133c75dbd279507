"""All-gather of updated weights from their owners, overlapped with the next forward.

Gathers start in ``order``, the same on all ranks: first the buckets that hold anything
outside ``blocks`` (embedding, head, final norm), then those of the blocks in forward order.
A chunk waits for the former when its forward begins, since code outside the blocks may
use a weight without calling its module; a block waits for its own.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from mcore_parallel.data_parallel.buckets import Bucket, PendingGather


class ParameterGathering:
    """Starts the gathers of all buckets, and waits for each in the modules that need it."""

    def __init__(self, chunks: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
        """Hook into the chunks and their blocks.

        Args:
            chunks: model chunks; each module of ``chunk.blocks`` waits for its own buckets,
                the chunk's forward for all others.
            buckets: of all the chunks' parameters.
        """
        self._handles = []
        self._works: dict[Bucket, PendingGather] = {}
        first: set[Bucket] = set()
        for chunk in chunks:
            container = dict(chunk.named_children()).get("blocks")
            blocks = list(container.children()) if container is not None else []
            inside = {parameter for block in blocks for parameter in block.parameters()}
            outside = set(chunk.parameters()) - inside
            needed = [b for b in buckets if b.is_late or _holds(b, outside)]
            first.update(needed)
            self._wait_in(chunk, needed)
            for block in blocks:
                self._wait_in(block, [b for b in buckets if _holds(b, block.parameters())])
        backward = list(reversed(buckets))
        self.order = [b for b in backward if b in first]
        self.order += [b for b in backward if b not in first]

    def start(self, bucket: Bucket) -> None:
        """Begin one bucket's gather; returns at once."""
        work = bucket.gather_params(async_op=True)
        if work is not None:
            self._works[bucket] = work

    def wait(self, buckets: Iterable[Bucket] = ()) -> None:
        """Wait for the gathers of some buckets, or of all; a finished one costs nothing."""
        for bucket in buckets or self.order:
            work = self._works.pop(bucket, None)
            if work is not None:
                work.wait()

    def remove_hooks(self) -> None:
        """Wait for all gathers and remove the hooks."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    def _wait_in(self, module: nn.Module, buckets: list[Bucket]) -> None:
        def hook(_module: nn.Module, _arguments: tuple) -> None:
            if self._works and buckets:
                self.wait(buckets)

        self._handles.append(module.register_forward_pre_hook(hook))


def _holds(bucket: Bucket, parameters: Iterable[nn.Parameter]) -> bool:
    wanted = set(parameters)
    return any(slot.named.parameter in wanted for slot in bucket.slots)
