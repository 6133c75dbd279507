import errno
import json
import os
import signal
import time
from dataclasses import asdict, replace
from functools import partial
from typing import get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from forks import exit_code, fork
from rich.console import Console
from warm_ranks import run_ranks

from mcore_base.file_lock import Holder
from mcore_ckpt.conversion.inspection import differences
from mcore_ckpt.storage.paths import complete_steps, resolve_folder
from mcore_moe.routing.router_stats import SUMMARY_COLUMNS, routers
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.checkpoints.resuming import load_run
from mcore_train.composition import compose
from mcore_train.config import OptimizerConfig
from mcore_train.evaluation import validate
from mcore_train.guards.deadline import process_age_s
from mcore_train.layout_check.rows import Rows
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter, read_metrics
from mcore_train.resolution import resolve
from mcore_train.running import joined_world
from mcore_train.updating.lr_schedule import learning_rate
from mcore_train.updating.optimizers import OPTIMIZERS

TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 6,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "log_interval": 2,
    "waterfall_interval": 0,
    "eval_iters": 2,
    "make_vocab_size_divisible_by": 8,
}


def build(world_size=1, **changes):
    config = compose({**TINY, **changes})
    plan = resolve(config, world_size)
    return assemble(plan, ParallelContext.build(config.parallelism))


def collect(run, **options):
    reports = []
    done = train(run, Reporter(None), on_report=reports.append, **options)
    return done, reports


def test_each_optimizer_that_a_flag_names_has_an_update_rule():
    names = get_args(get_type_hints(OptimizerConfig)["optimizer"])
    assert set(names) == set(OPTIMIZERS)
    run = build(optimizer="sgd", lr=1.0)
    _, reports = collect(run)
    assert set(run.optimizer.rule.moments) == {"momentum"}
    assert reports[-1].loss < reports[0].loss


def test_the_first_step_and_every_interval_are_reported():
    run = build()
    done, reports = collect(run)
    assert done
    assert [r.iteration for r in reports] == [1, 2, 4, 6]
    assert reports[-1].consumed_train_samples == 24
    assert reports[0].lr == pytest.approx(1e-2)
    assert all(r.step_ms > 0 for r in reports)
    sizes = run.plan.config.model, run.plan.padded_vocab_size, run.plan.config.batch.seq_length
    flops = run.plan.family.flops_per_token(*sizes, run.plan.config.experts)
    for report in reports:
        assert report.tokens_per_s * report.step_ms / 1e3 == pytest.approx(
            run.plan.tokens_per_step
        )
        assert report.tflops_per_gpu * 1e12 == pytest.approx(report.tokens_per_s * flops)


def test_a_run_in_deterministic_mode_uses_such_algorithms_until_its_end(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")  # the user's own choice
    plan = resolve(compose({**TINY, "deterministic_mode": True, "device": "cpu"}), 1)
    with joined_world(plan) as ctx:
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NCCL_ALGO"] == "Tree"
        done, reports = collect(assemble(plan, ctx))
    assert done
    assert reports[-1].loss == collect(build())[1][-1].loss
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_validation_between_reports_loses_no_step_of_the_average():
    plain = collect(build(log_interval=6))[1][-1]
    evaluated = collect(build(log_interval=6, eval_interval=4))[1][-1]
    assert evaluated.loss == plain.loss


def test_a_schedule_is_built_once_for_each_size_of_a_ramp():
    length = {"train_iters": 0, "train_samples": 24}
    run = build(rampup_batch_size=(2, 2, 8), eval_interval=1, **length)
    collect(run, until=5)
    assert run.progress.schedule_samples == 4 * 2 + 4
    assert list(run.pipeline.built_actions) == [("train", 1), ("evaluate", 2), ("train", 2)]
    assert run.pipeline.actions("train", 1) is run.pipeline.actions("train", 1)


def test_validation_scores_the_same_samples_each_time_and_changes_nothing(tmp_path):
    run = build(eval_interval=2)
    first = validate(run, Reporter(None))
    assert validate(run, Reporter(None)) == first
    assert first.num_tokens == 2 * 4 * 8
    assert all(chunk.training for chunk in run.chunks)
    _, after = collect(run)
    _, alone = collect(build(eval_interval=2))
    assert [r.loss for r in after] == [r.loss for r in alone]


def test_metrics_of_training_and_validation_stand_in_one_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Reporter(Console(quiet=True), metrics_file=path) as reporter:
        train(build(eval_interval=3), reporter)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [(x["kind"], x["iteration"]) for x in lines]
    assert [i for kind, i in kinds if kind == "train"] == [1, 2, 4, 6]
    assert [i for kind, i in kinds if kind == "valid"] == [3, 6]
    assert kinds[-1] == ("test", 6)
    assert lines[-1]["tokens"] == 2 * 4 * 8


def test_the_share_of_the_optimizer_that_flags_name_is_kept_on_the_host():
    shares = []
    for share in (0.0, 0.5, 1.0):
        offload = {
            "optimizer_cpu_offload": share > 0,
            "optimizer_offload_fraction": share or 1.0,
        }
        kept = build(**offload).optimizer._segments.values()
        sizes = [(s.main.numel(), s.on_host) for segments in kept for s in segments]
        on_host = sum(size for size, is_there in sizes if is_there)
        shares.append(on_host / sum(size for size, _ in sizes))
    assert shares == pytest.approx([0.0, 0.5, 1.0], abs=0.02)


def refusal_of_drives(folders):
    """What a rank says of the folders that the ranks keep their optimizer's state in."""
    folder = folders[dist.get_rank()]
    try:
        build(2, optimizer_cpu_offload=True, optimizer_offload_dir=folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_drive_that_cannot_hold_one_ranks_state_is_refused_on_all(tmp_path):
    (tmp_path / "file").touch()
    told = run_ranks(refusal_of_drives, 2, [str(tmp_path), str(tmp_path / "file" / "below")])
    assert "below cannot hold the state: Not a directory" in told[1]
    assert told[0] == f"1 of 2 ranks failed:\nrank 1: {told[1]}"


def test_no_batches_of_a_validation_are_no_validation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Reporter(Console(quiet=True), metrics_file=path) as reporter:
        run = build(eval_interval=1, eval_iters=0, train_iters=2)
        train(run, reporter)
    assert (run.datasets.valid, run.datasets.test) == (None, None)
    assert {json.loads(line)["kind"] for line in path.read_text().splitlines()} == {"train"}


def test_a_run_is_scored_on_its_test_data_once_at_its_end_and_on_all_where_there_are_few(
    tmp_path,
):
    run = build(eval_interval=4)
    three = [run.datasets.test[i] for i in range(3)]
    run = replace(run, datasets=replace(run.datasets, test=three))
    for until, kinds in ((5, ["valid"]), (0, ["valid", "test"])):
        path = tmp_path / "metrics.jsonl"
        with Reporter(Console(quiet=True), metrics_file=path) as reporter:
            train(run, reporter, until=until)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [x["kind"] for x in lines if x["kind"] != "train"] == kinds
    assert lines[-1]["tokens"] == 3 * 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_saves_and_ends_and_the_run_continues_bitwise(tmp_path, number):
    whole = build()
    collect(whole)
    run = build(save=str(tmp_path))

    def interrupt(report):
        if report.iteration == 2:
            signal.raise_signal(number)

    assert not train(run, Reporter(None), on_report=interrupt)
    assert run.progress.iteration == 2
    again = build(load=str(tmp_path))
    again = load_run(again)
    assert again.origin.checkpoint
    assert (again.progress.iteration, again.progress.consumed_train_samples) == (2, 8)
    collect(again)
    for a, b in zip(whole.chunks[0].parameters(), again.chunks[0].parameters(), strict=True):
        assert torch.equal(a, b)


class Acting:
    """Samples whose reading does something: where a validation or a test is."""

    def __init__(self, samples, act):
        self.samples, self.act, self.num_read = samples, act, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.num_read += 1
        self.act()
        return self.samples[index]


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("split", "options", "step"),
    [
        ("valid", {"eval_interval": 2, "save_interval": 2}, 2),
        ("valid", {"eval_interval": 2, "save_interval": 2, "async_save": True}, 2),
        ("valid", {"eval_interval": 6}, 6),  # saved at the end alone
        ("valid", {"eval_interval": 4, "exit_interval": 4}, 4),
        ("test", {"eval_interval": 7}, 6),
    ],
    ids=["interval", "async", "last", "exit", "test"],
)
def test_a_kill_within_a_validation_loses_no_step(tmp_path, split, options, step):
    run = build(save=str(tmp_path), **options)
    # In the background a step is durable some batches later.
    wait_s = 5.0 if "async_save" in options else 0.0
    began_s = []

    def act():
        began_s.append(time.monotonic())
        if time.monotonic() - began_s[0] >= wait_s or complete_steps(tmp_path):
            kill_itself()

    samples = Acting(getattr(run.datasets, split), act)
    run = replace(run, datasets=replace(run.datasets, **{split: samples}))
    assert exit_code(fork(lambda: collect(run))) == -signal.SIGKILL
    assert complete_steps(tmp_path) == [step]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_signal_within_a_validation_is_served_between_two_batches(tmp_path, split):
    run = build(save=str(tmp_path), eval_interval=2 if split == "valid" else 7, eval_iters=50)
    samples = Acting(getattr(run.datasets, split), lambda: signal.raise_signal(signal.SIGUSR1))
    run = replace(run, datasets=replace(run.datasets, **{split: samples}))
    path = tmp_path / "metrics.jsonl"
    with Reporter(Console(quiet=True), metrics_file=path) as reporter:
        is_done = train(run, reporter)
    assert samples.num_read <= 128  # as many as a loader makes at once, of 200
    step = 2 if split == "valid" else 6
    assert (is_done, run.progress.iteration, complete_steps(tmp_path)) == (
        step == 6,
        step,
        [step],
    )
    # Of a part of the data there is no score.
    assert {row["kind"] for row in read_metrics(path)} == {"train"}
    assert all(chunk.training for chunk in run.chunks)


def stop_in_validation(folder):
    """A rank of two gets a signal in a validation; return where and when the ranks ended."""
    run = build(2, save=folder, eval_interval=2, eval_iters=200)
    act = partial(signal.raise_signal, signal.SIGTERM) if dist.get_rank() == 1 else list
    samples = Acting(run.datasets.valid, act)
    run = replace(run, datasets=replace(run.datasets, valid=samples))
    is_done, _ = collect(run)
    return is_done, run.progress.iteration, samples.num_read < 400


def test_a_signal_to_one_rank_within_a_validation_ends_it_on_all(tmp_path):
    assert run_ranks(stop_in_validation, 2, str(tmp_path)) == [(False, 2, True)] * 2
    assert complete_steps(tmp_path) == [2]


def test_a_time_limit_counts_from_the_start_of_the_program(tmp_path, monkeypatch):
    minutes = (process_age_s() - 0.5) / 60  # over before the first step
    run = build(save=str(tmp_path), exit_duration_in_mins=minutes)
    assert not collect(run)[0]
    assert (run.progress.iteration, complete_steps(tmp_path)) == (1, [1])
    assert collect(build(exit_duration_in_mins=minutes + 10))[0]
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time())))
    assert not collect(build(exit_duration_in_mins="auto"))[0]


def test_a_step_of_float16_that_is_skipped_has_no_rate_and_is_counted():
    options = {"fp16": True, "initial_loss_scale": 2.0**34, "hysteresis": 1, "log_interval": 1}
    options |= {"train_iters": 30, "lr_warmup_iters": 8}
    run = build(**options)
    _, reports = collect(run)
    num_skipped = sum(r.skipped_steps for r in reports)
    assert num_skipped == 30 - run.progress.schedule_samples // 4
    assert 5 < num_skipped < 25
    schedule, samples = run.plan.schedule, 0
    for report in reports:
        is_skipped = report.skipped_steps > 0
        assert report.lr == (0.0 if is_skipped else learning_rate(schedule, samples))
        samples += 0 if is_skipped else 4
    # An interval reports its last update and averages over its updates.
    wide = collect(build(**(options | {"log_interval": 30})))[1][-1]
    assert (wide.skipped_steps, wide.lr) == (num_skipped - 1, reports[-1].lr)
    losses = [r.loss for r in reports if not r.skipped_steps]
    assert wide.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_saves_in_the_background_say_when_they_were_asked_for_and_when_durable(
    tmp_path, caplog
):
    options = {"save_interval": 2, "save_retain_last": 2}
    collect(build(save=str(tmp_path / "sync"), **options))
    metrics = tmp_path / "metrics.jsonl"
    with (
        caplog.at_level("INFO"),
        Reporter(Console(quiet=True), metrics_file=metrics) as reporter,
    ):
        run = build(save=str(tmp_path / "async"), async_save=True, **options)
        assert train(run, reporter)
    for step in (2, 4, 6):
        assert f"requested step {step} in" in caplog.text
        assert f"step iter_000000{step} is durable" in caplog.text
    assert "GiB of host memory on this rank" in caplog.text
    kinds = [json.loads(line)["kind"] for line in metrics.read_text().splitlines()]
    assert kinds.count("save_requested") == kinds.count("save_durable") == 3
    # What training changed meanwhile is in no file: the same bits as without a background.
    for step in (4, 6):
        assert (
            differences(*(resolve_folder(tmp_path / k, step) for k in ("sync", "async"))) == []
        )
    assert complete_steps(tmp_path / "async") == complete_steps(tmp_path / "sync") == [4, 6]
    assert not list(tmp_path.glob("*/.writer.lock"))


def test_a_save_that_waits_for_the_one_before_tells_that_it_is_durable(tmp_path, monkeypatch):
    really = os.fsync

    def slowly(file):
        time.sleep(0.1)
        really(file)

    monkeypatch.setattr(os, "fsync", slowly)
    metrics = tmp_path / "metrics.jsonl"
    with Reporter(Console(quiet=True), metrics_file=metrics) as reporter:
        assert train(build(save=str(tmp_path), save_interval=2, async_save=True), reporter)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for kind in ("save_requested", "save_durable"):
        assert [r["iteration"] for r in records if r["kind"] == kind] == [2, 4, 6]


def test_a_write_that_fails_in_the_background_does_not_end_training(
    tmp_path, monkeypatch, caplog
):
    really = os.fsync

    def full_at_step_4(file):
        if "iter_0000004" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        really(file)

    monkeypatch.setattr(os, "fsync", full_at_step_4)
    run = build(save=str(tmp_path), save_interval=2, async_save=True)
    assert collect(run)[0]
    assert complete_steps(tmp_path) == [2, 6]
    assert "writing step 4 failed, trying again: rank 0: cannot write" in caplog.text
    assert "step 4 was not saved" in caplog.text
    assert "the disk or a quota is full" in caplog.text


def test_the_last_step_must_come_to_disk(tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match="the disk or a quota is full"):
        collect(build(save=str(tmp_path), async_save=True))
    assert complete_steps(tmp_path) == []


def test_two_jobs_cannot_train_into_one_folder(tmp_path):
    holder = replace(Holder.current(), token="another", host="elsewhere")
    (tmp_path / ".writer.lock").write_text(json.dumps(asdict(holder)))
    run = build(save=str(tmp_path))
    with pytest.raises(RuntimeError, match=f"{holder} is writing to {tmp_path}"):
        collect(run)
    assert run.progress.iteration == 0


def test_finetuning_takes_the_weights_and_nothing_else(tmp_path):
    run = build(save=str(tmp_path))
    collect(run)
    tuned = build(load=str(tmp_path), finetune=True, lr=5e-3)
    tuned = load_run(tuned)
    assert tuned.origin.checkpoint
    progress = tuned.progress
    assert (progress.iteration, progress.consumed_train_samples, tuned.optimizer.num_steps) == (
        0,
        0,
        0,
    )
    for a, b in zip(run.chunks[0].parameters(), tuned.chunks[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_without_optimizer_continues_with_a_new_one(tmp_path):
    run = build(save=str(tmp_path), save_optim=False)
    collect(run)
    again = build(load=str(tmp_path))
    again = load_run(again)
    assert again.origin.checkpoint
    assert (again.progress.iteration, again.optimizer.num_steps) == (6, 0)


def test_a_missing_checkpoint_starts_anew_or_is_an_error_when_asked(tmp_path):
    assert not load_run(build(load=str(tmp_path / "none"))).origin.checkpoint
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_run(build(load=str(tmp_path / "none"), exit_on_missing_checkpoint=True))


def test_another_schedule_is_refused_unless_one_of_the_two_is_chosen(tmp_path):
    collect(build(save=str(tmp_path)))
    with pytest.raises(ValueError, match="--override-opt-param-scheduler"):
        load_run(build(load=str(tmp_path), lr=2e-2))
    kept = build(load=str(tmp_path), lr=2e-2, use_checkpoint_opt_param_scheduler=True)
    kept = load_run(kept)
    assert kept.origin.checkpoint
    assert kept.plan.schedule.max_lr == 1e-2


LAYOUTS = [
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
    {"micro_batch_size": 1},
]


def test_a_report_says_the_same_under_every_layout():
    oracle = [r.loss for r in collect(build(train_iters=4))[1]]
    for losses in run_ranks(report_in_layouts, 2):
        for found in losses:
            assert found == pytest.approx(oracle, rel=1e-5)


EXPERTS = {
    "num_experts": 4,
    "moe_layer_freq": "[0,1,1]",
    "num_layers": 3,
    "moe_ffn_hidden_size": 8,
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "train_iters": 3,
}


def test_reports_say_by_layer_what_routers_did_under_every_layout():
    run = build(**EXPERTS)
    chosen = {}

    def keep(router, _, routing_and_aux):
        routing, _ = routing_and_aux
        chosen.setdefault(router, []).append(routing.ids.flatten().bincount(minlength=4))

    for module in routers(run.chunks[0]).values():
        module.register_forward_hook(keep)
    _, (first, *_, last) = collect(run)
    for layer, passes in zip((1, 2), chosen.values(), strict=True):
        steps = torch.stack(passes).view(3, 2, 4).sum(1)  # two micro-batches a step
        busiest = (4 * steps.amax(1) / steps.sum(1)).float()
        idle = (steps == 0).sum(1).float()
        assert first.experts[f"imbalance/layer_{layer}"] == pytest.approx(busiest[0].item())
        assert last.experts[f"idle_experts/layer_{layer}"] == pytest.approx(idle[2:].mean())
    assert len(first.experts) == 2 * len(SUMMARY_COLUMNS)
    assert first.expert_imbalance == max(first.experts[f"imbalance/layer_{n}"] for n in (1, 2))
    # Losses apart and without coefficients; what they add to the loss has these.
    for report in (first, last):
        added = 0.0
        for layer in (1, 2):
            balance = report.experts[f"load_balancing_loss/layer_{layer}"]
            assert 0.9 < balance < 4.0  # 1 is perfect balance, 4 one expert of four
            added += 0.01 * balance + 0.001 * report.experts[f"z_loss/layer_{layer}"]
        assert report.aux_loss == pytest.approx(added)
        assert 0.02 * report.load_balancing_loss + 0.002 * report.z_loss == pytest.approx(added)
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    recomputed = collect(build(**EXPERTS, **full, recompute_num_layers=1))[1]
    assert recomputed[-1].experts == last.experts  # computed twice, counted once
    for found in run_ranks(report_experts_in_layouts, 2):
        for reports in found:
            assert reports[0] == pytest.approx(first.experts)
            assert reports[-1] == pytest.approx(last.experts)


def report_experts_in_layouts():
    layouts = [
        {"pipeline_model_parallel_layout": "Ett|tL", "pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ]
    return [
        [r.experts for r in collect(build(2, **EXPERTS, **changes))[1]] for changes in layouts
    ]


def report_in_layouts():
    early = build(2, exit_interval=3)
    done, _ = collect(early)
    assert (done, early.progress.iteration) == (False, 3)  # that very step, on every rank
    return [
        [r.loss for r in collect(build(2, train_iters=4, **changes))[1]] for changes in LAYOUTS
    ]


def test_a_validation_says_the_same_under_every_layout():
    oracle = validate(build(eval_interval=2), Reporter(None))
    for found in run_ranks(validate_in_layouts, 2):
        for loss, num_tokens in found:
            assert loss == pytest.approx(oracle.loss, rel=1e-5)
            assert num_tokens == oracle.num_tokens


def test_a_validation_may_have_its_own_micro_batches_and_scores_the_same_samples():
    oracle = validate(build(eval_interval=2), Reporter(None))
    for size in (1, 4):
        found = validate(build(eval_interval=2, eval_micro_batch_size=size), Reporter(None))
        assert found.num_tokens == oracle.num_tokens
        assert found.loss == pytest.approx(oracle.loss, rel=1e-6)
    with pytest.raises(ValueError, match=r"--eval-micro-batch-size 3 .* --global-batch-size 4"):
        build(eval_interval=2, eval_micro_batch_size=3)


def kinds_of(run, path):
    with Reporter(Console(quiet=True), metrics_file=path, with_lines=False) as reporter:
        assert train(run, reporter)
    return [(row["kind"], row["iteration"]) for row in read_metrics(path)]


def test_a_run_may_validate_before_its_first_step_or_alone(tmp_path):
    data = {"split": "90,5,5", "eval_interval": 6, "log_interval": 6}
    started = kinds_of(build(**data, eval_at_start=True), tmp_path / "started.jsonl")
    assert started[:2] == [("valid", 0), ("train", 1)]
    run = build(**data, eval_only=True, save=str(tmp_path / "alone"))
    before = {name: p.clone() for name, p in run.chunks[0].named_parameters()}
    alone = kinds_of(run, tmp_path / "alone.jsonl")
    assert alone[0] == ("valid", 0)
    assert {kind for kind, _ in alone} <= {"valid", "test"}
    assert all(p.equal(before[name]) for name, p in run.chunks[0].named_parameters())
    assert not complete_steps(tmp_path / "alone")


def test_a_validation_counts_no_masked_token():
    rows = Rows(
        seq_length=8, vocab_size=40, global_batch_size=4, num_steps=2, masked=range(2, 4)
    )
    run = build(eval_interval=2)
    run = replace(run, datasets=replace(run.datasets, valid=rows))
    score = validate(run, Reporter(None))
    assert score.num_tokens == sum(rows[i]["loss_mask"].sum() for i in range(8))


def validate_in_layouts():
    scores = [
        validate(build(2, eval_interval=2, **changes), Reporter(None)) for changes in LAYOUTS
    ]
    return [(score.loss, score.num_tokens) for score in scores]
