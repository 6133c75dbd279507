import json

import numpy as np
import pytest

from mcore_data.config import DataConfig
from mcore_data.datasets.blending import blend_by_weight, draw_phases
from mcore_data.datasets.epochs import EpochsDataset
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.mock import MockDocuments
from mcore_data.indexed.writer import IndexedWriter


@pytest.fixture
def sources(tmp_path):
    """Three datasets of 40 documents of 9 tokens; the ids say which document of which."""
    for number in range(3):
        with IndexedWriter(tmp_path / "abc"[number], "uint16") as writer:
            for document in range(40):
                writer.add_document([1000 * number + document] * 9)
    return [str(tmp_path / name) for name in "abc"]


def build(tmp_path, phases, num_samples, **options):
    (tmp_path / "mixture.json").write_text(json.dumps(phases))
    return build_gpt_datasets(
        DataConfig(data_mixture_path=str(tmp_path / "mixture.json")),
        None,
        sequence_length=8,
        seed=3,
        num_samples=(num_samples, 0, 0),
        **options,
    )[0]


def test_a_mixture_of_one_phase_is_a_blend():
    dataset_index, sample_index = draw_phases([(0, [2, 1])], 50)
    expected = blend_by_weight([2, 1], 50)
    assert np.array_equal(dataset_index, expected[0])
    assert np.array_equal(sample_index, expected[1])


def test_a_change_loses_and_repeats_no_sample_of_any_source(sources, tmp_path):
    a, b, c = sources
    phases = [
        {"from_sample": 0, "data_path": ["3", a, "1", b]},
        {"from_sample": 20, "data_path": ["1", b, "1", c]},
        {"from_sample": 40, "data_path": ["1", a]},
    ]
    mixture = build(tmp_path, phases, 60)
    assert mixture.ledger(20) == [15, 5, 0]
    assert mixture.ledger(40) == [15, 15, 10]
    assert mixture.ledger(60) == [35, 15, 10]
    for number in range(3):
        mine = mixture.sample_index[mixture.dataset_index == number]
        assert mine.tolist() == list(range(len(mine)))
    batch = mixture.batch(range(60))
    one_by_one = [mixture[k] for k in range(60)]
    for key, values in batch.items():
        assert np.array_equal(values, np.stack([sample[key] for sample in one_by_one]))


def test_a_later_change_alters_nothing_before_it_however_long_the_run(sources, tmp_path):
    a, b, c = sources
    first = {"from_sample": 0, "data_path": ["3", a, "1", b]}
    short = build(tmp_path, [first], 60)
    changed = build(tmp_path, [first, {"from_step": 4, "data_path": ["9", c, "1", a]}], 300,
                    samples_before=lambda step: 10 * (step - 1))  # fmt: skip
    for k in range(30):
        assert np.array_equal(short[k]["tokens"], changed[k]["tokens"])
    assert changed.ledger(30)[:2] == short.ledger(30)
    assert changed[30]["dataset_id"] == 2


def test_epochs_are_each_whole_and_each_in_its_own_order():
    documents = MockDocuments(1000, num_documents=20, max_length=30)

    def epoch(number):
        return GPTDataset(documents, sequence_length=8, seed=5 + number)

    dataset = EpochsDataset(epoch, 3 * len(epoch(0)))
    per_epoch = dataset.per_epoch
    for number in range(3):
        for k in (0, per_epoch - 1):
            expected = epoch(number)[k]["tokens"]
            assert np.array_equal(dataset[number * per_epoch + k]["tokens"], expected)
    across = dataset.batch([per_epoch - 1, per_epoch])
    assert np.array_equal(across["tokens"][1], epoch(1)[0]["tokens"])
    with pytest.raises(IndexError, match=f"of {3 * per_epoch}"):
        dataset[3 * per_epoch]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "give a list of phases"),
        ([{"from_sample": 0}], "a phase has data_path and either"),
        ([{"from_sample": 0, "data_path": ["A", "B"]}], "give a weight before each prefix"),
        ([{"from_step": 1, "data_path": ["1", "A"]}], "give from_sample"),
        ([{"from_sample": 5, "data_path": ["1", "A"]}], "the first must begin at 0"),
    ],
)
def test_a_file_that_is_no_mixture_is_refused(tmp_path, phases, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, phases, 10)


def test_a_mixture_needs_a_number_of_samples(sources, tmp_path):
    with pytest.raises(ValueError, match="needs a number of samples"):
        build(tmp_path, [{"from_sample": 0, "data_path": ["1", sources[0]]}], 0)
