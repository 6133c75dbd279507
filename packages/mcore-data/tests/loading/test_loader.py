import multiprocessing
import os
import signal
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.mock import MockGPTDataset
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.loading.loader import build_loader


@pytest.fixture
def dataset():
    return MockGPTDataset(8, vocab_size=1000, num_samples=40)


def test_batches_are_tensors_of_one_rank(dataset):
    batches = list(build_loader(dataset, micro_batch_size=4, dp_rank=1, dp_size=2))
    assert len(batches) == 5
    assert {key: (value.dtype, tuple(value.shape)) for key, value in batches[0].items()} == {
        "tokens": (torch.int64, (4, 8)),
        "labels": (torch.int64, (4, 8)),
        "loss_mask": (torch.float32, (4, 8)),
        "position_ids": (torch.int64, (4, 8)),
    }
    assert batches[0]["tokens"][0].tolist() == dataset[4]["tokens"].tolist()


def test_entries_that_nothing_reads_are_left_out(dataset):
    batch = next(iter(build_loader(dataset, micro_batch_size=4, without=("position_ids",))))
    assert batch.keys() == {"tokens", "labels", "loss_mask"}


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_a_run_continues_at_the_next_batch(dataset, kind):
    options = {"micro_batch_size": 2, "dataloader_type": kind}
    whole = iter(build_loader(dataset, **options))
    seen = [next(whole)["tokens"] for _ in range(10)]
    again = iter(build_loader(dataset, consumed_samples=12, **options))
    assert torch.equal(next(again)["tokens"], seen[6])


def test_worker_processes_give_the_same_batches_also_after_signals_to_the_whole_job():
    dataset = MockGPTDataset(8, vocab_size=1000, num_samples=1280)
    plain = iter(build_loader(dataset, micro_batch_size=4))
    workers = iter(build_loader(dataset, micro_batch_size=4, num_workers=1))
    others = set(multiprocessing.active_children())
    assert torch.equal(next(workers)["tokens"], next(plain)["tokens"])
    (worker,) = set(multiprocessing.active_children()) - others
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        os.kill(worker.pid, number)
    for ours, theirs in zip(plain, workers, strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
    assert worker.exitcode == 0


def hold_batches_to_the_end(dataset):
    batches = iter(build_loader(dataset, micro_batch_size=4, num_workers=1))
    next(batches)
    multiprocessing.current_process().held = batches  # as the traceback of a fault does


def test_a_process_that_ends_in_the_middle_of_its_batches_does_not_wait_for_workers(dataset):
    process = multiprocessing.get_context("fork").Process(
        target=hold_batches_to_the_end, args=(dataset,)
    )
    process.start()
    process.join(20)
    is_waiting = process.is_alive()
    process.kill()
    assert not is_waiting
    assert process.exitcode == 0


def test_a_full_pass_gives_every_sample_once_and_fillers_that_count_nothing(dataset):
    options = {"micro_batch_size": 3, "dataloader_type": "full"}
    loaders = [build_loader(dataset, **options, dp_rank=r, dp_size=5) for r in range(5)]
    assert [len(loader) for loader in loaders] == [3] * 5
    batches = [batch for step in zip(*loaders, strict=True) for batch in step]
    counted = torch.cat([batch["loss_mask"] for batch in batches]).amin(1)
    assert counted.tolist() == [1] * 40 + [0] * 5
    tokens = torch.cat([batch["tokens"] for batch in batches])[:40]
    assert tokens.tolist() == [dataset[k]["tokens"].tolist() for k in range(40)]
    assert dataset[0]["loss_mask"].all()


def test_an_external_loader_is_handed_through():
    batches = [{"tokens": torch.zeros(1, 1)}]
    assert build_loader(batches, micro_batch_size=1, dataloader_type="external") is batches


class Ragged:
    """Rows of as many tokens as their micro-batch of two says."""

    def __len__(self):
        return 6

    def __getitem__(self, sample):
        return {"tokens": np.full(4 + sample // 2, sample)}


def test_micro_batches_may_be_of_different_lengths():
    batches = [batch["tokens"] for batch in build_loader(Ragged(), micro_batch_size=2)]
    assert [batch.tolist() for batch in batches] == [
        [[0] * 4, [1] * 4],
        [[2] * 5, [3] * 5],
        [[4] * 6, [5] * 6],
    ]


def test_long_samples_are_made_few_at_a_time(dataset, monkeypatch):
    asked = []
    make = dataset.batch
    monkeypatch.setattr(
        dataset, "batch", lambda samples: asked.append(len(samples)) or make(samples)
    )
    whole = [batch["tokens"] for batch in build_loader(dataset, micro_batch_size=2)]
    assert max(asked) == 40
    asked.clear()
    monkeypatch.setattr("mcore_data.loading.loader._NUMBERS_AT_ONCE", 8 * 6)
    parts = [batch["tokens"] for batch in build_loader(dataset, micro_batch_size=2)]
    assert max(asked) == 6
    assert torch.equal(torch.stack(whole), torch.stack(parts))


def anonymous_bytes():
    """Memory of this process and of its children that belongs to no file."""
    total = 0
    for process in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line[:10] == "Anonymous:")
    return total


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_eight_workers_leak_nothing_over_100_000_batches(tmp_path):
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        for length in range(1, 400):
            writer.add_document(list(range(length)))
    store = f"memory://{tmp_path.name}/x"
    for kind in ("bin", "idx"):
        data = (tmp_path / f"x.{kind}").read_bytes()
        fsspec.core.url_to_fs(store)[0].pipe_file(f"/{tmp_path.name}/x.{kind}", data)
    blocked = np.arange(399) % 50 == 0
    remote = IndexedDataset(
        store, cache_path=tmp_path / "cache", cache_bytes=1 << 20, blocked=blocked
    )
    dataset = GPTDataset(remote, sequence_length=8)
    # Each batch is one request to a worker. It costs little but the way of its tensors between
    # processes, so each has one.
    loader = build_loader(
        dataset,
        micro_batch_size=128,
        dataloader_type="cyclic",
        num_workers=8,
        without=("labels", "loss_mask", "position_ids"),
    )
    numbers, sizes = [], []
    for number, batch in enumerate(islice(loader, 100_001)):
        assert batch["tokens"].shape == (128, 8)
        if number % 2500 == 0 and number >= 40_000:  # caches and allocators are full by then
            numbers.append(number)
            sizes.append(anonymous_bytes())
    # The smallest object of Python takes 16 bytes, in one of nine processes.
    bytes_per_batch = np.polyfit(numbers, sizes, 1)[0]
    assert bytes_per_batch < 16, (bytes_per_batch, sizes)
