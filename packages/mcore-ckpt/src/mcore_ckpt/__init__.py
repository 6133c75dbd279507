"""Distributed checkpoints: save under one layout, load under any other, in many formats.

The front is lazy (PEP 562): importing the package imports none of its modules, so that a
command which only prints help never loads torch.
"""

from mcore_base.lazy_front import lazy_front

_EXPORTS: dict[str, str] = {
    "AsyncSaver": "save_load.async_saving",
    "CheckpointError": "errors",
    "ConvertOptions": "conversion.options",
    "FolderLock": "storage.folder_lock",
    "HFView": "save_load.hf_saving",
    "Index": "storage.index",
    "LocalConfig": "config",
    "LocalSaver": "save_load.local_saving",
    "PlanCache": "save_load.plan_cache",
    "ConversionReport": "conversion.conversion",
    "RetentionConfig": "config",
    "StrictnessConfig": "config",
    "UpcycleOptions": "conversion.options",
    "average_checkpoints": "conversion.resharding",
    "convert": "conversion.conversion",
    "hf_to_mcore": "conversion.conversion",
    "hf_view": "save_load.hf_saving",
    "latest_step": "storage.paths",
    "load": "save_load.loading",
    "load_torch": "save_load.torch_models",
    "mcore_to_hf": "conversion.conversion",
    "prune": "save_load.retention",
    "read_index": "storage.index",
    "read_tensor": "save_load.loading",
    "reshard": "conversion.resharding",
    "resolve_folder": "storage.paths",
    "save": "save_load.saving",
    "save_torch": "save_load.torch_models",
    "step_folder": "storage.paths",
    "torch_model_shards": "save_load.torch_models",
    "transfer_weights": "save_load.weight_transfer",
    "upcycle": "conversion.upcycling",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_front(__name__, _EXPORTS)
