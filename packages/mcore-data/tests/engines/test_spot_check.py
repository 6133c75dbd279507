import json

import numpy as np
import pytest

from mcore_data.engines.building import ReferenceEngine
from mcore_data.engines.spot_check import SAMPLE_SHARE, EngineDifferenceError, Verifier
from mcore_data.preprocessing.encoding import Encoder
from mcore_data.preprocessing.sources import find_inputs, read_blocks
from mcore_data.tokenizers.building import load_tokenizer

BYTES = load_tokenizer("ByteTokenizer")


class _WrongOnce(ReferenceEngine):
    """An engine that swaps the ids of one text."""

    def __init__(self, tokenizer, victim):
        super().__init__(tokenizer)
        self.name = "swapping"
        self._victim = victim

    def encode(self, texts):
        right = super().encode(texts)
        return [
            ids[::-1] if text == self._victim else ids
            for ids, text in zip(right, texts, strict=True)
        ]


def encode(path, mode, victim, json_keys=("text",)):
    engine = _WrongOnce(BYTES, victim)
    encoder = Encoder(
        engine, Verifier(BYTES, mode, engine.name), json_keys, np.dtype("<u2"), eod=256
    )
    source = find_inputs([str(path)])[0]
    return [encoder.encode_block(b) for b in read_blocks(source, json_keys, block_bytes=4000)]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "in.jsonl"
    texts = [f"text number {i}" for i in range(3000)]
    path.write_text("".join(json.dumps({"text": text, "n": [text]}) + "\n" for text in texts))
    return path


def test_full_encodes_every_text_again(lines):
    checked = [block.checked for block in encode(lines, "full", "nothing")]
    assert sum(one.texts for one in checked) == 3000
    assert sum(one.characters for one in checked) == sum(
        len(f"text number {i}") for i in range(3000)
    )


def test_a_difference_stops_and_names_line_text_and_ids(lines):
    for json_keys in (("text",), ("n",)):
        with pytest.raises(EngineDifferenceError) as error:
            encode(lines, "full", "text number 1234", json_keys)
        for part in ("in.jsonl", json_keys[0], "'text number 1234'", "swapping", "from id 0",
                     "--engine reference"):  # fmt: skip
            assert part in str(error.value)


def test_sample_takes_its_share_and_the_same_texts_each_time(lines):
    first = [block.checked.texts for block in encode(lines, "sample", "nothing")]
    assert first == [block.checked.texts for block in encode(lines, "sample", "nothing")]
    assert 0 < sum(first) < 3000 * SAMPLE_SHARE * 4


def test_off_encodes_nothing_again_and_finds_nothing(lines):
    blocks = encode(lines, "off", "text number 5")
    assert sum(block.checked.texts for block in blocks) == 0
    assert sum(block.num_texts for block in blocks) == 3000
