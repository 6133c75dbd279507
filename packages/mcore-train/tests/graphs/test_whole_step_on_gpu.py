"""A step as one CUDA graph: the same bits as launched one by one, in one launch."""

import json
import subprocess
import sys

import pytest
import torch
from gpu_runs import SMALL, batches, build
from torch.profiler import ProfilerActivity, profile

from mcore_models.protocol import MicroBatch
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.launch.launcher import deterministic_algorithms
from mcore_train.reporting.waterfall import StepWatch
from mcore_train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    # Noise of torch's own compiler, on which no test can act.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

SIZES = {"hidden_size": 256, "seq_length": 256, "micro_batch_size": 2, "global_batch_size": 4}
SIZES |= {"waterfall_interval": 2}
MASKED = 1 / 7
GRAPHS = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 2}


@pytest.fixture(autouse=True)
def own_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def trained(run, counts=(2,) * 6):
    watch, losses = StepWatch(run), []
    for step, count in enumerate(counts, 1):
        watch.before(step)
        losses.append(train_step(run, batches(run, step, count, MASKED), 1e-3, 0.1).loss)
        watch.after(step)
    run.data_parallel.wait_params()
    return losses, [parameter.detach().clone() for parameter in run.chunks[0].parameters()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_dropout": 0.1, "hidden_dropout": 0.1},
        {"untie_embeddings_and_output_weights": False, "normalization": "LayerNorm"},
        {"use_distributed_optimizer": True, "overlap_param_gather": True},
        {"fp8_format": "hybrid"},
        {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
        {"num_experts": 8, "moe_ffn_hidden_size": 64, "moe_aux_loss_coeff": 0.01},
        {"num_experts": 8, "moe_ffn_hidden_size": 64, "moe_expert_capacity_factor": 0.8},
        {"recompute_granularity": "full"},
    ],
    ids=[
        "dense",
        "dropout",
        "tied",
        "sharded",
        "fp8",
        "fp8_delayed",
        "experts",
        "dropped",
        "recomputed",
    ],
)
def test_a_recorded_step_gives_the_bits_of_one_launched_singly(changes):
    with deterministic_algorithms():
        want_losses, want = trained(build(**SIZES, **changes))
        run = build(**SIZES, **changes, **GRAPHS)
        with run.recorder:
            got_losses, got = trained(run)
            assert run.recorder.is_recorded
    assert not run.recorder.is_recorded
    assert [float(loss) for loss in got_losses] == [float(loss) for loss in want_losses]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_dropout_of_a_recorded_step_goes_on_in_the_streams_that_are_saved():
    changes = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    plain, run = build(**SIZES, **changes), build(**SIZES, **changes, **GRAPHS)
    trained(plain)
    with run.recorder:
        trained(run)
    want, got = plain.streams.state(), run.streams.state()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_a_step_is_one_launch_with_the_kernels_of_every_day():
    run = build(**SIZES, **GRAPHS)
    with run.recorder:
        trained(run)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as seen:
            run.recorder(pytest.fail, batches(run, 9, masked=MASKED))
    launches = {event.key: event.count for event in seen.key_averages()}
    assert launches["cudaGraphLaunch"] == 1


def test_a_recorded_step_of_a_graph_has_parts_and_the_noise_of_its_gradient():
    found = {}
    for kind, graphs in (("singly", {}), ("graph", GRAPHS)):
        run = build(**SIZES, **graphs)
        watch = StepWatch(run)
        for step in range(1, 6):
            watch.before(step)
            train_step(run, batches(run, step, masked=MASKED), 1e-3, 0.1)
            watch.after(step)
        torch.cuda.synchronize()
        found[kind] = watch.report()
        if run.recorder:
            run.recorder.forget()
    assert found["graph"].parts["compute"] > 0
    assert found["graph"].gradient_noise == pytest.approx(found["singly"].gradient_noise, 1e-4)
    assert found["graph"].step_s < found["singly"].step_s


def test_a_batch_that_grows_is_recorded_anew():
    with deterministic_algorithms():
        counts = (2, 2, 2, 3, 3, 3, 3)
        _, want = trained(build(**SIZES), counts)
        run = build(**SIZES, **GRAPHS)
        with run.recorder:
            _, got = trained(run, counts)
            assert run.recorder.is_recorded
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_packed_documents_are_refused():
    run = build(**SIZES, **GRAPHS)
    borders = torch.tensor([[0, 100, 256]] * 2, dtype=torch.int32)
    step = [
        MicroBatch(b.entries, None, Documents.from_cu_seqlens(borders))
        for b in batches(run, 0, masked=MASKED)
    ]
    with pytest.raises(RuntimeError, match="--cuda-graph-impl"):
        train_step(run, step, 1e-3, 0.1)


def test_the_default_stream_is_refused():
    with torch.cuda.stream(torch.cuda.default_stream()):
        run = build(**SIZES, **GRAPHS)
        with pytest.raises(RuntimeError, match="default stream"):
            trained(run)


@pytest.mark.parametrize(
    "layout",
    [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        ["--context-parallel-size", "2"],
        [
            *("--num-experts", "8", "--moe-ffn-hidden-size", "64"),
            *("--expert-model-parallel-size", "2", "--moe-expert-rows-limit", "2"),
            *("--moe-token-dispatcher-type", "allgather", "--moe-aux-loss-coeff", "0.01"),
        ],
    ],
    ids=["tp2", "dp2", "cp2", "ep2"],
)
def test_over_two_gpus_a_recorded_step_gives_the_same_bits(layout, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    flags = []
    for name, value in (SMALL | SIZES).items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    flags += ["--device", "cuda", "--nproc", "2", "--log-interval", "1", "--deterministic-mode"]
    flags += ["--waterfall-interval", "1"]
    losses = {}
    for kind in ("none", "full_iteration"):
        metrics = tmp_path / f"{kind}.jsonl"
        graph = ["--cuda-graph-impl", kind, "--metrics-file", str(metrics)]
        command = [sys.executable, "-m", "mcore_train", "gpt", *flags, *layout, *graph]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = map(json.loads, metrics.read_text().splitlines())
        lines = list(lines)
        losses[kind] = [(x["loss"], x["grad_norm"]) for x in lines if x["kind"] == "train"]
        timed = [x for x in lines if x["kind"] == "waterfall"][-1]
        waits = sum(timed[f"exposed_{axis}_ms"] for axis in ("tp", "cp", "ep", "dp"))
        assert 0 < waits < timed["step_ms"]
        assert timed["gradient_noise"] is not None
    assert len(losses["none"]) == SMALL["train_iters"]
    assert losses["full_iteration"] == losses["none"]
