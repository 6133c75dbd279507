"""Copied to the host in few pieces, each tensor bit for bit."""

import torch
from torch.overrides import TorchFunctionMode

from mcore_ckpt.save_load import staging
from mcore_ckpt.save_load.staging import Staging


class CountedCopies(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.copy_
        return func(*args, **(kwargs or {}))


def copied(place, tensors):
    """Copy tensors; return how many copies were made, once they are found to be the same."""
    copies = place.start(tensors)
    with CountedCopies() as counted:
        copies.finish()
    for tensor, parts in zip(tensors, copies.parts, strict=True):
        flat = torch.cat([part.reshape(-1) for part in parts])
        assert torch.equal(flat.view(tensor.shape), tensor)
    return counted.count


def test_neighbours_of_a_storage_are_copied_at_once():
    experts = torch.randn(8, 6, 5)
    gates, ups = experts[:, :3].unbind(), experts[:, 3:].unbind()
    place = Staging()
    assert copied(place, [*gates, *ups]) == 1
    experts += 1
    assert copied(place, [*ups, *gates]) == 1
    # Half of them, as where another rank writes the rest: the padding between goes along.
    assert copied(place, list(gates)) == 1
    bucket = torch.randn(100_000)
    assert copied(place, [bucket[:10], bucket[50_000:]]) == 2


def test_what_has_no_neighbour_is_copied_by_itself():
    bucket = torch.arange(64, dtype=torch.uint8)
    tensors = [
        torch.randn(7, 3).t(),
        torch.randn(()),
        torch.randn(0, 4),
        bucket[1:4],
        bucket[6:10].view(torch.bfloat16),
        bucket[12:20].view(torch.float32),
        bucket[8:16],
        torch.randn(3, dtype=torch.float64),
    ]
    # Three neighbours in the bucket, and one that overlaps with them.
    assert copied(Staging(), tensors) == 7


def test_what_is_larger_than_a_block_goes_to_several(monkeypatch):
    monkeypatch.setattr(staging, "_SMALL_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(staging, "_PART_BYTES", (1 << 10) - 64)
    place = Staging()
    bucket = torch.randn(2000)
    tensors = [
        bucket[3:703].view(7, 100),
        *bucket[703:1703].split(50),
        bucket[1703:].view(27, 11).t(),
    ]
    assert copied(place, tensors) < len(tensors) + 4
    held = place.num_bytes
    assert copied(place, tensors[::-1]) > 1
    assert place.num_bytes == held


def test_a_tensor_that_comes_to_lie_elsewhere_is_copied_from_there():
    place = Staging()
    for _ in range(3):
        bucket = torch.randn(6, 5)
        assert copied(place, list(bucket)) == 1
        assert copied(place, [bucket[0].clone(), *bucket[1:]]) == 2


def test_what_each_save_reads_anew_asks_for_no_new_layout():
    place, bucket = Staging(), torch.randn(6, 5)
    first = place.start([*bucket, torch.get_rng_state()])
    again = place.start([*bucket, torch.get_rng_state()])
    assert again.parts is first.parts
