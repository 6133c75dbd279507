"""Readable language models (GPT family, experts, Mamba-2, BERT, T5) over any parallel layout.

The front is lazy (PEP 562): importing the package imports none of its modules, so that a
command which only prints help never loads torch.
"""

from mcore_base.lazy_front import lazy_front

_EXPORTS: dict[str, str] = {
    "Attention": "layers.attention",
    "BERT": "bert",
    "BertConfig": "encoder_config",
    "BatchEntry": "protocol",
    "FAMILIES": "families",
    "Family": "families",
    "GPT": "gpt",
    "GPTModel": "facade",
    "KernelConfig": "config",
    "LanguageModel": "protocol",
    "LayerNorm": "layers.norm",
    "LayerSetup": "layers.layer_setup",
    "LayerState": "protocol",
    "MLP": "layers.mlp",
    "Mamba": "layers.recurrent.mamba",
    "MicroBatch": "protocol",
    "MultiTokenPrediction": "facade",
    "ModelDescription": "description",
    "ModelState": "protocol",
    "PeftConfig": "peft.config",
    "RMSNorm": "layers.norm",
    "RecomputeConfig": "config",
    "RecurrentState": "protocol",
    "TransformerBlock": "layers.block",
    "build_block": "layers.block",
    "T5": "t5",
    "T5Config": "encoder_config",
    "TrainableModel": "protocol",
    "TransformerConfig": "config",
    "attach_adapters": "peft.attaching",
    "attend": "kernels.attention_backends",
    "check_layout": "building.layouts",
    "flops_per_token": "flops",
    "layout_problems": "building.layouts",
    "load_preset": "presets",
    "merge_adapters": "peft.attaching",
    "model_flops": "flops",
    "num_active_parameters": "flops",
    "num_parameters": "flops",
    "preset_names": "presets",
    "quantize_base": "peft.quantized_base",
    "rank_bytes": "flops",
    "use_batch_invariant_kernels": "kernels.batch_invariant_model",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_front(__name__, _EXPORTS)
