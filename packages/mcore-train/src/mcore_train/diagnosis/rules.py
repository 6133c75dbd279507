"""Tables of the classes of failures, and of the log messages by which they are recognized.

A row of ``RULES`` recognizes one message of torch, NCCL, CUDA, the kernel, Slurm, torchrun or
mcore. Its role is ``root`` for a cause, ``cascade`` for the reaction of a rank to another
rank's failure, and ``teardown`` for a message of the job's end. A message of the scheduler, the
kernel or the device (``outside``) has precedence over exceptions at the same time, so that a
broken GPU is not reported as an error of the program that used it.

Standard library only: a launcher imports this module to read ``FAULTS``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["root", "cascade", "teardown"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A class of failures, and the reaction of a launcher."""

    exit_code: int
    """Exit code of ``mcore-train triage``: 10 to 29 mean stop, 30 and above retry."""
    retry: bool
    """Whether the same command may be started again from its last checkpoint."""
    summary: str


FAULTS: Mapping[str, Fault] = {
    "finished": Fault(0, False, "the run finished"),
    "out_of_memory": Fault(10, False, "GPU memory is full"),
    "shape": Fault(11, False, "sizes do not match each other or the layout"),
    "config": Fault(12, False, "options of the command are refused"),
    "import": Fault(13, False, "a package is missing or of the wrong version"),
    "missing_path": Fault(14, False, "a file or folder is missing"),
    "permission": Fault(15, False, "a file may not be read or written"),
    "checkpoint": Fault(16, False, "the checkpoint is damaged or of another model or layout"),
    "nan": Fault(17, False, "loss or gradients are not finite"),
    "spike": Fault(24, False, "loss or gradient norm jumped"),
    "data": Fault(18, False, "the training data are damaged or do not match the model"),
    "storage_full": Fault(19, False, "a file system is full"),
    "host_memory": Fault(20, False, "the host's memory is full"),
    "collective_mismatch": Fault(21, False, "ranks call different collectives"),
    "program": Fault(22, False, "an exception of the program"),
    "cancelled": Fault(23, False, "a user cancelled the job"),
    "hardware": Fault(30, True, "a GPU or its links failed"),
    "network": Fault(31, True, "the network between hosts failed"),
    "collective_timeout": Fault(32, True, "a rank did not reach a collective"),
    "rendezvous": Fault(33, True, "ranks could not connect to each other"),
    "preemption": Fault(34, True, "the scheduler preempted the job"),
    "time_limit": Fault(35, True, "the job reached its time limit"),
    "killed": Fault(36, True, "a process was killed from outside"),
    "crash": Fault(37, True, "a process crashed in native code"),
    "storage_io": Fault(38, True, "a file system did not respond"),
    "replicas": Fault(39, True, "copies of the weights differ"),
    "unknown": Fault(40, True, "the logs show no cause"),
}
"""Classes by name; ``--json`` and the exit code use them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of log message."""

    name: str
    pattern: str
    """Regular expression, searched in one line without its rank prefix. The group ``rank`` is
    the rank at fault; without this group the rank that wrote the line is at fault."""
    fault: str
    role: Role = "root"
    advice: str = ""
    outside: bool = False
    """Whether the message comes from the scheduler, the kernel or a device, and so has
    precedence over exceptions at the same time."""


def _root(name: str, fault: str, pattern: str, advice: str = "") -> Rule:
    return Rule(name, pattern, fault, "root", advice)


def _outside(name: str, fault: str, pattern: str, advice: str = "") -> Rule:
    return Rule(name, pattern, fault, "root", advice, outside=True)


def _cascade(name: str, fault: str, pattern: str) -> Rule:
    return Rule(name, pattern, fault, "cascade")


def _teardown(name: str, pattern: str) -> Rule:
    return Rule(name, pattern, "unknown", "teardown")


_EXCEPTION = r"^(?:[A-Za-z_][\w.]*\.)?"
"""Beginning of the last line of a Python traceback: an optional module, then the class."""

_HARDWARE_XIDS = (
    "46|48|54|56|57|58|61|62|64|74|78|79|81|92|95|110|119|120|121|123|136|140|143|144|145|149|"
    "154|155|156|158"
)
"""Xid numbers of NVIDIA's catalogue that mean a fault of the device, its memory, its firmware
or NVLink; 13, 31, 43 and 45 are caused by a program's illegal access or its end."""

RULES: tuple[Rule, ...] = (
    # -- Messages of the scheduler, the kernel and devices.
    _outside(
        "preemption",
        "preemption",
        r"CANCELLED AT \S+ DUE TO PREEMPTION|DUE TO JOB REQUEUE|"
        r"[Pp]reempt(?:ion|ed)(?: notice| by)|TerminationByKubelet|Preempting|"
        r"DUE TO NODE FAILURE.*[Rr]equeue",
        "Start again with --auto-resume; --exit-signal SIGUSR1 and sbatch --signal=USR1@300 "
        "save before the preemption.",
    ),
    _outside(
        "time limit",
        "time_limit",
        r"DUE TO TIME LIMIT|exceeded (?:job )?(?:time|walltime) limit|"
        r"=>> PBS: job killed: walltime|DeadlineExceeded",
        "Submit again with --auto-resume; --exit-duration-in-mins auto saves before the limit.",
    ),
    _outside(
        "node failure",
        "hardware",
        r"DUE TO NODE FAILURE|NODE_FAIL|NodeLost|node \S+ (?:is )?not responding",
        "Leave this host out (--exclude) and start again.",
    ),
    _outside(
        "Xid",
        "hardware",
        rf"NVRM: Xid \([^)]*\): (?:{_HARDWARE_XIDS}),",
        "Leave this host out, start again, and let its GPU be checked (dcgmi diag -r 3).",
    ),
    _outside(
        "GPU lost",
        "hardware",
        r"GPU has fallen off the bus|GPU is lost|Unable to determine the device handle for GPU|"
        r"NVML_ERROR_GPU_IS_LOST|RmInitAdapter failed|GPU requires reset|GPU reset is required",
        "Leave this host out and let its GPU be reset or replaced.",
    ),
    _outside(
        "ECC",
        "hardware",
        r"uncorrectable (?:NVLink|ECC) error|[Uu]ncorrectable ECC error|"
        r"hardware stack error|double[- ]bit (?:ECC )?error|"
        r"row remap(?:ping|per)? (?:failure|failed|pending)|contained ECC error|"
        r"Uncorrected hardware memory error|mce: \[Hardware Error\]|EDAC .* UE ",
        "Leave this host out, start again, and let its GPU or memory be checked.",
    ),
    _outside(
        "NVLink",
        "hardware",
        r"NVLink (?:error|failure|is down)|SXid|NVSwitch.*(?:fatal|error)|nvlink error|"
        r"fabric manager.*(?:not running|failed|error)|"
        r"system not yet initialized|CUDA error: system not ready|NVLINK_UNCORRECTABLE",
        "Leave this host out; nvidia-smi nvlink -e or the fabric manager's log names the link.",
    ),
    _outside(
        "host out of memory",
        "host_memory",
        r"task (?P<task>\d+): Out Of Memory|Detected \d+ oom[-_]kill event|oom-kill:constraint|"
        r"Out of memory: Killed process|Memory cgroup out of memory|OOMKilled|"
        r"Some of (?:your processes|"
        r"the step tasks) (?:may )?have been (?:killed by the cgroup|OOM Killed)",
        "Use fewer --num-workers or ranks on a host, --no-async-save, or more memory for the "
        "job.",
    ),
    _outside(
        "file system",
        "storage_io",
        r"Stale file handle|Input/output error|Remote I/O error|"
        r"Transport endpoint is not connected|LustreError|"
        r"Errno 5\]|Errno 116\]|Errno 121\]|nfs: server \S+ not responding|"
        r"Cannot send after transport endpoint shutdown",
        "Start again when the file system responds; the kernel log of the host names the "
        "server.",
    ),
    _outside(
        "InfiniBand",
        "network",
        r"NET/IB ?: Got (?:completion|async event)|NET/IB.*(?:error|fatal)|IBV_WC_\w+_ERR|"
        r"port error|local catastrophic|"
        r"ibv_\w+ failed|link (?:is )?down\b|NETDEV WATCHDOG|mlx5_core.*(?:failed|error)",
        "Start again; leave out a host that is named twice, and check its ibstat and cable.",
    ),
    _root(
        "no device",
        "hardware",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|CUDA unknown error|"
        r"device\(s\) is/are busy or unavailable|CUDA driver initialization failed",
        "Check nvidia-smi on this host, whose driver shows no usable GPU; leave the host out.",
    ),
    # -- Ranks that could not connect to each other.
    _root(
        "download",
        "network",
        r"HTTPSConnectionPool|Max retries exceeded|50[234] Server Error|429 Client Error|"
        r"ReadTimeoutError|ConnectTimeout|LocalEntryNotFoundError",
        "Start again, or download to a local folder first and give that folder.",
    ),
    _root(
        "port taken",
        "rendezvous",
        r"EADDRINUSE|[Aa]ddress already in use",
        "Start again with another MASTER_PORT, or with --nproc, which chooses a free port.",
    ),
    _root(
        "master not found",
        "rendezvous",
        r"Name or service not known|[Tt]emporary failure in name resolution|"
        r"ai_family not supported|"
        r"RendezvousTimeoutError|RendezvousConnectionError|RendezvousClosedError|"
        r"client socket has (?:failed|timed out)|"
        r"Timed out after \d+ seconds waiting for clients|"
        r"No route to host|Network is unreachable|getaddrinfo|"
        r"Bootstrap : no socket interface found",
        "Set the same MASTER_ADDR and MASTER_PORT on all hosts, reachable from each "
        "(mcore-train doctor checks this), and start the same command on all hosts.",
    ),
    # -- Reactions to another rank's failure; the first names the rank that failed.
    _root(
        "dead rank",
        "killed",
        r"rank (?P<rank>\d+) is gone: its process was ended",
        "Check the last log lines of the named rank, and the kernel log of its host.",
    ),
    _cascade(
        "collective timed out",
        "collective_timeout",
        r"Watchdog caught collective operation timeout|Timeout at NCCL work|"
        r"timed out waiting for|"
        r"Timed out waiting \d+ms for (?:recv|send)|failure detected by watchdog|"
        r"Timeout waiting for key|monitoredBarrier",
    ),
    _cascade(
        "peer is gone",
        "network",
        r"Connection (?:closed|reset) by (?:remote )?peer|remote process exited|"
        r"ncclRemoteError|"
        r"Broken pipe|Connection refused|connection was likely closed|failed to recv|"
        r"recvValue failed|sendBytes failed|DistNetworkError|ncclSystemError|ncclInternalError|"
        r"NCCL communicator was aborted|store->get\(|"
        r"ProcessGroupNCCL.*terminated with exception|"
        r"the store is gone|cannot reach the store|the store has not answered|"
        r"Some NCCL operations have failed|taking the entire process down|"
        r"Observed flight recorder dump|dump signal|DistBackendError|Socket Timeout|"
        r"DistStoreError|gloo/transport(?!.*op\.preamble)|rank \d+ ends: process \d+",
    ),
    _cascade(
        "section timed out", "collective_timeout", r"Section '\w+' has been open for [\d.]+ sec"
    ),
    # -- The end of the job.
    _teardown(
        "ft_launcher",
        r"health_check\.py:\d+|Agent (?:\.run\(\) raised|run ended with) exception",
    ),
    _teardown(
        "ended by the launcher",
        r"closing signal SIG|[Rr]eceived SIGTERM|SignalException|"
        r"Received \d+ death signal|forcing job termination|"
        r"Job step aborted|STEP \S+ ON \S+ CANCELLED AT \S+ \*|Fatal Python error: Aborted|"
        r"terminate called after|destroy_process_group\(\) was not called|ChildFailedError|"
        r"task \d+: (?:Terminated|Exited with exit code 143)|leaked semaphore|"
        r"leaked shared_memory",
    ),
    # -- mcore's watchdog and checks.
    _root(
        "collective mismatch",
        "collective_mismatch",
        r"DisagreementError|ranks \d+ and (?P<rank>\d+) disagree on (?:call|a message)|"
        r"Detected mismatch between collectives on ranks|Collectives differ in the following|"
        r"op\.preamble\.length <= op\.nbytes|tensor sizes? mismatch(?:ed)? (?:across|"
        r"between) ranks",
        "Look for a condition that depends on the rank before one of the two lines.",
    ),
    _root(
        "broken device",
        "hardware",
        r"broken device: rank (?P<rank>\d+)",
        "Leave out the host of the named rank, start again, and have its GPU checked (dcgmi "
        "diag -r 3).",
    ),
    _root(
        "late step",
        "collective_timeout",
        r"rank (?P<rank>\d+) holds up step \d+",
        "Check the host of the named rank, then the last log lines of this rank.",
    ),
    _root(
        "silent rank",
        "collective_timeout",
        r"rank (?P<rank>\d+) is gone: silent for",
        "Check the host of the silent rank, then the last log lines of this rank.",
    ),
    _root(
        "absent rank",
        "collective_timeout",
        r"rank (?P<rank>\d+) (?:did not come|sent nothing) (?:within|before)|"
        r"ranks? (?P<absent>\d+)(?:, \d+)* failed to (?:pass|reach) (?:the )?monitoredBarrier",
        "Check the host of the named rank, then the last log lines of this rank.",
    ),
    _root(
        "unlike weights",
        "replicas",
        r"UnlikeWeightsError|The copies were equal after|do not have the same weights any more",
        "Start again from the checkpoint that the line names, or an earlier one. A host that "
        "is named twice has a broken GPU: leave it out.",
    ),
    _root(
        "unlike ranks",
        "config",
        r"was started with other options than rank 0|began with different weights",
        "Start all ranks with one command and one seed.",
    ),
    # -- Memory.
    _root(
        "GPU memory",
        "out_of_memory",
        r"OutOfMemoryError|Cuda failure \d* ?'out of memory'|CUDA out of memory|"
        r"CUDA error: out of memory|"
        r"CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|Failed to CUDA calloc",
    ),
    _root(
        "host memory",
        "host_memory",
        r"(?:^|\W)MemoryError\b|can't allocate memory|Cannot allocate memory|std::bad_alloc|"
        r"out of shared memory|insufficient shared memory|unable to (?:mmap|allocate shared)|"
        r"DataLoader worker \(pid \d+\) is killed by signal: (?:Bus error|Killed)",
        "Use fewer --num-workers or ranks on a host, --no-async-save, a larger /dev/shm, or "
        "more memory for the job.",
    ),
    # -- Files.
    _root(
        "drive full",
        "storage_full",
        r"No space left on device|the disk is full|Disk quota exceeded|Errno (?:28|"
        r"122)\]|File too large",
        "Free space on the file system of --save, or keep fewer checkpoints.",
    ),
    _root(
        "no permission",
        "permission",
        r"Permission denied|PermissionError|Operation not permitted|Read-only file system|"
        r"AccessDenied|403 Forbidden|40[13] Client Error|gated repo|is not writable|"
        r"cannot be written",
        "Give the job's user permission for the path that the line names.",
    ),
    # -- Numbers.
    _root(
        "spike",
        "spike",
        r"SpikeError|iteration \d+ is a spike: loss",
        "Look at the documents of the step (mcore-train explain DIR --step N); --auto-resume "
        "continues with the next batch.",
    ),
    _root(
        "not finite",
        "nan",
        r"NonFiniteError|the gradient norm of iteration \d+ is (?:nan|-?inf)|"
        r"(?:found|detected|got|is|has) (?:a )?(?:NaN|nan|inf)\b.*(?:loss|grad|weight|"
        r"iteration)|"
        r"(?:loss|grad\w*|norm)\b.{0,40}\b(?:is|was|are|became) (?:NaN|nan|inf)|"
        r"returned nan values",
        "Start from the last checkpoint with a lower --lr, a longer warm-up or --clip-grad "
        "1.0, and look at the samples of the step (mcore-data explain --run DIR --step N).",
    ),
    # -- Data.
    _root(
        "missing data file",
        "missing_path",
        r"is missing, and .{0,200}\b(?:names|lists) it\b|\.(?:bin|idx) is missing",
        "Copy all files of the dataset to a path that every host has.",
    ),
    _root(
        "data",
        "data",
        r"CorruptDatasetError|BadRecordError|Write the dataset again|[Tt]he index is damaged|"
        r"its manifest|training data end within|is damaged \(\d|holds id \d|"
        r"does not fit its header|srcIndex < srcSelectDimSize|index out of range in self|"
        r"`?t >= 0 && t < n_classes|idx_dim >= 0 && idx_dim < index_size|"
        r"index \d+ is out of bounds for dimension|token ids? .{0,60}(?:vocabulary|vocab)|"
        r"beyond the vocabulary|JSONDecodeError|UnicodeDecodeError|"
        r"cannot mmap an empty file|mmap length is greater than|buffer is smaller than|"
        r"(?:\.bin|\.idx|dataset)\b.{0,80}(?:corrupt|damaged|truncated|too short|cut off)|"
        r"(?:\.bin|\.idx) (?:has|holds|is)|"
        r"Caught \w+ in DataLoader worker|DataLoader worker \(pid\(s\) [\d, ]+\) exited",
        "Check the files with mcore-data inspect, and that --tokenizer-type is the tokenizer "
        "that wrote them.",
    ),
    # -- Checkpoints, before shapes: a checkpoint's shapes are not the layout's.
    _root(
        "checkpoint",
        "checkpoint",
        r"is damaged|was cut short|is not a (?:valid )?safetensors file|"
        r"is missing, but .{0,200}\blists it\b|"
        r"proof failed|file of torch\.save|\.safetensors\b|Error\(s\) in loading state_dict|"
        r"size mismatch for|Missing key\(s\) in state_dict|"
        r"Unexpected key\(s\) in|CheckpointError|CheckpointException|"
        r"was saved under another layout|SafetensorError|"
        r"InvalidHeaderDeserialization|PytorchStreamReader failed|invalid magic number|"
        r"weight shapes do not match|holds another model|the checkpoint\'s |"
        r"bytes, but \d+ were written|"
        r"the checkpoint (?:holds|has|was|needs|in)|"
        r"checkpoint .{0,80}(?:damaged|cut off|incomplete|truncated|another model)|"
        r"Invalid access of peer .* checkpoint|unpickling stack underflow",
        "Load an earlier step (--ckpt-step N), or give the options of the checkpoint's model.",
    ),
    # -- Packages.
    _root(
        "import",
        "import",
        r"ModuleNotFoundError|ImportError|No module named|undefined symbol|"
        r"cannot open shared object file|version `\S+' not found|"
        r"pip install|is not installed|install the extra|"
        r"no kernel image is available|provided PTX was compiled|"
        r"driver (?:version )?(?:on your system )?is (?:insufficient|too old)|"
        r"forward compatibility was attempted",
        "Install the package that the line names on every host (uv sync --locked), or use an "
        "environment that has it.",
    ),
    # -- Sizes and layouts.
    _root(
        "shape",
        "shape",
        r"does not divide the world|heads must divide evenly|cannot be (?:split|divided) over|"
        r"(?:is not|must be|be) (?:a )?(?:multiple of|divisible by)|does not divide|"
        r"not divisible|"
        r"must divide|shapes? cannot be multiplied|is invalid for input of size|"
        r"[Ss]izes of tensors must match|size of tensor a \(|shape mismatch|Shape mismatch|"
        r"mat1 and mat2|to match target batch_size|doesn't match the broadcast|"
        r"must match the (?:existing )?size|"
        r"Expected size \d+ but got|got \d+ elements|Dimension out of range|"
        r"Given groups=|Expected \w+ to have \w+ \d+|layers? .{0,60}over .{0,20}stages",
        "Change one of the sizes that the line names.",
    ),
    # -- Paths and options.
    _root(
        "missing path",
        "missing_path",
        r"FileNotFoundError|holds no checkpoint|No such file or directory|"
        r"NotADirectoryError|does not exist|"
        r"can't open file|there is no (?:file|folder|dataset)|404 (?:Client Error|Not Found)|"
        r"found no (?:file|dataset)|NoSuchKey|NoSuchBucket",
        "Give a path that exists on every host, not one on a local disk.",
    ),
    # -- Processes that died without an exception.
    _root(
        "killed",
        "killed",
        r"rank (?P<rank>\d+) was ended by SIGKILL|"
        r"failed \(exitcode: -9\) local_rank: (?P<local>\d+)|Signal 9 \(SIGKILL\)|"
        r"task (?P<task>\d+): Killed|^Killed\b|exited due to signal 9|"
        r"died with <Signals.SIGKILL",
        "Check with dmesg on its host whether memory was full; else a user ended the process.",
    ),
    _root(
        "bus error",
        "crash",
        r"rank (?P<rank>\d+) was ended by SIGBUS|Fatal Python error: Bus error|"
        r"\(exitcode: -7\) local_rank: (?P<local>\d+)",
        "Check the files that the rank maps: a dataset truncated while it is read, a full "
        "/dev/shm, or a full drive of --optimizer-offload-dir.",
    ),
    _root(
        "native crash",
        "crash",
        r"rank (?P<rank>\d+) was ended by SIG(?!TERM|INT)|"
        r"Fatal Python error: Segmentation fault|"
        r"Segmentation fault|illegal memory access|misaligned address|"
        r"unspecified launch failure|"
        r"CUDA error: (?:unknown error|an illegal instruction|launch failed|invalid pc)|"
        r"Bus error \(core|CUBLAS_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED|"
        r"INTERNAL_ERROR)|CUDNN_STATUS_\w+|"
        r"NVRM: Xid \([^)]*\): (?:13|31|43|45|68|69),|device-side assert|"
        r"Floating point exception|"
        r"\(exitcode: -(?:11|6|4|8)\) local_rank: (?P<local>\d+)|"
        r"task (?P<task>\d+): (?:Segmentation fault|Aborted)",
        "Start again. If the same rank crashes again, CUDA_LAUNCH_BLOCKING=1 names the kernel, "
        "and another host shows whether the GPU or the program is at fault.",
    ),
    _root(
        "cancelled",
        "cancelled",
        r"JOB \S+ ON \S+ CANCELLED AT \S+ \*|^KeyboardInterrupt|error: interrupted$|"
        r"scancel|CANCELLED by \d+",
    ),
    _root(
        "no such device",
        "config",
        r"invalid device ordinal|this host shows \d+\. Start",
        "Start one rank for each GPU that nvidia-smi -L lists on the host.",
    ),
    # -- Refused options, and messages that no earlier row recognized.
    _root(
        "refused command",
        "config",
        r"^mcore-train: error: |^usage: |error: unrecognized arguments|error: argument ",
        "Change the option that the line names.",
    ),
    _root(
        "exception",
        "program",
        rf"{_EXCEPTION}(?:[A-Z]\w*(?:Error|Exception|Exit))\b(?::|$)",
    ),
    _root(
        "exit code",
        "program",
        r"rank (?P<rank>\d+) ended with exit code|"
        r"\(exitcode: \d+\) local_rank: (?P<local>\d+)|"
        r"task (?P<task>\d+): Exited with exit code",
    ),
)
"""Rows in the order of comparison; the first match counts."""


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that recognized a line."""

    rule: Rule
    rank: int | None
    """Rank at fault that the line names."""


_COMPILED = tuple((rule, re.compile(rule.pattern)) for rule in RULES)


def recognize(text: str) -> Match | None:
    """Return the first rule that a message matches, and the rank that the message names."""
    for rule, pattern in _COMPILED:
        if match := pattern.search(text):
            ranks = [value for value in match.groupdict().values() if value is not None]
            return Match(rule, int(ranks[0]) if ranks else None)
    return None
