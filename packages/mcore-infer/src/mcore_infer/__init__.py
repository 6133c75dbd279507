"""Text generation and evaluation for mcore models, over one rank or several.

The front is lazy (PEP 562): importing it imports no room, so a command that only
needs help text never loads torch.
"""

from mcore_base.lazy_front import lazy_front

_EXPORTS: dict[str, str] = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.step_plans",
    "ExportReport": "export.exporting",
    "Generation": "writing",
    "Grammars": "structured",
    "InferenceConfig": "config",
    "LoadedModel": "loading",
    "NewToken": "writing",
    "QuantizeConfig": "quantization.options",
    "SamplingConfig": "config",
    "ScoreRequest": "writing",
    "StaticCache": "kv_cache",
    "Structure": "grammars",
    "TextScore": "evaluation.scoring",
    "TextStream": "streaming",
    "TokenRules": "writing",
    "build_engine": "engine.building",
    "cache_bytes": "kv_cache",
    "export_model": "export.exporting",
    "filtered": "sampling",
    "generate": "generation",
    "generate_text": "generation",
    "judge": "evaluation.continuations",
    "load_model": "loading",
    "quantize": "quantization.quantizing",
    "sample": "sampling",
    "score_documents": "evaluation.scoring",
    "score_lambada": "evaluation.lambada",
    "score_texts": "evaluation.scoring",
    "score_wikitext": "evaluation.wikitext",
    "stream": "generation",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_front(__name__, _EXPORTS)
