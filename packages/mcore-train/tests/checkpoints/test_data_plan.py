"""What a run reads, told from its checkpoint alone."""

import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from rich.console import Console
from warm_ranks import run_ranks

from mcore_data.cli import main as mcore_data
from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.datasets.chat import prepare_chats
from mcore_data.datasets.from_flags import build_valid_sets
from mcore_data.indexed.manifest import write_manifest
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tracing.data_plan import find_plan
from mcore_data.tracing.explaining import RunData
from mcore_parallel.mesh import ParallelContext
from mcore_train import loop
from mcore_train.assembly import assemble
from mcore_train.batches.micro_batches import train_batches
from mcore_train.checkpoints.resuming import data_plan, load_run
from mcore_train.composition import compose
from mcore_train.evaluation import validate
from mcore_train.loop import train
from mcore_train.reporting.header import read_shares
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 16,
    "lr": 1e-3,
    "tokenizer_type": "ByteTokenizer",
    "num_workers": 0,
    "make_vocab_size_divisible_by": 1,
    "split": "1",
}


@pytest.fixture
def texts(tmp_path):
    """Two corpora of 30 documents of bytes, each saying its name and number.

    The first is merged from two preprocessed inputs with lines that are left out, the second
    says nothing of where it comes from.
    """
    texts = [f"This is document {i} of corpus a. " * (1 + i % 3) for i in range(30)]
    for name, some in (("0", texts[:19]), ("1", texts[19:])):
        lines = [json.dumps({"text": text}) + "\n" for text in some]
        lines[3:3] = lines[6:6] = ["no record\n"]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        config = PreprocessConfig(
            input=(str(tmp_path / f"{name}.jsonl"),), output_prefix=str(tmp_path / f"a_{name}"),
            append_eod=True, on_bad_record="skip", workers=1, partitions=2,
        )  # fmt: skip
        preprocess(config, TokenizerConfig(tokenizer_type="ByteTokenizer"))
    merge_pairs([tmp_path / f"a_{name}_text_document" for name in "01"], tmp_path / "a")
    with IndexedWriter(tmp_path / "b", "uint16") as writer:
        for number in range(30):
            text = f"This is document {number} of corpus b. " * (1 + number % 3)
            writer.add_document([*text.encode(), 256])
    return str(tmp_path / "a"), str(tmp_path / "b")


def build(world_size=1, **options):
    config = compose({**TINY, **options})
    plan = resolve(config, world_size, tokenizer_vocab_size=257)
    run = assemble(plan, ParallelContext.build(config.parallelism))
    return load_run(run)


def train_and_watch(monkeypatch, run, **options):
    """Train; returns the tokens of every sample of every step done."""
    seen = {}
    original = loop.backward

    def watched(run, batches):
        rows = np.concatenate([batch["tokens"].numpy() for batch in batches])
        seen[run.progress.iteration + 1] = rows
        return original(run, batches)

    monkeypatch.setattr(loop, "backward", watched)
    train(run, Reporter(None), **options)
    monkeypatch.setattr(loop, "backward", original)
    return seen


def told(data, step, sample):
    """The sample's first 16 tokens as ``explain`` tells them."""
    tokens = []
    for piece in data.explain(step, sample):
        assert len(tokens) == piece.position
        stored = data._stored[piece.prefix]
        source = piece.source
        tokens += stored.get(source.sequence, source.offset, source.length).tolist()
    assert len(tokens) == 17
    return tokens[:16]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_every_sample_of_a_run_is_told_from_its_checkpoint(texts, tmp_path, monkeypatch, kind):
    a, b = texts
    options = {
        "data_path": ["2", a, "1", b],
        "dataloader_type": kind,
        "global_batch_size": 4,
        "rampup_batch_size": (2, 2, 6),
        "train_samples": 30,
        "save": str(tmp_path / "run"),
        "load": str(tmp_path / "run"),
    }
    seen = train_and_watch(monkeypatch, build(**options), until=4)
    # Continued with another batch size: the steps before keep theirs.
    more = {**options, "rampup_batch_size": (), "global_batch_size": 6}
    run = build(**more, override_opt_param_scheduler=True)
    seen |= train_and_watch(monkeypatch, run, until=6)
    assert [len(rows) for rows in seen.values()] == [2, 2, 2, 4, 6, 6]
    data = RunData(tmp_path / "run")
    for step, rows in seen.items():
        for sample, row in enumerate(rows):
            assert told(data, step, sample) == row.tolist()
    piece = data.explain(6, 2)[0]
    raw = (tmp_path / f"{piece.prefix}.bin").read_bytes()[piece.first_byte : piece.last_byte]
    ids = np.frombuffer(raw, "<u2")
    assert bytes(i for i in ids.tolist() if i < 256).decode() == piece.text
    assert f"document {piece.document} of corpus {piece.prefix[-1]}" in " ".join(
        data._stored[piece.prefix][piece.source.sequence]
        .astype(np.uint8)
        .tobytes()
        .decode(errors="ignore")
        .split()
    )


@pytest.mark.parametrize(
    ("before", "after", "is_warned"), [(40, 60, False), (300, 360, True), (300, 300, False)]
)
def test_a_longer_run_warns_if_its_samples_come_in_another_order(
    texts, tmp_path, monkeypatch, caplog, before, after, is_warned
):
    # The split has about 130 samples: only more than one epoch depends on the run's length.
    folder = str(tmp_path / "run")
    options = {"data_path": [texts[0]], "global_batch_size": 4, "save": folder, "load": folder}
    first = build(**options, train_samples=before)
    assert 100 < first.plan.train_samples / next(read_shares(first)).epochs < 160
    train_and_watch(monkeypatch, first, until=2)
    changed = {"train_samples": after, "override_opt_param_scheduler": True}
    run = build(**options, **changed)
    assert ("some samples repeat" in caplog.text) is is_warned
    rows = train_and_watch(monkeypatch, run, until=4)
    expected = train_and_watch(
        monkeypatch, build(**{**options, "load": "", "save": ""}, train_samples=before), until=4
    )
    is_equal = all((rows[step] == expected[step]).all() for step in (3, 4))
    assert is_equal is not is_warned


def test_where_a_document_went_is_every_step_that_read_it(texts, tmp_path, monkeypatch, capsys):
    a, _ = texts
    run = build(data_path=[a], global_batch_size=3, train_iters=5, save=str(tmp_path / "run"))
    train_and_watch(monkeypatch, run)
    data = RunData(tmp_path / "run")
    visits = {(visit.step, visit.sample) for visit in data.visits(a, 7)}
    expected = {
        (step, sample)
        for step in range(1, 6)
        for sample in range(3)
        if any(piece.document == 7 for piece in data.explain(step, sample))
    }
    assert visits == expected
    command = ["explain", "--run", str(tmp_path / "run")]
    assert mcore_data([*command, "--step", "2", "--sample", "1"]) == 0
    assert "step 2, sample 1 of 3:" in capsys.readouterr().out
    assert mcore_data([*command, "--prefix", a, "--document", "7"]) == 0
    origin, *lines = capsys.readouterr().out.splitlines()
    assert origin == f"from {tmp_path / '0.jsonl'}, line 10"
    assert len(lines) >= len(expected)
    for words, message in (
        (["--step", "2", "--sample", "3"], "step 2 has the samples 0 to 2"),
        (["--step", "2", "--document", "3"], "give --step"),
        (["--prefix", "other", "--document", "3"], "the run reads"),
        (["--document", "99"], "documents 0 to 29"),
        (["--step", "99999"], "the run's data end before step"),
    ):
        assert mcore_data([*command, *words]) == 2
        assert message in capsys.readouterr().err


def test_a_run_is_told_through_other_ranks_batch_sizes_and_mixtures(texts, tmp_path, capsys):
    a, b = texts
    file = tmp_path / "mixture.json"
    options = {
        "data_mixture_path": write_mixture(file, (1, ["1", a])),
        "split": "",
        "global_batch_size": 4,
        "rampup_batch_size": (2, 2, 6),
        "train_samples": 26,
        "save": str(tmp_path / "run"),
        "load": str(tmp_path / "run"),
    }
    # Micro-batches of one row: rank 1 reads every other row of the global batch.
    ranks = run_ranks(train_until, 2, options, 4)
    seen = {
        step: np.stack([*chain.from_iterable(zip(*(r[step] for r in ranks), strict=True))])
        for step in ranks[0]
    }
    write_mixture(file, (1, ["1", a]), (6, ["1", a, "3", b]))
    seen |= train_until({**options, "micro_batch_size": 2}, 8)
    assert [len(rows) for rows in seen.values()] == [2, 2, 2, 4, 4, 4, 4, 4]
    data = RunData(tmp_path / "run")
    read = {}
    for step, rows in seen.items():
        for sample, row in enumerate(rows):
            assert told(data, step, sample) == row.tolist()
            for piece in data.explain(step, sample):
                assert is_made_from(piece)
                read.setdefault((piece.prefix, piece.document), set()).add((step, sample))
    assert {prefix for prefix, _ in read} == {a, b}
    for (prefix, document), visits in read.items():
        found = {(visit.step, visit.sample) for visit in data.visits(prefix, document)}
        assert found == visits
    command = ["explain", "--run", str(tmp_path / "run"), "--step", "7", "--sample", "2"]
    assert mcore_data(command) == 0
    out = capsys.readouterr().out
    assert "step 7, sample 2 of 4:\n  tokens 0-" in out
    assert "input unknown:" in out


def is_made_from(piece):
    """Whether the line that a piece names is the document it is of; b's name none."""
    if piece.prefix.endswith("b"):
        return piece.origin == ""
    path, line = piece.origin.rsplit(", line ", 1)
    with open(path) as file:
        text = json.loads(file.readlines()[int(line) - 1])["text"]
    return f"document {piece.document} of corpus a" in text


def train_until(options, step):
    """Train on this rank; its rows of every step done."""
    with pytest.MonkeyPatch.context() as patch:
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return train_and_watch(patch, build(world_size=size, **options), until=step)


def test_a_seed_or_data_that_changed_since_are_noticed(texts, tmp_path, caplog):
    a, _ = texts
    options = {"data_path": [a], "global_batch_size": 2, "train_iters": 1}
    train(build(**options, save=str(tmp_path / "run"), seed=4), Reporter(None))
    build(**options, load=str(tmp_path / "run"), seed=4)
    assert "--seed" not in caplog.text
    build(**options, load=str(tmp_path / "run"))
    message = "--seed 1234 continues a run of --seed 4: from step 2 on the order of samples"
    assert message in caplog.text
    with IndexedWriter(a, "uint16") as writer:
        writer.add_documents(np.arange(200), np.array([100, 100]))
    with pytest.raises(ValueError, match="is not the data that the run read: it had 30"):
        RunData(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"does not exist\. Give the --save"):
        RunData(tmp_path)


def write_mixture(path, *phases):
    path.write_text(
        json.dumps([{"from_step": step, "data_path": words} for step, words in phases])
    )
    return str(path)


def test_a_mixture_changed_during_a_run_loses_and_repeats_nothing(texts, tmp_path, monkeypatch):
    a, b = texts
    file = tmp_path / "mixture.json"
    options = {
        "data_mixture_path": write_mixture(file, (1, ["1", a])),
        "split": "",
        "global_batch_size": 3,
        "train_iters": 6,
        "save": str(tmp_path / "run"),
        "load": str(tmp_path / "run"),
    }
    train_and_watch(monkeypatch, build(**options), until=3)
    write_mixture(file, (1, ["1", a]), (4, ["1", a, "2", b]))
    train_and_watch(monkeypatch, build(**options))
    plan, _ = find_plan(tmp_path / "run")
    assert dict(zip([s["prefix"] for s in plan.sources], plan.ledger, strict=True)) == {
        a: 12,
        b: 6,
    }
    own, other = tmp_path / "run/iter_0000006/data_plan.json", tmp_path / "copy"
    other.mkdir()
    text = own.read_bytes()
    for damage in (b"", b"null", text[:-9], text[:9] + b"\xff" + text[10:], b'{"version": 9}'):
        (other / own.name).write_bytes(damage)
        with pytest.raises(ValueError, match=r"copy/data_plan\.json (is damaged|has version)"):
            find_plan(other)
    data = RunData(tmp_path / "run")
    read = [
        (piece.prefix, piece.source)
        for step in range(1, 7)
        for sample in range(3)
        for piece in data.explain(step, sample)[:1]
    ]
    assert len(set(read)) == 18
    # Steps are counted by the batch sizes that the run has had.
    longer = {**options, "global_batch_size": 6, "train_iters": 7}
    run = build(**longer, override_opt_param_scheduler=True)
    assert run.progress.consumed_train_samples == 18
    assert data_plan(run).ledger == plan.ledger
    write_mixture(file, (1, ["1", a]))
    with pytest.raises(ValueError, match="restore the past phases of the"):
        RunData(tmp_path / "run")
    write_mixture(file, (1, ["1", b]))
    with pytest.raises(ValueError, match="does not match the samples that the run has read"):
        build(**{**options, "train_iters": 9}, override_opt_param_scheduler=True)


def test_several_validation_sets_are_scored_one_by_one(texts, caplog):
    a, b = texts
    options = {"split": "", "train_data_path": [a], "eval_interval": 1, "eval_iters": 2}
    run = build(
        **options,
        valid_data_path=[a, b],
        multiple_validation_sets=True,
        global_batch_size=2,
        train_iters=2,
    )
    caplog.set_level("INFO")
    both = validate(run, Reporter(Console(quiet=True)))
    assert [f"on {name}" in caplog.text for name in (a, b)] == [True, True]
    named = replace(run.plan.config.data, validation_set_names=("code", "books"))
    counts = {"sequence_length": run.plan.config.batch.seq_length, "seed": 1, "num_samples": 2}
    assert [*build_valid_sets(named, None, **counts)] == ["code", "books"]
    with pytest.raises(ValueError, match=r"--validation-set-names .* one distinct name for"):
        replace(named, validation_set_names=("code", "code"))
    alone = [
        validate(
            build(**options, valid_data_path=[name], global_batch_size=2, train_iters=2),
            Reporter(None),
        )
        for name in (a, b)
    ]
    assert both.num_tokens == sum(score.num_tokens for score in alone)
    assert both.loss_sum == pytest.approx(sum(score.loss_sum for score in alone))


def test_a_batch_that_grows_reads_the_same_samples_in_the_same_order(
    texts, tmp_path, monkeypatch
):
    a, _ = texts
    plain = train_and_watch(
        monkeypatch, build(data_path=[a], global_batch_size=4, train_samples=24)
    )
    grown = train_and_watch(
        monkeypatch,
        build(
            data_path=[a], global_batch_size=4, rampup_batch_size=(1, 1, 12), train_samples=24
        ),
    )
    assert [len(rows) for rows in grown.values()][:4] == [1, 1, 1, 1]
    rows = np.concatenate(list(grown.values()))
    assert np.array_equal(rows, np.concatenate(list(plain.values()))[: len(rows)])


def test_a_ramp_that_the_layout_cannot_cut_is_refused():
    options = {**TINY, "mock_data": True, "split": "", "train_samples": 30}
    config = compose({**options, "rampup_batch_size": (1, 1, 9), "global_batch_size": 4})
    with pytest.raises(ValueError, match="--rampup-batch-size 1 1: both must be multiples"):
        resolve(config, 2)
    with pytest.raises(ValueError, match="takes three numbers"):
        compose({**options, "rampup_batch_size": (1, 2)})
    with pytest.raises(ValueError, match="give --train-samples, or leave one out"):
        compose({**TINY, "rampup_batch_size": (1, 1, 9), "train_iters": 3})


def test_data_that_another_tokenizer_made_are_told(texts, caplog):
    a, b = texts
    options = {"data_path": texts, "global_batch_size": 2, "train_iters": 1}
    mine = load_tokenizer("ByteTokenizer").fingerprint()
    write_manifest(a, {"tokenizer": {"sha256": mine}})
    build(**options)
    assert not caplog.records
    write_manifest(b, {"tokenizer": {"sha256": "other"}})
    build(**options)
    assert f"by its manifest, {b} was encoded by another tokenizer" in caplog.text


def test_chats_are_trained_on_and_explained(tmp_path, monkeypatch):
    chats = [
        [
            {"role": "user", "content": f"Say {number}"},
            {"role": "assistant", "content": str(number)},
        ]
        for number in range(20)
    ]
    lines = (json.dumps({"messages": chat}) for chat in chats)
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    prepare_chats(tmp_path / "chats.jsonl", tmp_path / "chats", load_tokenizer("ByteTokenizer"))
    run = build(
        sft=True,
        data_path=[str(tmp_path / "chats")],
        seq_length=200,
        global_batch_size=2,
        train_iters=2,
        save=str(tmp_path / "run"),
    )
    (share,) = read_shares(run)  # for the header of the log
    assert share.documents == 20
    assert share.epochs == 4 / run.datasets.train.per_epoch
    batch = next(train_batches(run))[0]
    assert batch.documents is not None
    assert batch.positions is not None
    learnt = batch["labels"][batch["loss_mask"] > 0].tolist()
    assert all(turn.isdecimal() for turn in bytes(learnt).decode().split("<|im_end|>\n")[:-1])
    seen = train_and_watch(monkeypatch, run)
    data = RunData(tmp_path / "run")
    for step, rows in seen.items():
        for sample, row in enumerate(rows):
            for piece in data.explain(step, sample):
                stored = data._stored[piece.prefix][piece.source.sequence]
                start = piece.position
                assert row[start : start + len(stored) - 1].tolist() == stored[:-1].tolist()


def test_rewritten_documents_are_trained_on_and_explained_as_stored(texts, tmp_path, capsys):
    run = build(
        data_path=[texts[0]],
        fim_data=True,
        fim_rate=1.0,
        fim_prefix_token="\x01",
        fim_middle_token="\x02",
        fim_suffix_token="\x03",
        fim_pad_token="\x04",
        seq_length=200,
        global_batch_size=2,
        train_iters=1,
        save=str(tmp_path / "run"),
    )
    assert (next(train_batches(run))[0]["tokens"] == 1).any()
    train(run, Reporter(None))
    assert mcore_data(["explain", "--run", str(tmp_path / "run"), "--step", "1"]) == 0
    assert "(as stored; --fim-data rewrites it" in capsys.readouterr().out
