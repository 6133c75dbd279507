"""The repository's golden cases: what they cover, and that a few of them still agree."""

import shlex
import shutil

import pytest
from docs.blocks import blocks_of
from docs.test_documents import steps
from house.sources import ROOT
from warm_ranks import run_command

from mcore_train.golden.cases import RECORDED, TIERS, read_case, read_jobs
from mcore_train.golden.values import read_golden

HERE = ROOT / "tests/functional_tests"
CHEAP = ("gpt/fp32", "moe/bf16", "mamba/hybrid", "bert/fp32")
FOLDERS = sorted((HERE / "test_cases").glob("*/*/model_config.yaml"))
NAMES = [f"{path.parent.parent.name}/{path.parent.name}" for path in FOLDERS]


def test_there_are_cases_of_every_family_axis_and_precision():
    text = {name: " ".join(read_case(HERE, name, "cpu").words) for name in NAMES}
    commands = {read_case(HERE, name, "cpu").command for name in NAMES}
    assert len(NAMES) >= 60
    assert commands == {"gpt", "mamba", "bert", "t5"}
    for words in (
        *("--tensor-model-parallel-size 2", "--sequence-parallel", "--num-experts"),
        *("--pipeline-model-parallel-size 4", "--num-virtual-stages-per-pipeline-rank 2"),
        *("--pipeline-schedule zb-h1", "--pipeline-schedule zb-v"),
        *("--pipeline-schedule dualpipev", "--cp-comm-type p2p", "--cp-comm-type a2a"),
        *("--cp-comm-type all_gather", "--expert-model-parallel-size 2"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--use-torch-fsdp2"),
        *("sharding-strategy optim_grads ", "sharding-strategy optim_grads_params"),
        *("--bf16", "--fp16", "--fp8-recipe tensorwise", "--fp8-recipe delayed"),
        *("--fp8-recipe blockwise", "--multi-latent-attention", "--peft lora"),
    ):
        assert [name for name, options in text.items() if words in f"{options} "], words


def test_every_case_is_run_on_cpus_and_has_values_of_all_recorded_steps():
    assert {job.case_name for job in read_jobs(HERE, "cpu")} == set(NAMES)
    for name in NAMES:
        values = read_golden(read_case(HERE, name, "cpu").golden_file("cpu"))
        for key, entry in values.items():
            assert key.startswith("torch ")
            assert entry["reason"]
            for metric in ("loss", "grad_norm"):
                assert tuple(map(int, entry["values"][metric])) == RECORDED, name


@pytest.mark.parametrize("lane", ["cpu", "h100"])
def test_every_job_of_a_recipe_can_be_read_and_each_tier_has_some(lane):
    jobs = read_jobs(HERE, lane)
    for job in jobs:
        case = read_case(HERE, job.case_name, lane)
        assert case.metrics, job.case_name
        assert job.platforms == lane
        assert job.gpus == 1 or lane == "cpu"
    for tier in TIERS.values():
        assert [job for job in jobs if job.scope == tier.scope]


def test_resuming_and_layouts_give_the_values_of_one_rank():
    """The same numbers, recorded by other cases."""

    def losses(name):
        golden = read_golden(read_case(HERE, name, "cpu").golden_file("cpu"))
        return next(entry["values"]["loss"] for entry in golden.values())

    one = losses("gpt/fp32")
    assert losses("gpt/fp32_resume") == one
    for name in ("gpt/tp2", "gpt/cp2_ring", "gpt/cp2_a2a", "gpt/tp2_cp2", "gpt/dp2"):
        assert losses(name) == pytest.approx(one, rel=1e-4), name
    assert losses("moe/ep2") == pytest.approx(losses("moe/ep2_allgather"), rel=1e-4)


def test_the_first_steps_of_some_cases_are_those_that_were_recorded(tmp_path):
    """``nox -s golden`` runs all cases, for a hundred steps."""
    words = ("--tier", "smoke", "--output", tmp_path, "--case", *CHEAP)
    done = run_command("mcore_train", "golden", "run", *words, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CHEAP)} of {len(CHEAP)} cases agree" in done.stdout


@pytest.mark.parity_long
def test_the_commands_of_the_page_run(tmp_path):
    """In a copy of the cases, whose values are those of this machine or near them."""
    shutil.copytree(HERE, tmp_path / "tests/functional_tests")
    page = (ROOT / "docs/golden-runs.md").read_text()
    blocks = [block for block in blocks_of(page, "golden-runs") if block.run_by]
    commands = [step for block in blocks for step in steps(block.code)]
    assert len(commands) == 6
    for words in commands:
        done = run_command("mcore_train", *words[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    assert "of 1 cases recorded" in done.stdout
