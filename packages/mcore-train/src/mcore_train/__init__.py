"""Train large language models: one program from a laptop CPU to a cluster.

The front is lazy (PEP 562): importing it imports no room, so a command that only
needs help text never loads torch.
"""

from mcore_base.lazy_front import lazy_front

_EXPORTS: dict[str, str] = {
    "BatchConfig": "config",
    "BatchPosition": "batches.micro_batches",
    "Certificate": "layout_check.certificate",
    "ConflictError": "resolution",
    "Datasets": "batches.datasets",
    "EngineSync": "weight_sync.engine_sync",
    "EvalConfig": "config",
    "HFWeights": "weight_sync.hf_weights",
    "LRSchedule": "updating.lr_schedule",
    "LaunchConfig": "config",
    "LoadConfig": "config",
    "LogConfig": "config",
    "OptimizerConfig": "config",
    "Plan": "resolution",
    "PrecisionConfig": "config",
    "Reporter": "reporting.log",
    "Run": "assembly",
    "RunConfig": "config",
    "SaveConfig": "config",
    "ScheduleConfig": "config",
    "EvalScore": "evaluation",
    "StepReport": "reporting.log",
    "StepResult": "step",
    "Tables": "assembly",
    "TrainConfig": "composition",
    "Trial": "layout_check.trial",
    "SmallRun": "layout_check.small_run",
    "VerifyConfig": "config",
    "assemble": "assembly",
    "build_small_run": "layout_check.small_run",
    "compare_trials": "layout_check.certificate",
    "compose": "composition",
    "evaluate": "evaluation",
    "join_sglang": "weight_sync.servers",
    "join_vllm": "weight_sync.servers",
    "learning_rate": "updating.lr_schedule",
    "load_weights_folder": "weight_sync.servers",
    "load_run": "checkpoints.resuming",
    "parse": "options.parsing",
    "read_metrics": "reporting.log",
    "resolve": "resolution",
    "run_training": "running",
    "run_trial": "layout_check.trial",
    "save_weights_folder": "weight_sync.hf_weights",
    "save_run": "checkpoints.resuming",
    "train": "loop",
    "train_step": "step",
    "verify_on_host": "layout_check.verification",
    "weight_decay": "updating.lr_schedule",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_front(__name__, _EXPORTS)
