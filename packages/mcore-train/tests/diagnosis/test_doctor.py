"""The doctor: every check finds its fault and is silent on a healthy cluster."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from warm_ranks import run_command, run_ranks

from mcore_base.command_line import parse as parse_options
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_train.composition import flag_names
from mcore_train.diagnosis import probes
from mcore_train.diagnosis.doctor import (
    BAD_PAIRS,
    CHECKS,
    DoctorConfig,
    DoctorOptions,
    expected_connections,
    judge,
    link_gbs,
    measure,
    outliers,
    page,
    satisfies,
)
from mcore_train.diagnosis.planned_run import plan_run
from mcore_train.diagnosis.run_rules import RULES, RunFacts, diagnose, read_run
from mcore_train.options.parsing import parse
from mcore_train.options.recipe import changed_options

LAYOUT = ParallelConfig(tensor_model_parallel_size=2)
CONFIG = DoctorConfig(
    options=DoctorOptions(save="/shared/run", log_dir="/shared/logs", checkpoint_gib=10.0),
    parallelism=LAYOUT,
)
RANKS_A_HOST = 4


def healthy():
    """Return the facts of two hosts with four H100 each."""
    gpu = {
        "driver": "580.82",
        "bus": "00000000:3B:00.0",
        "max_sm_mhz": 1980,
        "sm_mhz": 1755,
        "throttle": 0x4,
        "power_limit_w": 700.0,
        "default_power_w": 700.0,
        "ecc_errors": 0,
        "remapped_rows": [0, 0, 0, 0],
        "used_gib": 0.6,
        "nvlinks": [True] * 18,
    }
    port = {"port": "mlx5_0:1", "is_active": True, "is_up": True, "gbps": 400.0}
    kept = {"kind": "nfs4", "error": "", "free_gib": 900.0, "is_shared": True}
    facts = []
    for rank in range(2 * RANKS_A_HOST):
        host, local = divmod(rank, RANKS_A_HOST)
        folders = [{"path": path, **kept} for path in ("/shared/run", "/shared/logs")]
        folders[0] |= {"write_mbs": 900.0, "fsync_ms": 4.0}
        facts.append(
            {
                "rank": rank,
                "local_rank": local,
                "device": "cuda",
                "program": "/shared/venv/bin/python",
                "versions": {
                    "torch": "2.11.0+cu130",
                    "cuda": "13.0",
                    "nccl": "2.28.9",
                    "python": "3.11.7",
                    "glibc": "2.36",
                },
                "locked": {"torch": "2.11.0"} if local == 0 else {},
                "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
                "names": {"host": f"n{host}", "own_address": f"10.0.0.{host}",
                          "master_address": "10.0.0.0"},
                "listen_error": "",
                "shm": {"size_gib": 64.0, "free_gib": 60.0},
                "infiniband": [dict(port) for _ in range(4)],
                "num_gpus": RANKS_A_HOST,
                "folders": folders if local == 0 else [],
                "clock_offset_s": 0.01,
                "gpu_name": "NVIDIA H100 80GB HBM3",
                "capability": [9, 0],
                "gpu": dict(gpu),
                "xids": [],
                "gemm_tflops": 700.0 + rank,
                "bus_gbs": {
                    "world": (40.0, list(range(8))),
                    "tp": (300.0, [rank - rank % 2, rank - rank % 2 + 1]),
                },
                "near_gbs": 250.0 + rank,
                "far_gbs": 40.0,
            }
        )  # fmt: skip
    return facts


def host(facts, number):
    """Return the facts of one host's ranks."""
    return [one for one in facts if one["names"]["host"] == f"n{number}"]


def every(facts, change):
    """Apply a change to all ranks."""
    for one in facts:
        change(one)


def on_host(number, change):
    """Return what spoils all ranks of a host."""
    return lambda facts: every(host(facts, number), change)


def on_gpu(**values):
    """Return what spoils the GPU of rank 5."""
    return lambda facts: facts[5]["gpu"].update(values)


def in_folder(number, **values):
    """Return what spoils the shared folder on host 1."""
    return lambda facts: facts[4]["folders"][number].update(values)


INJECTED = {
    "version pairs": (on_host(1, lambda f: f["gpu"].update(driver="550.54")), "driver 550.54"),
    "same versions": (lambda f: f[6]["versions"].update(nccl="2.28.10"), "nccl 2.28.10"),
    "uv sync": (lambda f: f[0]["locked"].update(torch="2.12.0"), "uv.lock has 2.12.0"),
    "container torch": (
        on_host(0, lambda f: f["environment"].update(NVIDIA_PYTORCH_VERSION="25.04")),
        "NVIDIA's 25.04",
    ),
    "same program": (lambda f: f[7].update(program="/home/me/python"), "/home/me/python"),
    "same source": (lambda f: f[6].update(source="other"), "files other"),
    "same folder": (lambda f: f[6].update(working_folder="/elsewhere"), "folder /elsewhere"),
    "one worker group": (
        on_host(1, lambda f: f["environment"].update(MASTER_PORT="1")),
        "MASTER_PORT 1",
    ),
    "ranks of a host": (lambda f: f.pop(), "ranks 3, elsewhere 4"),
    "GPUs of a host": (on_host(0, lambda f: f.update(num_gpus=8)), "4 ranks and 8 GPUs"),
    "ECC": (on_gpu(ecc_errors=2), "2 errors"),
    "memory rows": (on_gpu(remapped_rows=[0, 1, 1, 0]), "wait for a reset"),
    "Xid": (on_host(1, lambda f: f.update(xids=[["3b:00", 79]])), "Xid 79 of GPU 3b:00"),
    "throttling": (on_gpu(throttle=0x40), "hardware thermal"),
    "power limit": (on_gpu(power_limit_w=400.0), "400 W of 700"),
    "clocks": (on_gpu(sm_mhz=345), "345 of 1980 MHz"),
    "free GPU": (on_gpu(used_gib=31.0), "31.0 GiB in use"),
    "NVLink": (on_gpu(nvlinks=[True] * 16 + [False] * 2), "2 of 18 down"),
    "GEMM rate": (lambda f: every(f, lambda o: o.update(gemm_tflops=400.0)), "400 of 989"),
    "GEMM outliers": (lambda f: f[5].update(gemm_tflops=600.0), "600 TFLOP/s, the median"),
    "bandwidth of axes": (
        lambda f: f[2]["bus_gbs"].update(tp=(30.0, [2, 3])),
        "30 GB/s of 450",
    ),
    "neighbours": (lambda f: f[3].update(near_gbs=20.0), "20 GB/s, the median"),
    "hosts in pairs": (lambda f: f[1].update(far_gbs=5.0), "5 GB/s, the median"),
    "InfiniBand": (
        on_host(1, lambda f: f["infiniband"][2].update(is_active=False)),
        "port mlx5_0:1 is down",
    ),
    "folder": (in_folder(0, error="[Errno 13] Permission denied"), "Permission denied"),
    "shared folder": (in_folder(1, is_shared=False), "rank 0's file is not visible"),
    "rate of the folder": (
        lambda f: f[0]["folders"][0].update(write_mbs=12.0),
        "writes 12 MB/s",
    ),
    "room for checkpoints": (in_folder(0, free_gib=15.0), "two checkpoints need 20.0"),
    "log folder": (in_folder(1, kind="overlay"), "is on overlay"),
    "/dev/shm": (on_host(1, lambda f: f["shm"].update(free_gib=0.06)), "0.06 GiB free"),
    "ports": (on_host(1, lambda f: f.update(listen_error="[Errno 24] Too many")), "Errno 24"),
    "names": (
        on_host(1, lambda f: f["names"].update(master_address="127.0.1.1")),
        "MASTER_ADDR is 127.0.1.1",
    ),
    "time": (on_host(1, lambda f: f.update(clock_offset_s=-9.5)), "-9.5 s against rank 0"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        on_host(1, lambda f: f["environment"].clear()),
        "unset, this layout needs 1",
    ),
}
"""By check: what spoils the facts of a healthy cluster, and what the page then has."""


def test_a_healthy_cluster_has_no_problem():
    results = judge(healthy(), CONFIG)
    assert [r.check.name for r in results if r.problems] == []
    assert [r.check.name for r in results if r.is_skipped] == ["container torch"]


def test_every_check_has_a_fault_that_it_finds():
    assert list(INJECTED) == [check.name for check in CHECKS]


@pytest.mark.parametrize("name", INJECTED)
def test_a_check_finds_its_fault_and_no_other_does(name):
    spoil, shown = INJECTED[name]
    facts = copy.deepcopy(healthy())
    spoil(facts)
    results = judge(facts, CONFIG)
    troubled = {result.check.name for result in results if result.problems}
    assert name in troubled
    # A missing rank is a missing GPU too.
    assert troubled - {name} <= ({"GPUs of a host"} if name == "ranks of a host" else set())
    text = page(facts, results)
    assert shown in text
    assert "do: " in text
    word = next(result.word for result in results if result.check.name == name)
    assert word == ("warning" if {c.name: c for c in CHECKS}[name].is_warning else "FAULT")


@pytest.mark.parametrize(
    ("gpu", "changes", "needed"),
    [
        ((9, 0), {}, "1"),
        ((9, 0), {"parallelism": ParallelConfig()}, ""),
        ((9, 0), {"parallelism": ParallelConfig(context_parallel_size=2)}, "1"),
        ((10, 0), {}, ""),
        (None, {}, ""),
        (
            (9, 0),
            {"data_parallelism": DataParallelConfig(
                data_parallel_sharding_strategy="optim_grads_params")},
            "not 1",
        ),
        ((10, 0), {"pipeline": PipelineConfig(overlap_moe_expert_parallel_comm=True)}, "32"),
    ],
)  # fmt: skip
def test_the_connections_follow_the_layout_and_the_gpu(gpu, changes, needed):
    config = DoctorConfig(**{"parallelism": LAYOUT, **changes})
    assert expected_connections(config, gpu) == needed


def test_every_known_bad_pair_is_found():
    bad = {"torch": "2.10.1", "cuda": "13.0", "driver": "570.1", "nccl": "2.28.5"}
    bad |= {"nvidia-resiliency-ext": "0.7.0", "python": "3.11.7", "glibc": "2.36"}
    bad |= {"megatron-core": "0.19.2", "vllm": "0.33.0"}
    for name, ranges, other, other_ranges, _ in BAD_PAIRS:
        if (name, ranges) != ("cuda", ">=12,<13"):
            assert satisfies(bad[name], ranges)
            assert not other or satisfies(bad[other], other_ranges)
    assert satisfies("2.28.3+cuda13", ">=2.28.3,<2.28.9")
    assert not satisfies("2.28.9", ">=2.28.3,<2.28.9")
    assert not satisfies("", "<3")


def test_outliers_are_far_below_the_median_of_at_least_four():
    assert outliers({"a": 10.0, "b": 10.2, "c": 9.9, "d": 7.0}) == ["d"]
    assert outliers({"a": 10.0, "b": 10.2, "c": 9.9, "d": 9.5}) == []
    assert outliers({"a": 10.0, "b": 1.0}) == []


def test_links_are_nvlink_within_a_host_and_infiniband_between():
    facts = healthy()
    assert link_gbs(facts, [0, 1]) == 450.0
    assert link_gbs(facts, [0, 4]) == 50.0  # four ports of 400 Gb/s for four GPUs


class FakeNvml:
    """A GPU that answers all but one question."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_NVLINK_MAX_LINKS = 1, 0, 3
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        """What nvidia-ml-py raises."""

    def nvmlDeviceGetHandleByIndex(self, index):
        self.index = index
        return index

    def nvmlDeviceGetTotalEccErrors(self, *_):
        raise self.NVMLError

    def nvmlDeviceGetNvLinkState(self, _handle, link):
        if link == 2:
            raise self.NVMLError
        return int(link == 0)

    def nvmlDeviceGetMemoryInfo(self, _handle):
        return SimpleNamespace(used=2**30)

    def nvmlDeviceGetPciInfo(self, _handle):
        return SimpleNamespace(busId=b"00000000:3B:00.0")

    def __getattr__(self, name):
        answers = {"nvmlDeviceGetName": b"H100", "nvmlDeviceGetRemappedRows": (0, 1, 0, 0)}
        return lambda *_: answers.get(name, 700)


def test_nvml_is_asked_and_what_it_does_not_answer_is_left_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    nvml = FakeNvml()
    found = probes.gpu(1, nvml)
    assert nvml.index == 6
    assert (found["name"], found["bus"], found["used_gib"]) == ("H100", "00000000:3B:00.0", 1.0)
    assert found["nvlinks"] == [True, False]
    assert "ecc_errors" not in found


def test_xids_of_the_kernel_s_log_are_read():
    text = "NVRM: Xid (PCI:0000:9b:00): 79, pid=1\nNVRM: Xid (PCI:0000:9B:00.0): 31, pid=2\n"
    assert probes.xids(text) == [("9b:00", 79), ("9b:00", 31)]


def test_ports_of_infiniband_are_read(tmp_path):
    port = tmp_path / "mlx5_1/ports/1"
    port.mkdir(parents=True)
    for name, text in (
        ("state", "1: DOWN"),
        ("phys_state", "3: Disabled"),
        ("rate", "400 Gb/sec"),
    ):
        (port / name).write_text(text + "\n")
    expected = {"port": "mlx5_1:1", "is_active": False, "is_up": False, "gbps": 400.0}
    assert probes.infiniband(tmp_path) == [expected]


def test_the_file_system_of_a_path_is_that_of_the_longest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert probes.file_system(tmp_path / "run", str(mounts)) == "nfs4"
    assert probes.file_system(tmp_path.parent, str(mounts)) == "ext4"


def test_the_versions_of_the_next_lock_are_read(tmp_path):
    lock = '[[package]]\nname = "torch"\nversion = "2.11.0"\n'
    lock += "".join(f'[[package]]\nname = "numpy"\nversion = "2.{n}"\n' for n in (4, 5))
    (tmp_path / "uv.lock").write_text(lock)
    (tmp_path / "a/b").mkdir(parents=True)
    assert probes.locked_versions(tmp_path / "a/b") == {"torch": "2.11.0"}


def _measure(folder):
    options = DoctorOptions(save=folder, device="cpu")
    config = DoctorConfig(options=options, parallelism=LAYOUT)
    ctx = ParallelContext.build(LAYOUT)
    facts = measure(config, ctx, {})
    ctx.destroy()
    return facts


def test_ranks_measure_together_over_gloo(tmp_path, monkeypatch):
    facts = run_ranks(_measure, 2, str(tmp_path / "run"))
    config = DoctorConfig(options=DoctorOptions(save=str(tmp_path / "run")), parallelism=LAYOUT)
    assert all(one["gemm_tflops"] > 0 and one["near_gbs"] > 0 for one in facts)
    assert set(facts[0]["bus_gbs"]) == {"world", "tp"}
    assert facts[0]["folders"][0]["write_mbs"] > 0
    assert list((tmp_path / "run").iterdir()) == []  # nothing is left behind
    outcomes = {r.check.name: r.word for r in judge(facts, config)}
    assert outcomes["shared folder"] == outcomes["same versions"] == "ok"
    assert outcomes["NVLink"] == "skipped"


def test_the_command_prints_a_page_or_json_and_fails_on_a_fault(tmp_path):
    words = ["doctor", "--device", "cpu", "--save", str(tmp_path), "--json"]
    done = run_command("mcore_train", *words, "--checkpoint-gib", "1e9")
    told = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    faults = [c["name"] for c in told["checks"] if c["outcome"] == "FAULT"]
    assert "room for checkpoints" in faults
    assert told["facts"][0]["versions"]["torch"].startswith("2.")


def test_the_commands_of_the_page_on_troubles(tmp_path):
    page_text = (Path(__file__).parents[4] / "docs/troubleshooting.md").read_text()
    mark = "test_doctor.py::test_the_commands_of_the_page_on_troubles -->\n```bash\n"
    blocks = [part.split("```")[0] for part in page_text.split(mark)[1:]]
    alone, under_torchrun, of_run = "".join(blocks).splitlines()
    done = run_command("mcore_train", *alone.split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok       shared folder" in done.stdout
    launched = under_torchrun.partition("mcore_train ")[2].split()
    assert parse_options(DoctorConfig, "doctor", launched[1:]).parallelism == LAYOUT
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(reports(loss=[4.0])[0]) + "\n")
    done = run_command("mcore_train", *of_run.split()[1:], cwd=tmp_path)
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "run")


# -- doctor RUN


def reports(**series):
    """Return reports with one value a report for each number."""
    count = max(len(values) for values in series.values())
    rows = []
    for i in range(count):
        row = {"kind": "train", "iteration": 10 * (i + 1), "global_batch_size": 64}
        rows.append(row | {name: values[i] for name, values in series.items()})
    return rows


FALLING = [4.0 - 0.1 * i for i in range(16)]
H200 = {"devices": {"NVIDIA H200": 8}, "layout": {"tensor": 1, "pipeline": 1, "data": 8}}


def planned(flags: str = "", options: str = "--model llama-3-8b --seq-length 8192"):
    """Plan a run of 8 H200s, with 16 sequences a step."""
    words = f"{options} --bf16 --mock-data --lr 1e-4 --train-iters 9 --global-batch-size 16"
    return plan_run(H200, changed_options(parse([*words.split(), *flags.split()])))


RUNS = {
    "ended": (RunFacts(fault="hardware", advice="Leave the host out."), ""),
    "memory": (
        RunFacts(reports=reports(peak_gib=[135.0]), header=H200),
        "--use-distributed-optimizer",
    ),
    "loss not finite": (RunFacts(reports=reports(loss=[*FALLING, None])), "--lr"),
    "oscillating loss": (
        RunFacts(reports=reports(loss=[*FALLING, 4.1, 2.6, 3.9, 2.7])),
        "--lr-warmup-iters",
    ),
    "loss stays": (RunFacts(reports=reports(loss=[4.0] * 12, lr=[1e-7] * 12)), "--lr"),
    "vanishing gradients": (
        RunFacts(
            reports=reports(grad_norm=[1.0] * 6 + [1e-5] * 6),
            options={"normalization": "LayerNorm"},
        ),
        "--normalization RMSNorm",
    ),
    "overflows": (RunFacts(reports=reports(skipped_steps=[5, 5, 5])), "--bf16"),
    "experts": (
        RunFacts(reports=reports(expert_imbalance=[3.0] * 9)),
        "--moe-router-load-balancing-type aux_loss",
    ),
    "pipeline bubble": (
        RunFacts(reports=reports(loss=[4.0]), header={"layout": {"pipeline": 8, "data": 4}}),
        "--num-virtual-stages-per-pipeline-rank",
    ),
    "low efficiency": (
        RunFacts(reports=reports(mfu=[0.1, 0.25, 0.25]), header=H200),
        "--overlap-grad-reduce",
    ),
    "slower than planned": (
        RunFacts(reports=reports(step_ms=[9000.0] * 9), header=H200, planned=planned()),
        "",
    ),
}
"""By diagnosis: a run that has it alone, and the option that is named."""


def test_every_rule_has_a_run_that_it_judges():
    assert len(RUNS) == len(RULES)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_judged_by_its_numbers(name):
    run, flag = RUNS[name]
    found = diagnose(run)
    assert [one.name for one in found] == [name]
    assert found[0].flag == flag


def test_a_good_run_has_no_diagnosis():
    series = {"loss": FALLING, "grad_norm": [0.5] * 16, "mfu": [0.45] * 16, "lr": [3e-4] * 16}
    assert diagnose(RunFacts(reports=reports(**series), header=H200)) == []


def test_flags_that_diagnoses_name_exist():
    options = [{}, {"lr_warmup_iters": 9}, {"lr_warmup_iters": 9, "clip_grad": 0.0, "lr": 1.0}]
    options += [{"overlap_grad_reduce": True}, {"moe_aux_loss_coeff": 1e-3}]
    named = set()
    for run, _ in RUNS.values():
        for changed in options:
            facts = RunFacts(reports=run.reports, header=run.header, options=changed)
            named |= {one.flag.split()[0] for one in diagnose(facts) if one.flag}
    assert len(named) > 8
    assert named <= flag_names()


def test_rules_on_memory_and_time_name_the_best_option_with_its_predicted_gain():
    slow = {"mfu": [0.1, 0.25, 0.25]}
    full = "--use-distributed-optimizer --recompute-granularity full"
    (found,) = diagnose(RunFacts(reports=reports(**slow), header=H200, planned=planned(full)))
    assert found.flag == "--recompute-granularity ''"
    gain = r"predicted \+2\d\.\d % tokens/s \(step \S+ s -> \S+ s\), memory \S+ -> \S+ GiB"
    assert re.fullmatch(gain, found.gain)
    pipelined = planned("--pipeline-model-parallel-size 4 --use-distributed-optimizer")
    (found,) = diagnose(RunFacts(reports=reports(loss=[4.0]), planned=pipelined))
    assert found.name == "pipeline bubble"
    assert found.flag.startswith("--pipeline-schedule ")
    assert found.gain.startswith("predicted +")
    run = RunFacts(reports=reports(peak_gib=[135.0]), header=H200, planned=planned())
    (found,) = diagnose(run)
    assert found.flag == "--use-distributed-optimizer"
    assert "memory" in found.gain


def test_an_option_that_saves_too_little_memory_is_passed_over():
    run = planned("--use-distributed-optimizer --micro-batch-size 2")
    little, much = (run.cheapest_saving(gib * 2**30) for gib in (10, 45))
    assert little.saved_bytes > 10 * 2**30
    assert much.saved_bytes > 45 * 2**30
    assert much.faster < little.faster
    assert little.flags != much.flags


def test_a_gain_that_cannot_be_predicted_has_its_reason():
    oscillating, _ = RUNS["oscillating loss"]
    assert "not the loss" in diagnose(oscillating)[0].gain
    unknown = RunFacts(
        reports=reports(mfu=[0.1, 0.2, 0.2]), header=H200, unplanned="the run has no options"
    )
    assert diagnose(unknown)[0].gain == "not predicted: the run has no options"
    with pytest.raises(ValueError, match="no constants of cpu"):
        plan_run({"devices": {"cpu": 2}}, {"num_layers": 2})
    moe = planned("", "--model mixtral-8x7b --num-layers 4")
    run = RunFacts(reports=reports(expert_imbalance=[3.0] * 9), planned=moe)
    assert re.match(r"at most \d+ % tokens/s", diagnose(run)[0].gain)


def test_the_command_reads_a_run_folder(tmp_path):
    words = "--model llama-3-8b --lr 1e-3 --lr-warmup-iters 100 --recompute-granularity full"
    words += " --use-distributed-optimizer --train-iters 200 --mock-data --bf16"
    words += " --seq-length 8192 --global-batch-size 16"
    options = changed_options(parse(words.split()))
    rows = [{"kind": "run", "iteration": 0, **H200, "options": options}]
    rows += reports(loss=[*FALLING, 4.1, 2.6, 3.9, 2.7], mfu=[0.3] * 20)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_command("mcore_train", "doctor", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^a step by the planner, \S+ s: gemm \d+%, ", done.stdout, re.MULTILINE)
    assert "oscillating loss: 2 reports" in done.stdout
    assert "  try --lr 0.0005: half of 0.001\n  gain: not predicted: " in done.stdout
    assert "low efficiency: MFU 30 %\n  try --recompute-granularity ''" in done.stdout
    assert "  gain: predicted +" in done.stdout
    assert run_command("mcore_train", "doctor", str(tmp_path / "none")).returncode == 2


def test_logs_of_a_run_out_of_memory_name_the_cheapest_option(tmp_path):
    (tmp_path / "rank_0.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    (found,) = diagnose(read_run(tmp_path))
    assert (found.name, found.seen) == ("memory", "out of memory")
    assert found.flag.startswith("--recompute-granularity selective --recompute-modules")
    assert found.gain == "not predicted: the run recorded no options"
