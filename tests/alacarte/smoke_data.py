"""mcore-data alone, without torch: text in, tokens out, samples of one length."""

import importlib.util
import json
import tempfile
from pathlib import Path

from mcore_data import __version__
from mcore_data.cli import main
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.indexed.reader import IndexedDataset

assert __version__[0].isdigit(), __version__
assert importlib.util.find_spec("torch") is None

with tempfile.TemporaryDirectory() as folder:
    home = Path(folder)
    text = home / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"line {i} of a book"}) + "\n" for i in range(40))
    )
    commands = [
        *("train-tokenizer", "--input", str(text), "--output", str(home / "tok")),
        *("--vocab-size", "300"),
    ]
    assert main(commands) in (0, None)
    commands = [
        *("preprocess", "--input", str(text), "--output-prefix", str(home / "book")),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(home / "tok")),
        *("--append-eod", "--workers", "1"),
    ]
    assert main(commands) in (0, None)
    indexed = IndexedDataset(str(home / "book_text_document"))
    assert len(indexed) == 40
    dataset = GPTDataset(indexed, sequence_length=16)
    sample = dataset[0]
    assert sample["tokens"].shape == (16,)
    assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
