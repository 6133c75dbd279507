"""Every architecture learns the shipped book, to a loss that a wrong gradient would not reach.

Experts learn it under every way of balancing them: the busiest gets less, and the bias, which
evens out most, costs no loss.
`BOOK_CURVES=FOLDER pytest -m slow tests/e2e/test_book.py` writes each curve there.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_train.cli import main
from mcore_train.quickstart.book import prepare, read_book, token_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128"
MAMBA = "--mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-chunk-size 32"
DELTA = """--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 16
--linear-value-head-dim 16"""
DEEPSEEK = """--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8
--qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --num-experts 8
--moe-layer-freq [0]+[1]*2 --moe-router-topk 2 --moe-ffn-hidden-size 32
--moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
--moe-shared-expert-intermediate-size 32 --untie-embeddings-and-output-weights
--mtp-num-layers 1"""
BATCH = "--seq-length 128 --micro-batch-size 16 --lr 5e-3"
# A seventh of the words is hidden and counts. Until a model has seen many it knows how frequent
# words are, a loss of 5.55, and no context.
MASKED_BATCH = "--seq-length 64 --micro-batch-size 64 --lr 3e-3"
CASES = {
    "gpt": ("gpt", SMALL, 300, 4.2),
    "mamba-2": (
        "mamba",
        f"--num-layers 3 --hidden-size 64 --hybrid-override-pattern MMM {MAMBA}",
        300,
        3.95,
    ),
    "hybrid": (
        "mamba",
        f"{SMALL} --num-layers 6 --hybrid-override-pattern M-M*M- {MAMBA}",
        300,
        3.85,
    ),
    "gated delta net": (
        "mamba",
        f"{SMALL} --num-layers 6 --hybrid-override-pattern G-G*G- {DELTA}",
        300,
        3.9,
    ),
    "latent attention, experts, further tokens": ("gpt", f"{SMALL} {DEEPSEEK}", 300, 3.8),
    "bert": (
        "bert",
        """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256
        --max-position-embeddings 128 --init-method-std 0.05""",
        800,
        5.15,
    ),
    "t5": ("t5", f"{SMALL} --decoder-seq-length 64 --vocab-extra-ids 40", 300, 4.7),
}
"""Command, architecture, steps, and a held-out loss that it stays below."""
# An output layer of its own: beside tied embeddings tokens look alike to the routers for 60
# steps instead of 30, in which a bias exchanges all tokens' experts at once.
EXPERTS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 16
--moe-router-topk 2 --moe-ffn-hidden-size 32 --untie-embeddings-and-output-weights
--moe-router-score-function"""
BALANCE = {
    "none": "sigmoid --moe-router-load-balancing-type none",
    "aux loss": "sigmoid --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
    "loss by sequence": """sigmoid --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-2""",
    "sinkhorn": "softmax --moe-router-load-balancing-type sinkhorn",
    "bias": """sigmoid --moe-router-load-balancing-type none --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-2""",
}
"""Ways to balance a model of experts."""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Token files of byte pairs, and of WordPiece by sentences, for training and held out."""
    folder = tmp_path_factory.mktemp("book")
    texts = read_book(0)
    prepare(texts, folder, 1024)
    (folder / "vocab.txt").write_text("\n".join(word_pieces(texts.train)) + "\n")
    words = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt")
    )
    for part in ("train", "held_out"):
        preprocess(
            PreprocessConfig(
                input=(str(folder / f"{part}.jsonl"),),
                output_prefix=str(folder / f"{part}_words"),
                split_sentences=True,
                sentence_splitter="rules",
            ),
            words,
        )
    return folder


def word_pieces(texts):
    """The letters, alone and within words, and the most frequent words."""
    words = Counter(word for text in texts for word in text.lower().split())
    plain = Counter()
    for word, count in words.items():
        plain[word.strip(".,;:!?()'")] += count
    letters = sorted({letter for word in words for letter in word})
    found = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{x}" for x in letters),
    ]
    return [*found, *(w for w, _ in plain.most_common(2000) if len(w) > 1)]


def data_flags(command, book):
    if command in ("bert", "t5"):
        return f"""--train-data-path {book}/train_words_text_sentence
        --valid-data-path {book}/held_out_words_text_sentence
        --tokenizer-type BertWordPieceLowerCase --vocab-file {book}/vocab.txt"""
    paths = token_files(book)
    return f"""--train-data-path {paths.train} --valid-data-path {paths.held_out}
    --tokenizer-model {paths.tokenizer}"""


def learn(command, model, steps, book, folder, evals=4):
    """Train on the book; return the logged rows of training, and the held-out loss."""
    run = f"""{data_flags(command, book)} {MASKED_BATCH if command == "bert" else BATCH}
    --lr-decay-style cosine --lr-warmup-fraction 0.1 --train-iters {steps}
    --eval-interval {steps} --eval-iters {evals} --log-interval 20 --num-workers 0
    --save {folder} --seed 1"""
    assert main([command, *f"{model} {run}".split()]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (last,) = [row for row in rows if row["kind"] == "valid"]
    return [row for row in rows if row["kind"] == "train"], last["loss"]


def note(kind, name, held_out, **curves):
    """Keep curves where BOOK_CURVES says."""
    if folder := os.environ.get("BOOK_CURVES"):
        rounded = {k: [[step, round(y, 4)] for step, y in c] for k, c in curves.items()}
        result = {"name": name, **rounded, "held_out": round(held_out, 4)}
        file = f"{kind}-{name.split(',')[0].replace(' ', '-')}.json"
        (Path(folder) / file).write_text(json.dumps(result) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_it_learns_the_book(name, book, tmp_path):
    command, model, steps, bound = CASES[name]
    rows, held_out = learn(command, model, steps, book, tmp_path)
    note("book", name, held_out, curve=[(row["iteration"], row["loss"]) for row in rows])
    assert held_out < bound


def backwards(book, folder):
    """The book with the words of each chapter in reverse, by the same tokenizer."""
    folder.mkdir()
    (folder / "tokenizer").symlink_to(book / "tokenizer")
    for part in ("train", "held_out"):
        texts = [json.loads(line)["text"] for line in (book / f"{part}.jsonl").open()]
        rows = [json.dumps({"text": " ".join(text.split()[::-1])}) for text in texts]
        (folder / f"{part}.jsonl").write_text("\n".join(rows) + "\n")
        preprocess(
            PreprocessConfig(
                input=(str(folder / f"{part}.jsonl"),),
                output_prefix=str(folder / part),
                append_eod=True,
            ),
            TokenizerConfig(tokenizer_model=str(folder / "tokenizer")),
        )
    return folder


def test_adapters_teach_a_frozen_model_to_read_backwards(book, tmp_path):
    learn("gpt", SMALL, 300, book, tmp_path / "base")
    beside = f"--load {tmp_path / 'base'} --finetune --peft lora --lora-dim 8 --lora-alpha 32"
    turned = backwards(book, tmp_path / "backwards")
    rows, held_out = learn("gpt", beside, 300, turned, tmp_path / "adapters")
    name = "LoRA beside the gpt, words in reverse"
    note("book", name, held_out, curve=[(row["iteration"], row["loss"]) for row in rows])
    assert rows[0]["loss"] > 5.6  # of the frozen model
    assert held_out < 4.6


@pytest.mark.timeout(3600)
def test_experts_are_balanced_and_the_bias_costs_nothing(book, tmp_path):
    busiest, losses = {}, {}
    for name, flags in BALANCE.items():
        folder = tmp_path / name.replace(" ", "-")
        rows, losses[name] = learn("gpt", f"{EXPERTS} {flags}", 600, book, folder, evals=16)
        loads, loss = (
            [(row["iteration"], row[key]) for row in rows]
            for key in ("expert_imbalance", "loss")
        )
        note("balance", name, losses[name], curve=loads, loss=loss)
        busiest[name] = loads[-1][1]
    bounds = {"aux loss": 0.6, "loss by sequence": 0.45, "sinkhorn": 0.4, "bias": 0.35}
    for name, bound in bounds.items():
        assert busiest[name] < bound * busiest["none"], (name, busiest)
    assert losses["bias"] < 1.01 * losses["none"], losses
    assert losses["sinkhorn"] < 1.02 * losses["none"], losses
