"""Blocked documents leave no trace in samples, and all other text stays where it was."""

import json
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest

from mcore_data.config import DataConfig, PreprocessConfig, TokenizerConfig
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.datasets.packing import PackedDataset
from mcore_data.indexed.blocklist import blocked_sequences, read_blocklist
from mcore_data.indexed.origins import kept_values
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.preprocessing.plan_worker import work_on_plan
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.preprocessing.work_plan import make_plan, merge_plan
from mcore_data.tokenizers.building import build_tokenizer
from mcore_data.tracing.data_plan import describe_sources

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")
BLOCKED = "ABCDEFG"
"""Letters that only blocked documents have."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """A pair of 200 documents with ids and URLs, of which 3, 77 and 180 are to be blocked."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "data": {"text": BLOCKED * 9 if i in (3, 77, 180) else f"document {i} " * (i % 7)},
            "id": i,
            "meta": {"url": f"http://host/{i}"},
        }
        for i in range(200)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PreprocessConfig(
        input=(str(folder / "a.jsonl"),),
        output_prefix=str(folder / "c"),
        json_keys=("data.text",),
        keep_keys=("id", "meta.url"),
        append_eod=True,
    )
    preprocess(config, BYTES)
    plan = make_plan(replace(config, output_prefix=str(folder / "units")), BYTES, 5000)
    work_on_plan(plan)
    merge_plan(plan)
    return f"{folder}/c_data.text_document"


def datasets(prefix, blocklist="", **options):
    config = DataConfig(data_path=(prefix,), split="1", blocklist=str(blocklist), **options)
    return build_gpt_datasets(
        config,
        build_tokenizer(BYTES),
        sequence_length=64,
        seed=5,
        num_samples=(150, 0, 0),
    )[0]


def letters(tokens):
    return np.isin(tokens, [ord(letter) for letter in BLOCKED])


@pytest.mark.parametrize("kind", ["pair", "logical"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_blocked_document_is_blank_without_loss_and_nothing_else_changes(
    tmp_path, prefix, kind, packed
):
    if kind == "logical":
        prefix = prefix.replace("/c_", "/units_")
    path = tmp_path / "takedown"
    path.write_text(f"http://host/3\n\n77\n{os.path.relpath(prefix)}\t180\nhttp://unknown\n")
    options = {"dataloader_inter_document_masking": packed, "data_cache_path": str(tmp_path)}
    free, blocked = datasets(prefix, **options), datasets(prefix, path, **options)
    eod = build_tokenizer(BYTES).eod
    assert len(free) == len(blocked)
    order = list(range(len(free)))
    before, after = free.batch(order), pickle.loads(pickle.dumps(blocked)).batch(order)
    assert letters(before["tokens"]).sum() > 300  # several epochs
    touched = 0
    for row in order:
        full = np.append(before["tokens"][row], before["labels"][row][-1])
        gone = np.append(after["tokens"][row], after["labels"][row][-1]) != full
        gone |= letters(full)
        # The end of document that a blocked document brings has its place and no loss.
        hidden = gone | np.append(False, gone[:-1] & (full[1:] == eod))
        assert not letters(after["tokens"][row]).any()
        assert (after["tokens"][row][gone[:-1]] == eod).all()
        assert (after["loss_mask"][row][hidden[:-1] | hidden[1:]] == 0).all()
        same = ~(hidden[:-1] | hidden[1:])
        for key in ("tokens", "labels", "loss_mask"):
            assert (after[key][row][same] == before[key][row][same]).all()
        for key in {"position_ids", "cu_seqlens"} & before.keys():
            assert (after[key][row] == before[key][row]).all()
        touched += gone.any()
    assert 0 < touched < len(free)
    (source,) = describe_sources(blocked)
    assert (source["blocked_sequences"], source["blocked_tokens"]) == (3, 3 * 64)
    assert describe_sources(free)[0].items() <= source.items()


def test_packed_texts_that_are_blocked_have_no_loss(tmp_path, prefix):
    (tmp_path / "list").write_text("77\n")
    stored = IndexedDataset(prefix)
    blocked = blocked_sequences(read_blocklist(str(tmp_path / "list")), stored)
    free = PackedDataset(stored, sequence_length=128)
    ours = PackedDataset(IndexedDataset(prefix, blocked=blocked), sequence_length=128)
    masked = 0
    for row in range(len(free)):
        before, after = free[row], ours[row]
        gone = before["loss_mask"] != after["loss_mask"]
        masked += int(gone.sum())
        assert (after["tokens"][gone] == 0).all()
        assert (before["tokens"][~gone] == after["tokens"][~gone]).all()
    assert masked == 63


def test_kept_values_are_found_by_document(prefix):
    for name in (prefix, prefix.replace("/c_", "/units_")):
        assert kept_values(name, 180) == {"id": 180, "meta.url": "http://host/180"}


def test_a_blocklist_that_cannot_be_applied_is_an_error(tmp_path, prefix):
    path = tmp_path / "list"
    with pytest.raises(FileNotFoundError, match=r"--blocklist .*list is not a file"):
        datasets(prefix, path)
    path.write_text(f"{prefix}\tx\n")
    with pytest.raises(ValueError, match=r"line 1: give a kept value, or a prefix, a tab"):
        datasets(prefix, path)
    path.write_text(f"{prefix}\t200\n")
    with pytest.raises(ValueError, match=r"has the documents 0 to 199, not 200"):
        datasets(prefix, path)
    config = PreprocessConfig(
        input=(str(tmp_path / "b.jsonl"),), output_prefix=str(tmp_path / "b"), append_eod=True
    )
    (tmp_path / "b.jsonl").write_text('{"text": "something longer than that"}\n' * 9)
    preprocess(config, BYTES)
    path.write_text("http://host/3\n")
    with pytest.raises(ValueError, match=r"b_text_document has no kept values"):
        datasets(f"{tmp_path}/b_text_document", path)
