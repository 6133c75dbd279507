"""Checks folders of rendered jobs: `nox -s manifests` runs it in an environment of its own.

Pods and jobs are held to the schemas of Kubernetes, JobSets and TrainJobs to Kubeflow's models,
and every bash script, those within resources too, to shellcheck.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

KUBERNETES = "1.34"
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def core_resources(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pods and jobs of a resource, as resources of their own."""
    spec = document.get("spec", {})
    if document["kind"] == "ConfigMap":
        yield document
    job_set = spec.get("template", {}).get("spec", spec)
    for job in job_set.get("replicatedJobs", ()):
        yield {"apiVersion": "batch/v1", "kind": "Job", "spec": job["template"]["spec"]}
    groups = list(spec.get("pytorchReplicaSpecs", {}).values())
    if cluster := spec.get("rayClusterSpec"):
        groups += [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        yield {"apiVersion": "v1", "kind": "Pod", "spec": group["template"]["spec"]}


def scripts(value: Any) -> Iterator[str]:
    """Yield the bash scripts within a resource."""
    if isinstance(value, dict):
        for each in value.values():
            yield from scripts(each)
    elif isinstance(value, list):
        for each in value:
            yield from scripts(each)
    elif isinstance(value, str) and value.startswith("set -euo pipefail"):
        yield value


def check_script(text: str) -> None:
    """Run shellcheck over a script."""
    shebang = "" if text.startswith("#!") else "#!/usr/bin/env bash\n"
    # SC2016: the inner shell expands what is quoted. SC2013: /proc's list of children is words
    # in one line. SC2329: a trap calls the function.
    command = ["shellcheck", "--exclude=SC2013,SC2016,SC2329", "-"]
    subprocess.run(command, input=shebang + text, text=True, check=True)


def main(folder: Path) -> None:
    """Check all rendered jobs below a folder."""
    num_resources = num_scripts = 0
    for file in sorted(folder.rglob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            if model := MODELS.get(document.get("kind", "")):
                model.from_dict(document)
            for resource in core_resources(document) if "kind" in document else ():
                named = {"metadata": {"name": "x"}, **resource}
                kubernetes_validate.validate(named, KUBERNETES, strict=True)
                num_resources += 1
            for text in scripts(document):
                check_script(text)
                num_scripts += 1
    for file in folder.rglob("job.sbatch"):
        check_script(file.read_text())
        num_scripts += 1
    assert num_resources >= 7, num_resources
    assert num_scripts >= 7, num_scripts
    print(f"{num_resources} resources and {num_scripts} scripts are well")


main(Path(sys.argv[1]))
