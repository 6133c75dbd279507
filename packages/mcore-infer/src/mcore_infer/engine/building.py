"""Builds an engine from the options of a command: limits, page count, format of the cache."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mcore_infer.config import InferenceConfig
from mcore_infer.engine.engine import Engine
from mcore_infer.engine.fp8_cache import chosen_cache
from mcore_infer.engine.limits import EngineConfig, Scales
from mcore_infer.engine.sizing import fitting_pages
from mcore_models.peft.stacking import StackedAdapters
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import SINGLE, Axis

_LONGEST = 8192
"""Default limit of a sequence, for models with more positions or without a limit."""


def build_engine(
    model: LanguageModel,
    config: InferenceConfig,
    draft: LanguageModel | None = None,
    kv_scales: Mapping[int, Scales] = MappingProxyType({}),
    replicas: Axis = SINGLE,
    in_step: Axis = SINGLE,
    adapters: StackedAdapters | None = None,
) -> Engine:
    """Build an engine whose cache fits into memory, with the same number of pages on all ranks.

    Runs the model to measure memory, and communicates, as ``fitting_pages`` does.

    Args:
        model: whole or a stage, in eval mode; on a GPU its plain GEMMs are replaced.
        config: limits and memory.
        draft: model that proposes tokens, with the same tokenizer and ranks.
        kv_scales: the checkpoint's scales of an fp8 cache, by layer.
        replicas: ranks with the same model, whose engines refuse the same requests.
        in_step: all ranks of replicas that share experts, see ``Engine``.
        adapters: adapters of the model, from which requests choose by name.

    Raises:
        ValueError: if the engine cannot run the model with these options, or fewer than two
            pages fit.
    """
    limits = EngineConfig(
        max_requests=config.inference_max_requests,
        max_tokens=config.inference_dynamic_batching_max_tokens,
        max_sequence_tokens=sequence_limit(model, config),
        chunked_prefill=config.enable_chunked_prefill,
        prefix_cache=config.enable_prefix_caching,
        cache_bytes=int(config.inference_dynamic_batching_buffer_size_gb * 2**30),
        page_tokens=config.inference_dynamic_batching_block_size,
        num_speculative_tokens=config.num_speculative_tokens,
        speculative_drafts=config.speculative_drafts,
        fp8_cache=chosen_cache(config.kv_cache_dtype, model.config, kv_scales),
    )
    num_pages = fitting_pages(model, limits, draft, replicas)
    return Engine(model, replace(limits, num_pages=num_pages), draft, in_step, adapters)


def sequence_limit(model: LanguageModel, config: InferenceConfig) -> int:
    """Return the largest number of tokens of one prompt and its text together."""
    positions = model.config.max_position_embeddings
    limit = config.inference_max_seq_length or min(positions or _LONGEST, _LONGEST)
    return min(limit, positions) if positions else limit
