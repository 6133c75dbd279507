"""``mcore-train verify``: a certificate for the run's own flags."""

import json
import logging
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from warm_ranks import run_ranks

from mcore_models.config import RecomputeConfig
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.update_rule import AVERAGE
from mcore_train.cli import main
from mcore_train.composition import compose
from mcore_train.layout_check import verification
from mcore_train.layout_check.certificate import Certificate, Line
from mcore_train.layout_check.rows import build_rows
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.layout_check.trial import build_run, run_trial, whole_weights
from mcore_train.layout_check.verification import (
    alone,
    conclude,
    shared_options,
    verify_on_rank,
    with_wgrads_together,
)
from mcore_train.resolution import resolve

README = Path(__file__).parents[2] / "README.md"
FLAGS = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 101,
    "mock_data": True,
    "train_iters": 10,
    "lr": 1e-3,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "tensor_model_parallel_size": 2,
}


def test_the_command_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verification, "run_ranks", partial(run_ranks, check_shapes=False))
    command = re.search(r"mcore-train (verify gpt .*?)```", README.read_text(), re.DOTALL)[1]
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    table = json.loads(Path("verify.json").read_text())
    assert table["passed"]
    assert table["layout"] == "4 ranks: tp2 dp2 sp"
    told = {line["what"] for line in table["lines"]}
    exact = {"logits", "loss", "gradient", "gradient norm", "weights after steps"}
    assert exact | {"initial weights", "continued run", "checkpoint on one rank"} <= told
    assert {"logits in bfloat16", "gradient in bfloat16"} <= told
    tolerances = {line["tolerance"] for line in table["lines"] if line["what"] in exact}
    assert tolerances == {1e-10}
    assert any("GPU" in note for note in table["unchecked"])


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_state_that_a_checkpoint_leaves_out_is_missed(is_saved, tmp_path, monkeypatch):
    """The averages begin anew at a resume, and nothing that is saved again differs."""
    listed = DistributedOptimizer.named_shards

    def without_averages(optimizer):
        found = listed(optimizer)
        return {name: found[name] for name in found if not name.startswith(f"{AVERAGE}.")}

    if not is_saved:
        monkeypatch.setattr(DistributedOptimizer, "named_shards", without_averages)
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    one = {"tensor_model_parallel_size": 1, "train_iters": 2, "ema_decay": 0.5}
    plan = resolve(compose(FLAGS | sizes | one), 1)
    context, rows = ParallelContext.single(), build_rows(plan)
    trial = run_trial(plan, context, rows, folder=tmp_path, saved_step=1)
    assert (trial.resumed == trial.final) == is_saved


def test_one_rank_alone_sees_the_same_micro_batches():
    plan = resolve(compose(FLAGS), 4)
    lone = alone(plan)
    assert (lone.world_size, lone.global_batch_size) == (1, plan.global_batch_size)
    assert lone.num_microbatches == 2 * plan.num_microbatches
    assert lone.padded_vocab_size >= plan.vocab_size


def test_one_rank_alone_computes_plainly():
    experts = {"num_experts": 4, "moe_expert_rows_limit": 1.5, "cpu_offloading": False}
    ways = {"recompute_granularity": "full", "transformer_impl": "local", "ddp_bucket_size": 99}
    flags = FLAGS | experts | ways | {"overlap_grad_reduce": True}
    lone = alone(resolve(compose(flags), 2)).config
    assert lone.recomputation == RecomputeConfig()
    assert (lone.experts.moe_expert_rows_limit, lone.experts.moe_grouped_gemm) == (0.0, False)
    assert lone.data_parallelism == DataParallelConfig()
    one = {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"}
    plan = resolve(compose(FLAGS | {"num_experts": 4} | one), 2)
    assert "--moe-router-score-function sigmoid" in shared_options(
        plan, build_small_run(plan, 2)
    )


def test_a_layout_is_certified_with_the_sums_of_experts_that_its_gpus_may_choose():
    flags = FLAGS | {"num_experts": 4, "bf16": True}
    chosen = with_wgrads_together(resolve(compose(flags), 4)).expert_wgrads
    assert chosen.num_together == 2
    for without in ({"bf16": False}, {"global_batch_size": 4}, {"moe_wgrad_micro_batches": 1}):
        assert with_wgrads_together(resolve(compose(flags | without), 4)).expert_wgrads is None


def test_one_rank_alone_needs_no_dispatcher_of_several():
    experts = {"num_experts": 4, "expert_model_parallel_size": 2}
    flags = FLAGS | experts | {"moe_token_dispatcher_type": "symmetric"}
    plan = resolve(compose(flags | {"tensor_model_parallel_size": 1}), 2)
    assert alone(plan).world_size == 1


@pytest.mark.parametrize(("error", "code"), [(0.0, 0), (1.0, 1)])
def test_the_command_ends_as_the_certificate_says(tmp_path, caplog, error, code):
    line = Line(what="loss", tensor="", worst="", error=error, tolerance=1e-10)
    certificate = Certificate(
        layout="2 ranks: tp2", dtype="float64", lines=(line,), unchecked=(), seconds=1.0
    )
    with caplog.at_level(logging.INFO):
        assert conclude(certificate, str(tmp_path / "verify.json")) == code
    assert json.loads((tmp_path / "verify.json").read_text())["passed"] is (code == 0)
    assert "2 ranks: tp2" in caplog.text


FULL = {
    "attention_backend": "flash4",  # which only a GPU has
    "nccl_communicator_config_path": "absent.toml",
    "num_layers": 1,
    "hidden_size": 256,
    "use_distributed_optimizer": True,
    "tensor_model_parallel_size": 1,
    "hidden_dropout": 0.1,
    "rampup_batch_size": (4, 4, 8),
    "train_iters": 0,
    "train_samples": 80,
    "eval_interval": 5,
    "fp16": True,
}


def test_a_run_with_a_ramp_validation_and_dropout_is_certified():
    small = build_small_run(resolve(compose(FLAGS | FULL), 2), 2)
    certificate, _ = run_ranks(verify_on_rank, 2, small)
    assert certificate.passed
    checked = {line.what for line in certificate.lines}
    assert checked >= {"log: loss", "log: global_batch_size", "validation: loss"}
    assert checked >= {"random numbers of ranks", "continued run with dropout or noise"}
    assert checked >= {"logits in float16", "gradient in float16", "continued run in float16"}
    unchecked = "\n".join(certificate.unchecked)
    assert "GPU kernels" in unchecked
    assert "vectors" not in unchecked
    assert "rampup" not in unchecked


SHARDED = {
    "num_layers": 2,
    "hidden_size": 96,
    "tensor_model_parallel_size": 1,
    "use_distributed_optimizer": True,
    "qk_clip": True,
    "recompute_granularity": "full",
    "bf16": True,
}


def test_state_of_the_runs_own_format_and_rows_that_shards_cut_are_certified():
    """On two ranks: a mutant of each is in tests/mutations.toml."""
    small = build_small_run(resolve(compose(FLAGS | SHARDED), 2), 2)
    certificate, _ = run_ranks(verify_on_rank, 2, small)
    assert certificate.passed, [line for line in certificate.lines if not line.passed]
    checked = {line.what for line in certificate.lines}
    assert checked >= {"continued run in bfloat16", "checkpoint on one rank in bfloat16"}
    whole = "".join(note for note in certificate.unchecked if "inside rows" in note)
    assert not all(f".{name}.weight" in whole for name in "qk")
    assert "--qk-clip" in certificate.shared
    assert "recompute" not in certificate.shared


BEGUN = {
    "an adapter beside a base": {
        "peft": "dora",
        "lora_dim": 2,
        "data_parallel_sharding_strategy": "optim_grads",
    },
    "a run with experts": {"num_experts": 4, "use_distributed_optimizer": True},
}
ADAPTER, EXPERTS = BEGUN


@pytest.mark.parametrize(
    "name", [ADAPTER, pytest.param(EXPERTS, marks=pytest.mark.parity_long)]
)
def test_a_run_that_begins_from_load_is_certified_from_there(name):
    changes = {"num_layers": 1, "tensor_model_parallel_size": 1, "bf16": True, **BEGUN[name]}
    small = build_small_run(resolve(compose(FLAGS | changes), 2), 2)
    kind = "weights" if "peft" in changes else "run"
    certificate, _ = run_ranks(verify_on_rank, 2, replace(small, start=kind))
    assert certificate.passed, [line for line in certificate.lines if not line.passed]
    checked = {(line.what, line.tensor.rpartition(".")[2]) for line in certificate.lines}
    assert (("initial weights", "lora_magnitude_vector") in checked) == ("peft" in changes)


def test_weights_gathered_in_fp8_are_certified_to_change_no_bit():
    changes = {
        "num_layers": 1,
        "tensor_model_parallel_size": 1,
        "use_distributed_optimizer": True,
        "bf16": True,
        "fp8_format": "hybrid",
        "fp8_param_gather": True,
    }
    small = build_small_run(resolve(compose(FLAGS | changes), 2), 2)
    certificate, _ = run_ranks(verify_on_rank, 2, small)
    assert certificate.passed
    checked = {line.what for line in certificate.lines}
    assert checked >= {"losses by weights gathered in fp8 in bfloat16"}
    assert checked >= {"gradient, mean scale in bfloat16", "logits, mean distance in bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11), (torch.float32, 2.0**-16)],
    ids=str,
)
def test_a_weight_moves_by_what_the_runs_own_format_rounds(dtype, share):
    small = build_small_run(resolve(compose(FLAGS), 2), 2)
    plan, single = alone(resolve(small.config, 2)), ParallelContext.single()
    before, moved = (
        whole_weights(build_run(plan, single, build_rows(plan), dtype=dtype, nudge_seed=seed))
        for seed in (0, 1)
    )
    for name, weight in before.items():
        off = ((moved[name].double() - weight.double()) / weight.double()).abs()
        # To the next number, which is nearer for a large mantissa.
        assert off.max() <= 2 * share, name
        assert off[weight != 0].mean() >= share / 2, name


def test_flags_that_cannot_run_are_refused_before_any_rank_starts(capsys):
    words = "verify gpt --nproc 2 --num-layers 2 --hidden-size 36 --num-attention-heads 3"
    flags = "--mock-data --vocab-size 64 --seq-length 16 --tensor-model-parallel-size 2"
    assert main([*words.split(), *flags.split()]) == 2
    assert "--num-attention-heads 3 cannot be split" in capsys.readouterr().err


def test_a_verification_that_stops_early_says_so_in_its_certificate(capsys, tmp_path):
    file = tmp_path / "verify.json"
    file.write_text('{"passed": true}')
    words = "verify gpt --num-layers 2 --hidden-size 36 --num-attention-heads 3 --mock-data"
    flags = "--vocab-size 64 --seq-length 16 --tensor-model-parallel-size 2 --certificate"
    assert main([*words.split(), *flags.split(), str(file)]) == 2
    table = json.loads(file.read_text())
    assert not table["passed"]
    assert "--num-attention-heads 3 cannot be split" in table["stopped"]
    hint = "This is for 4 ranks, the fewest of this layout: give the run's number of ranks by"
    assert hint in capsys.readouterr().err
