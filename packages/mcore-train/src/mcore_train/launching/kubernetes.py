"""Renders a job for Kubernetes: a JobSet, a TrainJob with its runtime, or a PyTorchJob.

Resources are dicts, which ``yaml_text`` writes for ``kubectl apply``; no client library is
needed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_train.diagnosis.rules import FAULTS
from mcore_train.launching.config import ContainerConfig, JobConfig, KubernetesConfig
from mcore_train.launching.job import Job, host_script

FILE = "job.yaml"
PREFLIGHT_CODE = 2
"""Exit code of the host script if the comparison of the hosts fails."""
_RESTART_LABEL = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"

Resource = dict[str, Any]


def check(container: ContainerConfig) -> None:
    """Check that a pod can be started from the container's image.

    Raises:
        ValueError: if the image is missing or a local file.
    """
    image = container.container_image
    if not image:
        raise ValueError("--container-image is required on Kubernetes: name an image.")
    if image.startswith(("/", ".")):
        raise ValueError(
            f"--container-image {image} is a file: give the name of an image in a registry."
        )


def render(
    job: Job, kubernetes: KubernetesConfig, container: ContainerConfig
) -> list[Resource]:
    """Return the resources of a job, in the order in which they are applied."""
    build = {"jobset": _job_set, "trainjob": _train_job, "pytorchjob": _pytorch_job}
    return build[kubernetes.kind](job, kubernetes, container)


def _job_set(
    job: Job, kubernetes: KubernetesConfig, container: ContainerConfig
) -> list[Resource]:
    name = job.config.job_name
    # Host names that JobSet gives to pods: JOBSET-REPLICATED_JOB-JOB-POD.SUBDOMAIN.
    preamble = [
        f"export MASTER_ADDR={name}-hosts-0-0.{name}",
        "export NODE_RANK=$JOB_COMPLETION_INDEX",
    ]
    spec = _job_set_spec(job, kubernetes, container, preamble, "hosts")
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job.config, kubernetes),
            "spec": spec,
        }
    ]


def _train_job(
    job: Job, kubernetes: KubernetesConfig, container: ContainerConfig
) -> list[Resource]:
    """Return a TrainingRuntime and its TrainJob; the runtime holds what a TrainJob cannot."""
    config = job.config
    preamble = [
        "export MASTER_ADDR=$PET_MASTER_ADDR",
        "export NODE_RANK=$PET_NODE_RANK",
        "unset PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT",
    ]
    spec = _job_set_spec(job, kubernetes, container, preamble, "node")
    spec.pop("network")
    template = spec["replicatedJobs"][0]["template"]
    # With this label the controller sets the TrainJob's numbers on this replicated job.
    template["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    template["spec"].pop("parallelism")
    template["spec"].pop("completions")
    metadata = _metadata(config, kubernetes)
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": config.job_name, "namespace": kubernetes.namespace},
        "spec": {
            "mlPolicy": {"numNodes": config.nodes, "torch": {}},
            "template": {"spec": spec},
        },
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": config.job_name,
            },
            "trainer": {"numNodes": config.nodes, "numProcPerNode": config.nproc_per_node},
        },
    }
    return [runtime, train_job]


def _pytorch_job(
    job: Job, kubernetes: KubernetesConfig, container: ContainerConfig
) -> list[Resource]:
    config = job.config
    # The operator's RANK and WORLD_SIZE count pods; torchrun sets them for ranks.
    preamble = ["export NODE_RANK=$RANK", "export ATTEMPT=0", "unset RANK WORLD_SIZE"]
    # The operator restarts a pod whose exit code is 128 or above.
    command = _pod_command(job, preamble, retry_code=200)
    pod = host_pod(job, kubernetes, container, "pytorch", command)
    pod.pop("restartPolicy")
    replicas = {
        "Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": {"spec": pod}},
    }
    if config.nodes > 1:
        replicas["Worker"] = {**replicas["Master"], "replicas": config.nodes - 1}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": _metadata(config, kubernetes),
            "spec": {
                "runPolicy": {
                    "backoffLimit": job.restarts.max_restarts,
                    "cleanPodPolicy": "Running",
                },
                "pytorchReplicaSpecs": replicas,
            },
        }
    ]


def _metadata(config: JobConfig, kubernetes: KubernetesConfig) -> Resource:
    metadata: Resource = {"name": config.job_name, "namespace": kubernetes.namespace}
    if kubernetes.queue_name:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": kubernetes.queue_name}
    return metadata


def _job_set_spec(
    job: Job,
    kubernetes: KubernetesConfig,
    container: ContainerConfig,
    preamble: Sequence[str],
    container_name: str,
) -> Resource:
    """Return a spec with one pod per host; all pods are restarted together."""
    nodes = job.config.nodes
    command = _pod_command(job, preamble, retry_code=1)
    pod = host_pod(job, kubernetes, container, container_name, command)
    pod["containers"][0]["env"].append(
        {"name": "ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": _RESTART_LABEL}}}
    )
    return {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {
            "maxRestarts": job.restarts.max_restarts,
            "rules": [
                {
                    "name": "options-or-data-must-change",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": container_name,
                "replicas": 1,
                "template": {
                    "spec": {
                        "parallelism": nodes,
                        "completions": nodes,
                        "completionMode": "Indexed",
                        "backoffLimit": 0,
                        "podFailurePolicy": {
                            "rules": [
                                {
                                    "action": "FailJob",
                                    "onExitCodes": {
                                        "containerName": container_name,
                                        "operator": "In",
                                        "values": _codes_to_stop(),
                                    },
                                }
                            ]
                        },
                        "template": {"spec": pod},
                    }
                },
            }
        ],
    }


def _codes_to_stop() -> list[int]:
    """Return the exit codes of the host script that must not be followed by a restart."""
    return [
        PREFLIGHT_CODE,
        *sorted({f.exit_code for f in FAULTS.values() if not f.retry} - {0}),
    ]


def _pod_command(job: Job, preamble: Sequence[str], retry_code: int) -> list[str]:
    config = job.config
    script = host_script(
        job,
        [
            *preamble,
            f"export NNODES={config.nodes}",
            f"export MASTER_PORT={config.master_port}",
            f"export MCORE_LOGS={job.log_dir}/{config.job_name}/attempt-${{ATTEMPT:-0}}",
        ],
        retry_code=retry_code,
    )
    return ["bash", "-c", script]


def host_pod(
    job: Job,
    kubernetes: KubernetesConfig,
    container: ContainerConfig,
    container_name: str,
    command: Sequence[str],
) -> Resource:
    """Return the pod of one host: its command, volumes, shared memory, GPUs and probes."""
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Resource] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shm_size}}
    ]
    for mount in container.container_mounts:
        claim, _, target = mount.partition(":")
        mounts.append({"name": claim, "mountPath": target})
        if claim not in [volume["name"] for volume in volumes]:
            volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    main: Resource = {
        "name": container_name,
        "image": container.container_image,
        "env": [],
        "volumeMounts": mounts,
    }
    if command:
        main["command"] = list(command)
    if container.container_workdir:
        main["workingDir"] = container.container_workdir
    if job.uses_gpus:
        main["resources"] = {"limits": {kubernetes.gpu_resource: job.config.nproc_per_node}}
    main |= probes(job.health_port)
    pod: Resource = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": kubernetes.termination_grace_s,
        "containers": [main],
        "volumes": volumes,
    }
    if kubernetes.priority_class:
        pod["priorityClassName"] = kubernetes.priority_class
    return pod


def probes(port: int) -> Resource:
    """Return the probes of the health endpoint, which the first rank of each host serves.

    The endpoint answers as soon as the rank has read its options. The startup probe waits an
    hour for this, since images and packages are loaded first. The endpoint reports 503 if no
    step ended for too long; after three minutes of 503 the pod is ended, and the failure policy
    applies.
    """
    if not port:
        return {}
    get = {"httpGet": {"path": "/health", "port": port}}
    return {
        "ports": [{"name": "health", "containerPort": port}],
        "startupProbe": {**get, "periodSeconds": 10, "failureThreshold": 360},
        "livenessProbe": {
            **get,
            "periodSeconds": 60,
            "timeoutSeconds": 10,
            "failureThreshold": 3,
        },
    }


def yaml_text(resources: Sequence[Mapping[str, Any]]) -> str:
    """Return dicts as YAML documents; strings of several lines are literal blocks."""
    return "---\n".join(_mapping(resource, 0) for resource in resources)


def _mapping(table: Mapping[str, Any], indent: int) -> str:
    return "".join(
        f"{' ' * indent}{name}:{_value(value, indent)}" for name, value in table.items()
    )


def _value(value: Any, indent: int) -> str:
    """Return the YAML text of a value, after its key or dash."""
    blank = " " * (indent + 2)
    if isinstance(value, Mapping) and value:
        return "\n" + _mapping(value, indent + 2)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        items = []
        for item in value:
            text = _value(item, indent + 2)
            if isinstance(item, Mapping) and item:
                text = " " + _mapping(item, indent + 4).lstrip(" ")
            items.append(f"{blank}-{text}")
        return "\n" + "".join(items)
    if isinstance(value, str) and "\n" in value:
        keep = "|" if value.endswith("\n") else "|-"
        lines = value.rstrip("\n").split("\n")
        return f" {keep}\n" + "".join(f"{blank}{line}\n" if line else "\n" for line in lines)
    return f" {json.dumps(value)}\n"
