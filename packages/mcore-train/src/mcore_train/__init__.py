"""Train large language models: one program from a laptop CPU to a cluster.

The front is lazy (PEP 562): importing it imports no room, so a command that only
needs help text never loads torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_ROOMS: dict[str, str] = {
    "BatchConfig": "config",
    "BatchPlace": "batches",
    "ByteNGram": "ngram",
    "Certificate": "certificate",
    "ConflictError": "resolution",
    "Datasets": "assembly",
    "EvalConfig": "config",
    "LaunchConfig": "config",
    "LoadConfig": "config",
    "LogConfig": "config",
    "OptimizerConfig": "config",
    "Plan": "resolution",
    "PrecisionConfig": "config",
    "Reporter": "log",
    "Run": "assembly",
    "RunConfig": "config",
    "SaveConfig": "config",
    "Schedule": "lr_schedule",
    "ScheduleConfig": "config",
    "Score": "evaluation",
    "StepReport": "log",
    "StepResult": "step",
    "TrainConfig": "composition",
    "Trial": "trial",
    "Twin": "twin",
    "VerifyConfig": "config",
    "assemble": "assembly",
    "build_twin": "twin",
    "compare": "certificate",
    "compose": "composition",
    "evaluate": "evaluation",
    "learning_rate": "lr_schedule",
    "load_run": "resuming",
    "parse": "parsing",
    "resolve": "resolution",
    "run_trial": "trial",
    "save_run": "resuming",
    "train": "loop",
    "train_step": "step",
    "verify_here": "verification",
    "weight_decay": "lr_schedule",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> object:
    """Import the room that owns ``name`` and return the attribute."""
    if name == "__version__":
        try:
            return version("mcore-train")
        except PackageNotFoundError:
            return "0+source"
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted([*__all__, "__version__"])
