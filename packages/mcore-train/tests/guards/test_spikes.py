"""Planted spikes are left out, gone back before, or end the run; what stays is bit for bit."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from warm_ranks import run_ranks

from mcore_ckpt.storage.paths import complete_steps
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.checkpoints.resuming import load_run
from mcore_train.cli import exit_code, main
from mcore_train.composition import compose
from mcore_train.config import SpikeConfig
from mcore_train.diagnosis.rules import FAULTS, recognize
from mcore_train.guards.spikes import SpikeError
from mcore_train.layout_check.trial import fingerprint
from mcore_train.loop import train
from mcore_train.reporting.html_report import html_report, read_pages
from mcore_train.reporting.log import Reporter, read_metrics
from mcore_train.reporting.spike_ledger import ledger_page
from mcore_train.resolution import resolve
from mcore_train.updating.recent_steps import RecentSteps

BAD_STEPS = (21, 22, 27)
TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 30,
    "lr": 1e-3,
    "lr_warmup_iters": 4,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "waterfall_interval": 0,
    "log_interval": 5,
    "make_vocab_size_divisible_by": 8,
}
SKIP = {"spike_policy": "skip", "spike_sigmas": 5.0, "spike_window": 16}
GIVEN = {"iterations_to_skip": tuple(step - 1 for step in BAD_STEPS)}


class BadDocuments:
    """Training samples, of which those of some steps hold text of another kind."""

    def __init__(self, samples, steps=BAD_STEPS):
        self.samples, self.steps = samples, steps
        self.sequences, self.document_ids = samples.sequences, samples.document_ids

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = dict(self.samples[index])
        if index // TINY["global_batch_size"] + 1 in self.steps:
            sample["tokens"], sample["labels"] = sample["tokens"] * 0 + 7, sample["labels"] * 0
        return sample


def build(world_size=1, **changes):
    """A run over the planted documents, with its checkpoint loaded."""
    config = compose({**TINY, **changes})
    run = assemble(resolve(config, world_size), ParallelContext.build(config.parallelism))
    samples = BadDocuments(run.datasets.train)
    return load_run(replace(run, datasets=replace(run.datasets, train=samples)))


def trained(folder=None, world_size=1, until=0, **changes):
    run = build(world_size, **changes)
    reports = []
    with Reporter(
        Console(quiet=True) if run.ctx.global_rank == 0 else None,
        spikes_file=None if folder is None else folder / "spikes.jsonl",
        continues_from=run.progress.iteration,
        with_lines=False,
    ) as reporter:
        train(run, reporter, until=until, on_report=reports.append)
    return run, reports


def state(run):
    """Fingerprint of weights, optimizer and streams, and the counts of the run."""
    progress = run.progress
    counts = progress.iteration, progress.consumed_train_samples, progress.schedule_samples
    return fingerprint(run, with_streams=True), run.optimizer.num_steps, counts


def test_steps_that_are_skipped_change_nothing_but_the_place_in_the_data(tmp_path):
    skipped, reports = trained(tmp_path, **SKIP)
    rows = read_metrics(tmp_path / "spikes.jsonl")
    assert [(row["iteration"], row["action"]) for row in rows] == [
        (step, "skip") for step in BAD_STEPS
    ]
    for row in rows:
        assert row["grad_norm"] > row["grad_norm_mean"] + 5 * row["grad_norm_deviation"]
    assert [row["first_sample"] for row in rows] == [4 * (step - 1) for step in BAD_STEPS]
    given, _ = trained(**GIVEN, waterfall_interval=20)  # records steps 3 and 23
    plain, all_reports = trained()
    assert state(skipped) == state(given) != state(plain)
    # Skipped steps are counted, and no part of the averages.
    assert [report.skipped_steps for report in reports][-2:] == [2, 1]
    assert reports[-2].loss < all_reports[-2].loss
    assert reports[-1].lr != all_reports[-1].lr  # the schedule does not count them


def test_a_run_that_is_killed_within_a_window_finds_the_same_spikes(tmp_path):
    saving = {"save": str(tmp_path / "run"), "save_interval": 10}
    straight, _ = trained(**SKIP)
    trained(tmp_path, until=21, **SKIP, **saving)
    assert complete_steps(tmp_path / "run") == [10, 20, 21]
    resumed, _ = trained(tmp_path, **SKIP, load=saving["save"])
    assert state(resumed) == state(straight)
    assert torch.equal(resumed.recent._values, straight.recent._values)
    rows = read_metrics(tmp_path / "spikes.jsonl")
    assert [row["iteration"] for row in rows] == list(BAD_STEPS)
    ledger = tmp_path / "spikes.jsonl"
    ledger.write_text(ledger.read_text().replace('"loss_mean"', '"loss_mea"'))
    page = "\n".join(ledger_page(tmp_path))
    assert page.count(f"its line in {ledger} is damaged (KeyError('loss_mean'))") == len(rows)


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.parity_long)])
def test_a_run_goes_back_and_on_with_the_next_data(tmp_path, is_async):
    saving = {"save": str(tmp_path / "run"), "save_interval": 6, "async_save": is_async}
    options = {**SKIP, "spike_policy": "rewind", "spike_rewind_steps": 2, "hidden_dropout": 0.1}
    rewound, _ = trained(tmp_path, **options, **saving)
    rows = read_metrics(tmp_path / "spikes.jsonl")
    # Of steps 21 and 22, the second finds the checkpoint of step 18 as well.
    assert [(r["iteration"], r["rewound_to"]) for r in rows] == [(21, 18), (22, 18), (27, 24)]
    left_out = {"iterations_to_skip": (18, 19, 20, 21, 24, 25, 26)}
    given, _ = trained(**left_out, hidden_dropout=0.1)
    assert state(rewound) == state(given)


def test_a_spike_ends_a_run_with_a_checkpoint_from_which_it_goes_on(tmp_path):
    options = {**SKIP, "spike_policy": "stop", "save": str(tmp_path)}
    with pytest.raises(SpikeError, match="iteration 21 is a spike: loss") as caught:
        trained(**options)
    assert f"mcore-train explain {tmp_path} --step 21" in str(caught.value)
    assert complete_steps(tmp_path) == [21]
    found = recognize(f"mcore_train.guards.spikes.SpikeError: {caught.value}")
    assert found.rule.fault == "spike"
    assert exit_code(caught.value) == FAULTS["spike"].exit_code
    with pytest.raises(SpikeError, match="iteration 22"):
        trained(**options, load=str(tmp_path))
    given, _ = trained(**GIVEN, until=26)
    trained(**options, load=str(tmp_path), until=26)
    resumed = build(**options, load=str(tmp_path))
    assert state(resumed) == state(given)


def test_too_many_spikes_end_a_run(tmp_path):
    with pytest.raises(SpikeError, match=r"spike 2 within 16 steps \(--spike-limit\)"):
        trained(**SKIP, spike_limit=2, save=str(tmp_path))
    assert complete_steps(tmp_path) == [22]


def test_a_rewind_without_an_earlier_checkpoint_is_an_error(tmp_path):
    options = {**SKIP, "spike_policy": "rewind"}
    with pytest.raises(SpikeError, match="lower --save-interval"):
        trained(**options, save=str(tmp_path), save_interval=25)
    with pytest.raises(ValueError, match="give --save and --save-interval"):
        build(**options)


def same_on_ranks(layout):
    layout = layout | {"train_iters": 24}
    skipped, _ = trained(None, 4, **SKIP, **layout)
    assert skipped.progress.schedule_samples == 4 * (24 - 2)
    given, _ = trained(None, 4, **GIVEN, **layout)
    return state(skipped) == state(given)


LAYOUTS = {
    "tp-pp": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "optimizer": "muon",
        "muon_moment2_method": "normuon",
        "qk_clip": True,
        "qk_clip_threshold": 0.01,
    },
    "experts": {
        "micro_batch_size": 1,
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "num_experts": 4,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "optimizer_cpu_offload": True,
        "bf16": True,
    },
    "fsdp": {
        "micro_batch_size": 1,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "use_torch_fsdp2": True,
    },
}


@pytest.mark.parametrize(
    "layout",
    [
        "tp-pp",
        *(pytest.param(each, marks=pytest.mark.parity_long) for each in ("experts", "fsdp")),
    ],
)
def test_all_ranks_skip_the_same_steps(layout):
    assert run_ranks(same_on_ranks, 4, LAYOUTS[layout]) == [True] * 4


def test_a_step_is_judged_by_those_before_it():
    window = RecentSteps(SpikeConfig(**SKIP), torch.device("cpu"))
    numbers = torch.linspace(1, 2, 16).double()

    def is_spike(loss, norm):
        return bool(window.judge(torch.tensor(loss), torch.tensor(norm)).is_spike)

    assert is_spike(torch.nan, 1.0)
    assert not is_spike(100.0, 1.0)  # the window is not full
    window = RecentSteps(SpikeConfig(**SKIP), torch.device("cpu"))
    for number in numbers:
        assert not is_spike(number.item(), 2 * number.item())
    assert window.largest_norm() == 4.0
    state = window.state()
    limit = (numbers.mean() + 5 * numbers.std()).item()
    assert is_spike(1.0, 2 * limit + 1e-3)
    window.set_state(state)
    assert is_spike(1e6, 1.0)
    # The spike counts as the limit, so that the next one is found too.
    raised = torch.cat([numbers[1:], torch.tensor([limit], dtype=torch.float64)])
    next_limit = (raised.mean() + 5 * raised.std()).item()
    assert not is_spike(next_limit - 1e-3, 1.0)
    window.set_state(state)
    assert is_spike(1e6, 1.0)
    assert is_spike(next_limit + 1e-3, 1.0)
    # A level that stays higher becomes the usual one.
    assert sum(is_spike(5.0 + 0.1 * (step % 3), 1.0) for step in range(16)) < 5
    smaller = RecentSteps(SpikeConfig(**SKIP | {"spike_window": 17}), torch.device("cpu"))
    smaller.set_state(state)
    assert not bool(smaller.judge(torch.tensor(9.0), torch.tensor(1.0)).is_spike)
    assert bool(smaller.judge(torch.tensor(90.0), torch.tensor(1.0)).is_spike)


def test_the_page_of_a_ledger_names_the_documents_of_each_spike(tmp_path, capsys):
    trained(tmp_path, **SKIP, save=str(tmp_path), save_interval=10, spike_limit=4)
    further = {"train_iters": 32, "override_opt_param_scheduler": True}
    trained(
        tmp_path, load=str(tmp_path), save=str(tmp_path), iterations_to_skip=(30,), **further
    )
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "iteration": 1, "loss": 3.0}\n')
    assert main(["explain", str(tmp_path), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    for step in (*BAD_STEPS, 31):
        assert f"step {step} (--iterations-to-skip {step - 1})" in shown
        assert f"step {step}, sample 0 of 4:" in shown
    for words in ("its update was left out", "left out by --iterations-to-skip"):
        assert words in shown
    assert "3 more samples: --samples 4" in shown
    assert main(["explain", str(tmp_path), "--step", "2"]) == 0
    assert "step 2 (--iterations-to-skip 1): not in the ledger" in capsys.readouterr().out
    page = html_report(read_pages([tmp_path]))
    assert "Spikes and steps left out" in page
    assert "its update was left out" in page
    assert main(["explain", str(tmp_path / "iter_0000010")]) == 2
