import json

import pytest

from mcore_data.preprocessing.tokenizer_training import train_tokenizer

WORDS = ["in", "the", "beginning", "god", "created", "heaven", "and", "earth", "void", "deep"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A JSONL file of 60 documents with text, title and a list of sentences."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w") as file:
        for i in range(60):
            sentences = [
                " ".join(
                    WORDS[(i * 7 + j * 3 + k) % len(WORDS)] for k in range(3 + (i + j) % 9)
                )
                for j in range(i % 4)
            ]
            record = {"text": ". ".join(sentences), "title": f"Nr {i}", "parts": sentences}
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory, corpus):
    """A byte-level BPE tokenizer of 300 ids trained on the corpus."""
    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer([corpus], folder, vocab_size=300)
    return folder
