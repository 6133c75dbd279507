"""Renders a job for Ray, as a driver or RayJob, and for SkyPilot, as a task.

Ray cannot start one process on each host by itself, so a rendered driver places one task on
each host and runs the attempts. The driver imports ray; this package does not.
"""

import shlex

from mcore_train.launching.config import (
    ContainerConfig,
    KubernetesConfig,
    RayConfig,
    SkyPilotConfig,
)
from mcore_train.launching.job import Job, host_script, next_command
from mcore_train.launching.kubernetes import Resource, host_pod

DRIVER = "ray_driver.py"
TASK = "task.sky.yaml"
_DRIVER_FOLDER = "/etc/mcore"


def driver(job: Job) -> str:
    """Render the Python program that runs a job's attempts on a Ray cluster."""
    config = job.config
    gpus = config.nproc_per_node if job.uses_gpus else 0
    return f'''"""Runs {config.job_name} on {config.nodes} hosts of a Ray cluster.

Rendered by mcore-train launch ray. Exits with 0 when all steps are done.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NUM_HOSTS = {config.nodes}
FIRST_PORT = {config.master_port}
LOGS = Path({job.log_dir!r}) / {config.job_name!r}
HOST_SCRIPT = {host_script(job)!r}
NEXT = {next_command(job)!r}


def run_host(environment):
    """Run the host script on the host of this task; return its exit code."""
    full = {{**os.environ, **environment}}
    return subprocess.run(["bash", "-c", HOST_SCRIPT], env=full, check=False).returncode


def main():
    """Run attempts, each with one task per host, until the job is finished or must stop."""
    ray.init()
    bundle = {{"CPU": 1, "GPU": {gpus}}} if {gpus} else {{"CPU": 1}}
    group = placement_group([bundle] * NUM_HOSTS, strategy={_strategy(config.nodes)!r})
    ray.get(group.ready())

    def on_host(function, rank):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        remote = ray.remote(function).options(
            num_cpus=1, num_gpus={gpus}, max_retries=0, scheduling_strategy=strategy
        )
        return remote.remote

    address = ray.get(on_host(ray.util.get_node_ip_address, 0)())
    attempt = 0
    while True:
        while (LOGS / f"attempt-{{attempt}}").exists():
            attempt += 1
        logs = LOGS / f"attempt-{{attempt}}"
        logs.mkdir(parents=True)
        environment = {{
            "MASTER_ADDR": address,
            "MASTER_PORT": str(FIRST_PORT + attempt % 100),
            "NNODES": str(NUM_HOSTS),
            "MCORE_LOGS": str(logs),
        }}
        hosts = [
            on_host(run_host, rank)({{**environment, "NODE_RANK": str(rank)}})
            for rank in range(NUM_HOSTS)
        ]
        try:
            status = max(ray.get(hosts))
        except ray.exceptions.RayError as lost:
            print(lost, file=sys.stderr)
            status = 1
        shell = {{**os.environ, "MCORE_LOGS": str(logs), "status": str(status)}}
        command = "cd {shlex.quote(job.workdir)} && " + NEXT
        answer = subprocess.run(
            ["bash", "-c", command], env=shell, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        word, number = answer.split()
        print(f"attempt {{attempt}} ended with {{status}}: {{word}} {{number}}")
        if word == "finished":
            return 0
        if word == "stop":
            return int(number)
        if word == "requeue":  # stopped by a signal; Ray has no queue
            return 75
        time.sleep(float(number))


if __name__ == "__main__":
    sys.exit(main())
'''


def _strategy(nodes: int) -> str:
    return "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"


def ray_job(
    job: Job, ray: RayConfig, kubernetes: KubernetesConfig, container: ContainerConfig
) -> list[Resource]:
    """Return a ConfigMap with the driver, and a RayJob whose head pod runs the driver.

    Args:
        job: job to start.
        ray: version of Ray.
        kubernetes: options of the pods.
        container: container whose image has ray and mcore-train.
    """
    config = job.config
    shared = host_pod(job, kubernetes, container, "ray", command=())
    host = shared["containers"][0]
    # The probes of the health endpoint would fail before ranks start; Ray has its own.
    for name in ("livenessProbe", "startupProbe"):
        host.pop(name, None)
    volumes = [*shared["volumes"], {"name": "driver", "configMap": {"name": config.job_name}}]
    mounts = [*host["volumeMounts"], {"name": "driver", "mountPath": _DRIVER_FOLDER}]
    head = {**host, "name": "ray-head", "volumeMounts": mounts}
    worker = {**host, "name": "ray-worker"}
    pod = {k: v for k, v in shared.items() if k not in ("containers", "restartPolicy")}
    group = {
        "groupName": "hosts",
        "replicas": config.nodes - 1,
        "minReplicas": config.nodes - 1,
        "maxReplicas": config.nodes - 1,
        "rayStartParams": {},
        "template": {"spec": {**pod, "containers": [worker]}},
    }
    metadata = {"name": config.job_name, "namespace": kubernetes.namespace}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {DRIVER: driver(job)},
        },
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": metadata,
            "spec": {
                "entrypoint": f"python {_DRIVER_FOLDER}/{DRIVER}",
                "backoffLimit": job.restarts.max_restarts,
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": {
                    "rayVersion": ray.ray_version,
                    "headGroupSpec": {
                        "rayStartParams": {"dashboard-host": "0.0.0.0"},
                        "template": {"spec": {**pod, "containers": [head], "volumes": volumes}},
                    },
                    "workerGroupSpecs": [group] if config.nodes > 1 else [],
                },
            },
        },
    ]


def sky_task(job: Job, sky: SkyPilotConfig, container: ContainerConfig) -> Resource:
    """Return a SkyPilot task that starts the host script on each host."""
    config = job.config
    resources: Resource = {
        "job_recovery": {"max_restarts_on_errors": job.restarts.max_restarts},
    }
    if sky.accelerators:
        resources["accelerators"] = f"{sky.accelerators}:{config.nproc_per_node}"
    if sky.infra:
        resources["infra"] = sky.infra
    if container.container_image:
        resources["image_id"] = f"docker:{container.container_image}"
    preamble = [
        'MASTER_ADDR=$(sed -n 1p <<< "$SKYPILOT_NODE_IPS")',
        f"export MASTER_ADDR MASTER_PORT={config.master_port}",
        "export NNODES=$SKYPILOT_NUM_NODES NODE_RANK=$SKYPILOT_NODE_RANK",
        f"export MCORE_LOGS={shlex.quote(job.log_dir)}/$SKYPILOT_TASK_ID/attempt-0",
    ]
    return {
        "name": config.job_name,
        "num_nodes": config.nodes,
        "resources": resources,
        "setup": sky.setup,
        "run": host_script(job, preamble, retry_code=1),
    }
