import json

import numpy as np
import pytest

from mcore_data.cli import main
from mcore_data.config import DataConfig
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.datasets.preferences import ANSWER_IDS, PAIR_MASK, prepare_preferences
from mcore_data.tokenizers.building import load_tokenizer

BYTES = load_tokenizer("ByteTokenizer")
EOD = BYTES.eod
USER = {"role": "user", "content": "q"}
CHATS = {
    "chosen": [USER, {"role": "assistant", "content": "yes"}],
    "rejected": [USER, {"role": "assistant", "content": "no"}],
}
FORMS = [
    {"prompt": [USER], "chosen": CHATS["chosen"][1:], "rejected": CHATS["rejected"][1:]},
    {"prompt": "q", "chosen": CHATS["chosen"][1:], "rejected": CHATS["rejected"][1:]},
    CHATS,
    {"prompt": "q", **CHATS},  # a prompt that the whole chats repeat
]


def write(folder, *records):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows(prefix, length):
    config = DataConfig(data_path=(str(prefix),), preferences=True, split="1,0,0")
    options = {"sequence_length": length, "seed": 1}
    return build_gpt_datasets(config, BYTES, **options, only=("train",))[0]


def answers(row):
    """Return the labels of each answer that count."""
    ids = row[ANSWER_IDS][row["loss_mask"] > 0]
    labels = row["labels"][row["loss_mask"] > 0]
    return {int(i): labels[ids == i].tolist() for i in np.unique(ids)}


def test_a_row_packs_pairs_whose_conversations_are_apart(tmp_path, capsys):
    pairs = [{"prompt": "ab", "chosen": "c" * n, "rejected": "dd"} for n in (1, 3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    words = ["--input", str(tmp_path / "pairs.jsonl"), "--output-prefix", str(tmp_path / "p")]
    assert main(["prepare-preferences", *words, "--tokenizer-type", "ByteTokenizer"]) == 0
    assert "2 pairs, 20 tokens, 12 of them in answers" in capsys.readouterr().out
    (row,) = rows(tmp_path / "p", 24)
    c, d = ord("c"), ord("d")
    assert answers(row) == {0: [c, EOD], 1: [d, d, EOD], 2: [c, c, c, EOD], 3: [d, d, EOD]}
    assert row[PAIR_MASK].sum() == 2
    assert row[ANSWER_IDS][row[PAIR_MASK] > 0].tolist() == [0, 2]
    starts = np.flatnonzero(row["position_ids"] == 0)
    assert starts.tolist() == [0, 3, 7, 12, 16]
    assert np.unique(row["cu_seqlens"]).tolist() == [*starts, 24]


def test_all_forms_of_a_pair_are_one_pair(tmp_path):
    found = []
    for number, form in enumerate(FORMS):
        prepare_preferences(write(tmp_path, form), tmp_path / str(number), BYTES)
        found.append(rows(tmp_path / str(number), 200)[0])
    ends = b"<|im_end|>\n"
    assert answers(found[0]) == {0: [*b"yes", *ends], 1: [*b"no", *ends]}
    for row in found[1:]:
        assert all(np.array_equal(row[name], found[0][name]) for name in row)


def test_pairs_that_fit_no_row_are_left_out_and_counted(tmp_path, caplog):
    long, short = ({"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in (40, 2))
    prepare_preferences(write(tmp_path, long, short), tmp_path / "p", BYTES)
    assert len(rows(tmp_path / "p", 16)) == 1
    assert "1 of 2 pairs have more than --seq-length 16" in caplog.text


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "line 1: chosen and rejected are texts, and prompt"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "line 1: prompt is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "line 1: rejected is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ({"prompt": "q", "response_j": "a"}, r"no key 'chosen' and 'rejected' \(keys: prompt,"),
        ({**CHATS, "chosen": "a"}, "is a text, the other a list"),
        ({**CHATS, "rejected": CHATS["rejected"][1:]}, "begin with different messages"),
        (
            {**CHATS, "prompt": "other"},
            "'chosen' does not begin with a message of the assistant",
        ),
        ({**CHATS, "tools": [1]}, "does not render tools"),
    ],
)
def test_a_pair_of_another_form_is_named(record, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepare_preferences(write(tmp_path, record), tmp_path / "p", BYTES)
