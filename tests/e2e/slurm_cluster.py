"""A real Slurm of two nodes on this machine, over loopback, while a context lasts.

Needs root, munge and Debian's slurmctld, slurmd and slurm-client. Nodes n1 and n2 are two
slurmd with 1 core each; accounting is off, so there is no sacct.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_parallel.launch.launcher import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
HOSTS = Path("/etc/hosts")
CONFIG = """ClusterName=mcore
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=8
KillWait=5
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Daemons of a running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str) -> str:
        """Run one of Slurm's programs; return what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def start_daemon(self, node: str) -> None:
        """Start the daemon of a node."""
        self.run("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def lose_host(self, node: str) -> None:
        """End the daemon of a node and everything that the node runs by SIGKILL."""
        file = self.folder / f"slurmd.{node}.pid"
        os.kill(int(file.read_text()), signal.SIGKILL)
        file.unlink()
        mark = f"SLURMD_NODENAME={node}".encode()
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdecimal() and mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def state(self, job: str) -> str:
        """Return a job's state, also of one that has left the queue."""
        fields = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(f.split("=")[1] for f in fields if f.startswith("JobState="))

    def wait(self, wanted: str, seconds: float, job: str = "") -> None:
        """Wait for a job's state, or for both nodes to be in a state."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.state(job) if job else self.run("sinfo", "-h", "-N", "-o", "%t")
            if set(found.split()) == {wanted}:
                return
            assert time.monotonic() < deadline, f"{job or 'nodes'}: {found}, not {wanted}"
            time.sleep(0.2)


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """Start a cluster of the nodes n1 and n2; end its daemons and what they run."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=_path())]
    assert not missing, (
        f"{missing} are not installed: apt-get install --no-install-recommends slurmctld "
        "slurmd slurm-client munge"
    )
    os.environ["PATH"] = _path()
    before = HOSTS.read_text()
    if "n1 n2" not in before:
        HOSTS.write_text(f"{before}127.0.0.1 n1 n2\n")
    (folder / "state").mkdir(parents=True)
    ports = [free_port() for _ in range(3)]
    host = socket.gethostname().partition(".")[0]
    text = CONFIG.format(folder=folder, host=host, ports=ports)
    (folder / "slurm.conf").write_text(text)
    _start_munge()
    cluster = Cluster(folder)
    try:
        cluster.run("slurmctld", "-f", str(folder / "slurm.conf"))
        time.sleep(1)
        for node in ("n1", "n2"):
            cluster.start_daemon(node)
        cluster.wait("idle", 60)
        yield cluster
    finally:
        with contextlib.suppress(AssertionError):
            cluster.run("scancel", "--user", "root")
            time.sleep(2)
        for file in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        HOSTS.write_text(before)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _start_munge() -> None:
    if subprocess.run(["pgrep", "-x", "munged"], check=False, capture_output=True).returncode:
        for name in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
            Path(name).mkdir(parents=True, exist_ok=True)
            shutil.chown(name, "munge", "munge")
        start = ["su", "-s", "/bin/sh", "munge", "-c", "munged --force"]
        subprocess.run(start, check=True, capture_output=True, env={"PATH": _path()})
