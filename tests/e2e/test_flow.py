"""The way through the house on a tiny model: text, tokens, training, Hugging Face, text."""

import json
import os
import signal

import pytest
import torch
from e2e.launched import run_as_torchrun_does
from warm_ranks import run_command

from mcore_train.cli import main
from mcore_train.quickstart import plan as tour_plan
from mcore_train.quickstart import tour as quickstart
from mcore_train.quickstart.book import Book, read_book


def run(module, *words):
    """Run one of the commands and return what it printed."""
    done = run_command(module, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Tokenizer and token files of a small made-up text."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [
        json.dumps({"text": f"In chapter {i} the king said unto the people: hear. " * 20})
        for i in range(60)
    ]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    run(
        "mcore_data",
        "train-tokenizer",
        *("--input", folder / "text.jsonl"),
        *("--output", folder / "tokenizer"),
        *("--vocab-size", 300),
    )
    run(
        "mcore_data",
        "preprocess",
        *("--input", folder / "text.jsonl"),
        *("--output-prefix", folder / "data"),
        *("--tokenizer-type", "HuggingFaceTokenizer"),
        *("--tokenizer-model", folder / "tokenizer"),
        "--append-eod",
    )
    return folder


def flags(corpus, *, train_iters):
    return [
        *("--data-path", corpus / "data_text_document", "--split", "8,2"),
        *("--micro-batch-size", 4, "--global-batch-size", 8, "--seq-length", 32),
        *("--train-iters", train_iters, "--lr", 3e-3, "--lr-decay-iters", 40),
        *("--log-interval", 5, "--num-workers", 0, "--device", "cpu"),
    ]


SHAPE = [
    *("--num-layers", 2, "--hidden-size", 32),
    *("--num-attention-heads", 4, "--num-query-groups", 2),
]


def last_metrics(folder, kind="train"):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [x for x in map(json.loads, lines) if x["kind"] == kind][-1]


def test_a_tiny_model_goes_from_text_to_text(corpus, tmp_path):
    model = ["--tokenizer-model", corpus / "tokenizer", *SHAPE]
    evaluation = ["--eval-interval", 10, "--eval-iters", 2, "--tensorboard"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    out = run("mcore_train", "gpt", *flags(corpus, train_iters=20), *model, *evaluation,
              "--save", whole)  # fmt: skip
    assert "iteration       20/      20" in out
    assert "validation loss at iteration 20" in out
    assert last_metrics(whole)["loss"] < 4.5
    assert list((whole / "tensorboard").glob("events.out.tfevents.*"))

    # Stopped after ten steps and continued without a flag about the model: the same numbers.
    run("mcore_train", "gpt", *flags(corpus, train_iters=20), *model, "--save", parts,
        "--exit-interval", 10)  # fmt: skip
    assert (parts / "latest_checkpointed_iteration.txt").read_text() == "10"
    run("mcore_train", "gpt", *flags(corpus, train_iters=20), "--load", parts, "--save", parts)
    for key in ("loss", "grad_norm", "lr", "consumed_train_samples"):
        assert last_metrics(parts)[key] == last_metrics(whole)[key]

    # Under another layout: the same to float32's rounding.
    layout = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
    other = tmp_path / "other"
    run_as_torchrun_does(2, "mcore_train", "gpt", *flags(corpus, train_iters=20),
        "--load", whole, "--ckpt-step", 20, "--save", other, "--override-opt-param-scheduler",
        "--train-iters", 25, *layout)  # fmt: skip
    assert last_metrics(other)["iteration"] == 25

    run("mcore_ckpt", "convert", "mcore-to-hf", "--input", other, "--output", tmp_path / "hf")
    logits_agree(tmp_path / "hf", corpus)
    text = run("mcore_infer", "generate", "--load", other, "--prompt", "In chapter",
               "--num-tokens", 8)  # fmt: skip
    assert text.strip()


def logits_agree(folder, corpus):
    """transformers opens the folder and predicts the text about as well as training said."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = json.loads((corpus / "text.jsonl").read_text().splitlines()[0])["text"][:200]
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 4.5


TWO_RANKS = ["--nproc", 2, "--tensor-model-parallel-size", 2]
TOUR = ["--steps", 20, "--num-words", 30, "--device", "cpu"]


@pytest.mark.parametrize(
    ("stopped_call", "number", "layout"),
    [
        pytest.param(1, signal.SIGINT, [], id="long"),
        pytest.param(2, signal.SIGTERM, [], id="last", marks=pytest.mark.parity_long),
        pytest.param(3, signal.SIGTERM, [], id="again", marks=pytest.mark.parity_long),
        pytest.param(0, 0, TWO_RANKS, id="tp2", marks=pytest.mark.parity_long),
    ],
)
def test_the_quickstart_in_short_stopped_once_and_continued(
    tmp_path, monkeypatch, capfd, stopped_call, number, layout
):
    folder = tmp_path / "tour"
    words = [str(word) for word in ["quickstart", *TOUR, "--output", folder]]
    if stopped_call:
        monkeypatch.setattr(tour_plan, "GLOBAL_BATCH_SIZE", 2)
        monkeypatch.setattr(quickstart, "read_book", read_a_part)
        calls = stop_in(stopped_call, number, monkeypatch)
        assert main(words) == 1
        assert calls == [0, 10, 10][:stopped_call]
        out = capfd.readouterr().out
        assert "Tokenizer of 2048 tokens trained" in out
        assert "The tour stops here. The same command continues it." in out
        assert main(words) == 0
        out = capfd.readouterr().out
    else:
        out = run("mcore_train", *words, *layout)
    assert ("Tokenizer" in out) == (not stopped_call)
    assert "come out equal to the last bit" in out
    results = json.loads((folder / "quickstart.json").read_text())
    assert results["resumed_exactly"]
    assert results["bits_per_byte"] < 3.5
    assert len(results["text"].split()) == 30
    assert {p.name for p in (folder / "hf").iterdir()} >= {"config.json", "tokenizer.json"}
    _, plot, end = out[out.index("Loss in nats per token") :].split("\n\n", 2)
    assert "█" in plot
    assert plot.count("o") >= 8  # scores of the held-out chapters
    assert end.startswith("Done in")
    for following in (f"--output {folder}-tp2", "--peft lora", "infer serve", "train plan"):
        assert following in out


def read_a_part(seed):
    """A book of every fifth chapter."""
    book = read_book(seed)
    return Book(book.train[::5], book.held_out[::5])


def stop_in(stopped_call, number, monkeypatch):
    """Send a signal after a step in one of the tour's calls of train; return their starts."""
    train, starts, sent = quickstart.train, [], []

    def stopped(run, reporter, **options):
        starts.append(run.progress.iteration)
        if len(starts) == stopped_call:
            monkeypatch.setattr(reporter, "advance", send_once)
        return train(run, reporter, **options)

    def send_once(*_):  # after a step, when training listens
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(quickstart, "train", stopped)
    return starts


def test_the_quickstart_clears_only_its_own_folder(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    done = run_command("mcore_train", "quickstart", "--output", tmp_path)
    assert done.returncode == 2
    assert "is not empty and not the folder of a quickstart" in done.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"
