"""Jobs for Kubernetes, Ray and SkyPilot: resources, scripts inside them, and submission."""

import ast
import subprocess

import pytest
import yaml
from e2e.fake_schedulers import RUN, fake, launch, on_path

from mcore_train.launching.kubernetes import yaml_text

POD = (
    *("--nodes", 2, "--nproc-per-node", 4, "--container-image", "registry/mcore:1"),
    *("--container-mounts", "data:/data", "--container-workdir", "/opt/mcore"),
)
TRAINING = (*RUN, "--save", "/data/run", "--health-port", 8080)


def resources(folder, *words):
    """Render resources in a folder and read them back."""
    done = launch(*words, "--", *TRAINING, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("launch/*/job.yaml")
    return list(yaml.safe_load_all(file.read_text()))


def is_bash(script):
    done = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    return done.returncode == 0


def test_a_job_set_restarts_all_pods_but_not_after_an_error_of_the_options(tmp_path):
    options = ("--priority-class", "high", "--queue-name", "team", "--max-restarts", 5)
    (job_set,) = resources(tmp_path, "kubernetes", *POD, *options)
    assert job_set["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    policy = job_set["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    assert policy["rules"][0]["action"] == "FailJobSet"
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
    codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert {2, 12} <= set(codes)
    assert not {0, 1, 32} & set(codes)
    pod = job["template"]["spec"]
    assert pod["priorityClassName"] == "high"
    assert pod["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
    ]
    (main,) = pod["containers"]
    assert main["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert main["livenessProbe"]["httpGet"] == {"path": "/health", "port": 8080}
    assert main["startupProbe"]["httpGet"]["port"] == 8080
    script = main["command"][2]
    assert is_bash(script)
    assert "export MASTER_ADDR=mcore-hosts-0-0.mcore" in script
    assert "cd /opt/mcore" in script


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_kubeflows_resources_start_a_pod_a_host(tmp_path, kind):
    found = {
        each["kind"]: each for each in resources(tmp_path, "kubernetes", "--kind", kind, *POD)
    }
    if kind == "trainjob":
        train = found["TrainJob"]["spec"]
        assert train["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]
        assert train["trainer"] == {"numNodes": 2, "numProcPerNode": 4}
        job = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]
        assert job["template"]["metadata"]["labels"]
        pods = [job["template"]["spec"]["template"]["spec"]]
    else:
        replicas = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
        assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 1]
        pods = [each["template"]["spec"] for each in replicas.values()]
    for pod in pods:
        (main,) = pod["containers"]
        assert is_bash(main["command"][2])
        assert main["livenessProbe"]["httpGet"]["path"] == "/health"


def test_a_pod_needs_an_image_and_paths_on_its_volumes(tmp_path):
    done = launch("kubernetes", "--", *TRAINING, cwd=tmp_path)
    assert "--container-image is required" in done.stderr
    lost = launch("kubernetes", *POD, "--", *RUN, "--save", "/elsewhere", cwd=tmp_path)
    assert "--save /elsewhere is in none of --container-mounts (/data)" in lost.stderr


def test_a_pod_starts_in_the_folder_of_its_image_not_in_the_present_one(tmp_path):
    (job_set,) = resources(tmp_path, "kubernetes", *POD[:-2])
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    script = pod["containers"][0]["command"][-1]
    assert "\ncd .\n" in script
    assert str(tmp_path) not in script


def test_files_of_the_volumes_are_left_to_the_pods_and_others_are_checked_here(tmp_path):
    done = launch("kubernetes", *POD, "--", *TRAINING, "--load", "/data/old", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere/t")
    done = launch("kubernetes", *POD, "--", *TRAINING, *files, cwd=tmp_path)
    assert done.returncode == 2
    assert "/nowhere/t" in done.stderr


def test_a_ray_job_runs_the_driver_that_places_a_task_on_each_host(tmp_path):
    config_map, ray_job = resources(tmp_path, "ray", *POD)
    text = config_map["data"]["ray_driver.py"]
    names = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    assert {"run_host", "main"} <= names
    assert '"GPU": 4' in text
    assert "STRICT_SPREAD" in text
    assert ray_job["spec"]["entrypoint"] == "python /etc/mcore/ray_driver.py"
    group = ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert group["replicas"] == 1
    assert "command" not in group["template"]["spec"]["containers"][0]


def test_a_sky_pilot_task_starts_the_script_on_each_host(tmp_path):
    options = ("--nodes", 2, "--accelerators", "H100", "--infra", "slurm/west")
    done = launch("skypilot", *options, "--", *RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    task = yaml.safe_load((tmp_path / "launch/mcore/task.sky.yaml").read_text())
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["infra"] == "slurm/west"
    assert is_bash(task["run"])
    assert "NODE_RANK=$SKYPILOT_NODE_RANK" in task["run"]


def test_programs_of_each_scheduler_are_called_by_a_jobs_id(tmp_path, monkeypatch):
    for name in ("kubectl", "ray", "sky"):
        fake(tmp_path, name, f'echo "{name} $*" >> {tmp_path}/asked; echo Complete')
    monkeypatch.setenv("PATH", on_path(tmp_path)["PATH"])
    done = launch("kubernetes", *POD, "--submit", "--", *TRAINING, cwd=tmp_path)
    assert done.stdout.split()[-1] == "default/jobset/mcore"
    done = launch("ray", "--submit", "--", *RUN, cwd=tmp_path)
    ray_id = done.stdout.split()[-1]
    assert ray_id.startswith("ray/mcore-")
    done = launch("skypilot", "--submit", "--", *RUN, cwd=tmp_path)
    assert done.stdout.split()[-1] == "sky/mcore"
    assert launch("status", "default/jobset/mcore").stdout.strip() == "Complete"
    launch("logs", "default/jobset/mcore")
    launch("cancel", "default/jobset/mcore")
    launch("status", ray_id)
    asked = (tmp_path / "asked").read_text()
    for line in (
        "kubectl --namespace default apply -f launch/mcore/job.yaml",
        "kubectl --namespace default logs --selector jobset.sigs.k8s.io/jobset-name=mcore",
        "kubectl --namespace default delete jobset/mcore",
        "ray job submit --no-wait --submission-id mcore-",
        "ray job status mcore-",
        "sky jobs launch --yes --detach-run --name mcore launch/mcore/task.sky.yaml",
    ):
        assert line in asked


def test_yaml_keeps_what_tables_hold():
    table = {
        "text": "a: 'b' \"c\" #d",
        "script": "if x; then\n    y\n\n  z\nfi\n",
        "no end": "a\nb",
        "numbers": [1, 2.5, True],
        "nested": [{"a": {"b": [{"c": "d", "e": []}]}, "f": {}}, ["x", "y"]],
        "version": "1.0",
    }
    assert list(yaml.safe_load_all(yaml_text([table, {"a": 1}]))) == [table, {"a": 1}]
