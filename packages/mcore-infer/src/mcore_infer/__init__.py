"""Text generation, serving, evaluation, quantization and export of mcore models.

The front is lazy (PEP 562): importing the package imports none of its modules, so that a
command that prints help never imports torch.
"""

from mcore_base.lazy_front import lazy_front

_EXPORTS: dict[str, str] = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.limits",
    "ExportReport": "export.exporting",
    "Generation": "writing.sequence",
    "Grammars": "writing.structured",
    "InferenceConfig": "config",
    "LoadedModel": "loading",
    "NewToken": "writing.sequence",
    "QuantizeConfig": "quantization.options",
    "SamplingConfig": "config",
    "ScoreRequest": "writing.sequence",
    "StaticCache": "kv_cache",
    "Structure": "writing.grammars",
    "TextScore": "evaluation.scoring",
    "TextStream": "writing.token_text",
    "TokenRules": "writing.sequence",
    "build_engine": "engine.building",
    "cache_bytes": "kv_cache",
    "export_model": "export.exporting",
    "filter_logits": "engine.sampling",
    "generate": "generation",
    "generate_text": "generation",
    "score_continuations": "evaluation.continuations",
    "load_model": "loading",
    "quantize": "quantization.quantizing",
    "sample": "engine.sampling",
    "score_documents": "evaluation.scoring",
    "score_lambada": "evaluation.lambada",
    "score_texts": "evaluation.scoring",
    "score_wikitext": "evaluation.wikitext",
    "stream": "generation",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_front(__name__, _EXPORTS)
