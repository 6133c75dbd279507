"""Golden runs: recipes are expanded, cases trained, their values compared and recorded."""

import json
import shutil
from pathlib import Path

import pytest
from warm_ranks import run_command

from mcore_train.golden.cases import RECORDED, expand_recipe, read_case, read_jobs
from mcore_train.golden.values import compare, read_golden, record

COMMON = """
COMMAND: gpt
MODEL_ARGS: {--num-layers: 1, --hidden-size: 32, --num-attention-heads: 4, --seq-length: 16,
  --mock-data: true, --mock-vocab-size: 64, --global-batch-size: 2, --lr: 0.01,
  --num-workers: 0}
METRICS: {loss: exact, grad_norm: exact, checkpoint: exact}
LANES: {cpu: {MODEL_ARGS: {--device: cpu}}, h100: {MODEL_ARGS: {--hidden-size: 256}}}
"""
RECIPE = """
type: basic
format_version: 1
maintainers: [mcore]
loggers: [stdout]
spec: {name: "{model}_{test_case}", model: gpt, build: mcore, nodes: 1, gpus: 1, n_repeat: 1,
  platforms: cpu, time_limit: 60, script: "run {model}/{test_case} {scope}"}
products:
  - test_case: [one, resumed]
    products:
      - environment: [dev, lts]
        scope: [mr-github]
      - scope: [mr-github-slim, nightly-broken]
  - test_case: [two]
    gpus: 2
    scope: mr-github
"""
KEY = "torch 2.11.0, cpu Maker AVX512, float32"


@pytest.fixture
def root(tmp_path):
    """A folder with three cases of one layer and a recipe."""
    for name, text in {
        "test_cases/model_config.yaml": COMMON,
        "test_cases/gpt/one/model_config.yaml": "# The simplest case.\n",
        "test_cases/gpt/resumed/model_config.yaml": "TEST_TYPE: ckpt-resume\n",
        "test_cases/gpt/two/model_config.yaml": "MODEL_ARGS: {--tensor-model-parallel-size: 2}",
        "recipes/cpu/gpt.yaml": RECIPE,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def golden(root, verb, *words):
    done = run_command("mcore_train", "golden", verb, *words, "--root", root, cwd=root)
    return done.returncode, done.stdout + done.stderr


def result(loss=4.0, key=KEY, step_ms=10.0):
    values = {
        "loss": {str(step): loss for step in RECORDED},
        "grad_norm": {str(step): 1.0 for step in RECORDED},
        "checkpoint": {"100": "abc"},
        "step_ms": {"100": step_ms},
    }
    return {"key": key, "values": values}


def test_products_are_expanded_to_a_job_for_every_combination(root):
    jobs = read_jobs(root, "cpu")
    found = [(job.test_case, job.environment, job.scope, job.gpus) for job in jobs]
    assert found == [
        ("one", "dev", "mr-github", 1),
        ("one", "lts", "mr-github", 1),
        ("one", "dev", "mr-github-slim", 1),
        ("one", "dev", "nightly-broken", 1),
        ("resumed", "dev", "mr-github", 1),
        ("resumed", "lts", "mr-github", 1),
        ("resumed", "dev", "mr-github-slim", 1),
        ("resumed", "dev", "nightly-broken", 1),
        ("two", "dev", "mr-github", 2),
    ]
    assert jobs[0].script == "run gpt/one mr-github"
    assert jobs[0].name == "gpt_one"
    assert (jobs[0].maintainers, jobs[0].time_limit) == (("mcore",), 60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version 1 are required"),
        ({"products": [{"test_case": "one", "gpu": 2}]}, "unknown key gpu of a job"),
    ],
)
def test_a_recipe_that_is_not_understood_is_refused(change, message):
    recipe = {"type": "basic", "format_version": 1, "spec": {"name": "x", "model": "gpt"}}
    with pytest.raises(ValueError, match=message):
        expand_recipe(recipe | {"products": []} | change, Path("gpt.yaml"))


def test_a_case_adds_to_the_files_above_it_and_a_lane_to_both(root):
    case = read_case(root, "gpt/two", "h100")
    text = " ".join(case.words)
    assert text.startswith("--num-layers 1 --hidden-size 256 ")
    assert "--mock-data --mock-vocab-size 64" in text
    assert text.endswith("--tensor-model-parallel-size 2")
    assert "--device" not in text
    (root / "test_cases/gpt/two/model_config.yaml").write_text("METRICS: {loss: roughly}")
    with pytest.raises(ValueError, match="METRICS loss: roughly must be one of"):
        read_case(root, "gpt/two", "cpu")


def test_a_case_with_values_that_no_recipe_runs_any_more_is_a_fault(root):
    """And so is a recipe whose case is gone."""
    (root / "test_cases/gpt/two/golden_values_cpu.json").write_text("{}")
    (root / "recipes/cpu/gpt.yaml").write_text(RECIPE.replace("[two]", "[three]"))
    with pytest.raises(ValueError, match="no case gpt/three") as caught:
        read_jobs(root, "cpu")
    assert "gpt/two has golden_values_cpu.json, and no recipe" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="--lane gb200 has no recipes"):
        read_jobs(root, "gb200")


def test_exact_values_are_compared_to_the_last_bit_and_over_repetitions(root):
    case = read_case(root, "gpt/one", "cpu")
    record(case, "cpu", [result()], "first")
    assert compare(case, "cpu", [result()]).faults == []
    close = compare(case, "cpu", [result(4.0 + 1e-15)])
    assert close.faults == [
        "loss of step 1: 4.000000000000001 where 4.0 is recorded",
        f"loss of {len(RECORDED) - 1} later steps as well",
    ]
    assert compare(case, "cpu", [result(), result(5.0)]).faults == [
        "loss differs between repetitions"
    ]


def test_another_machine_is_held_to_a_tolerance_and_another_dtype_has_no_values(root):
    case = read_case(root, "gpt/one", "cpu")
    record(case, "cpu", [result()], "first")
    other = "torch 2.12.0, cpu Other AVX2, float32"
    near = compare(case, "cpu", [result(4.0003, other)])
    assert (near.faults, near.notes) == ([], [f"no values for {other}; compared with {KEY}"])
    for loss in (4.0005, float("nan")):
        assert "further than 0.0001" in compare(case, "cpu", [result(loss, other)]).faults[0]
    bf16 = compare(case, "cpu", [result(4.0, "torch 2.11.0, cpu Maker AVX512, bfloat16")])
    assert "no values are recorded for torch 2.11.0" in bf16.faults[0]


def test_a_time_is_a_fault_when_its_mean_grows_beyond_its_scatter(root):
    config = root / "test_cases/gpt/one/model_config.yaml"
    config.write_text("METRICS: {loss: approximate, step_ms: statistical}")
    case = read_case(root, "gpt/one", "cpu")
    record(case, "cpu", [result(step_ms=ms) for ms in (9.0, 10.0, 11.0)], "first")
    kept = read_golden(case.golden_file("cpu"))[KEY]["values"]["step_ms"]
    assert kept == {"100": [9.0, 10.0, 11.0]}

    def faults(*times):
        return compare(case, "cpu", [result(step_ms=ms) for ms in times]).faults

    assert faults(9.5, 10.5) == faults(5.0) == faults(13.0) == []
    assert faults(14.0, 14.0, 14.0) == ["step_ms of step 100: mean 14 is above 13.3094"]


def test_a_step_or_a_case_that_is_missing_is_a_fault(root, tmp_path):
    case = read_case(root, "gpt/one", "cpu")
    record(case, "cpu", [result()], "first")
    short = result()
    del short["values"]["loss"]["50"]
    assert compare(case, "cpu", [short]).faults == ["loss of step 50 is missing"]
    run = {"lane": "cpu", "tier": "golden", "cases": ["gpt/one", "gpt/two"]}
    (tmp_path / "out/gpt/one").mkdir(parents=True)
    (tmp_path / "out/run.json").write_text(json.dumps(run))
    (tmp_path / "out/gpt/one/results.json").write_text(json.dumps({"results": [result()]}))
    code, text = golden(root, "compare", "out")
    assert code == 1
    assert "ok    gpt/one" in text
    assert "FAULT gpt/two\n      it did not run: no out/gpt/two/results.json" in text
    assert "1 of 2 cases agree" in text


def test_cases_are_run_recorded_with_a_reason_and_compared(root):
    """A run that is stopped and continued has the values of a whole one."""
    code, text = golden(root, "run", "--output", "new", "--case", "gpt/one", "gpt/resumed")
    assert code == 1
    assert "FAULT gpt/one" in text
    assert "no values are recorded for torch" in text
    code, text = golden(root, "update", "new")
    assert code == 2
    assert "gpt/one new for torch" in text
    assert "2 cases moved: give --reason" in text
    code, text = golden(root, "update", "new", "--reason", "first values")
    assert (code, text.splitlines()[-1]) == (0, "2 of 2 cases recorded")
    assert golden(root, "compare", "new")[0] == 0
    file = root / "test_cases/gpt/one/golden_values_cpu.json"
    (whole,) = read_golden(file).values()
    (resumed,) = read_golden(root / "test_cases/gpt/resumed" / file.name).values()
    assert whole == resumed
    assert whole["reason"] == "first values"
    assert tuple(map(int, whole["values"]["loss"])) == RECORDED
    second = root / "new/gpt/resumed/1/logs/2/rank-0.log"
    assert "continuing at iteration 50" in second.read_text()
    # The smoke tier is held to the same first steps.
    assert golden(root, "run", "--tier", "smoke", "--case", "gpt/one")[0] == 0
    file.write_text(file.read_text().replace('"3": ', '"3": 1'))
    code, text = golden(root, "run", "--tier", "smoke", "--case", "gpt/one")
    assert code == 1
    assert "loss of step 3: " in text
    code, text = golden(root, "update", "golden-runs", "--reason", "x")
    assert "is a run of the tier smoke: only runs of 100 steps" in text


def test_each_rank_has_a_log_and_one_process_compares(root):
    code, text = golden(root, "run", "--tier", "smoke", "--case", "gpt/two")
    assert code == 1
    assert text.count("no values are recorded for torch") == 1
    logs = sorted((root / "golden-runs/gpt/two/1/logs/1").iterdir())
    assert [path.name for path in logs] == ["rank-0.log", "rank-1.log"]
    assert "layout: 2 ranks: tensor 2" in logs[0].read_text()


def test_a_case_that_fails_names_its_log_and_one_that_hangs_is_ended(root):
    two = root / "test_cases/gpt/two/model_config.yaml"
    two.write_text("MODEL_ARGS: {--tensor-model-parallel-size: 3}")
    shutil.rmtree(root / "test_cases/gpt/resumed")
    recipe = RECIPE.replace("[one, resumed]", "[one]")
    (root / "recipes/cpu/gpt.yaml").write_text(recipe.replace("_limit: 60", "_limit: 0.01"))
    code, text = golden(root, "run", "--tier", "smoke", "--output", "new")
    assert code == 1
    assert "not done after 0.01 s, see new/gpt/one/1/logs/1" in text
    (root / "recipes/cpu/gpt.yaml").write_text(recipe)
    code, text = golden(root, "run", "--tier", "smoke", "--output", "new", "--case", "gpt/two")
    assert "--tensor-model-parallel-size 3" in text
    assert "see new/gpt/two/1/logs/1" in text
    code, text = golden(root, "run", "--case", "nonesuch")
    assert (code, "no job to run with --scope mr-github" in text) == (2, True)


def test_the_jobs_of_a_lane_are_listed_for_schedulers(root):
    code, text = golden(root, "list")
    assert code == 0
    assert "gpt/two mr-github 2 ranks: run gpt/two mr-github" in text
    jobs = json.loads(golden(root, "list", "--as-json")[1])
    assert [job["test_case"] for job in jobs].count("two") == 1
