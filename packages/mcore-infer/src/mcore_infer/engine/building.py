"""Engines by the options of commands, and texts that an engine writes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from mcore_infer.config import InferenceConfig, SamplingConfig
from mcore_infer.engine.checks import check_without_engine, engine_refusal
from mcore_infer.engine.engine import Engine
from mcore_infer.engine.fp8_cache import chosen_cache
from mcore_infer.engine.sizing import fitting_pages
from mcore_infer.engine.step_plans import EngineConfig, Scales
from mcore_infer.errors import StructureError
from mcore_infer.generation import room, stream
from mcore_infer.grammars import Structure
from mcore_infer.structured import Grammars
from mcore_infer.writing import NewToken
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import SINGLE, Axis

_LONGEST = 8192


def build_engine(
    model: LanguageModel,
    config: InferenceConfig,
    draft: LanguageModel | None = None,
    kv_scales: Mapping[int, Scales] = MappingProxyType({}),
    replicas: Axis = SINGLE,
    in_step: Axis = SINGLE,
) -> Engine:
    """Build an engine whose cache fits; all its ranks get the same number of pages.

    Runs the model to measure, and communicates, as ``fitting_pages`` does.

    Args:
        model: whole, in eval mode; on a GPU its plain GEMMs are replaced, see ``Engine``.
        config: limits and memory.
        draft: model that proposes tokens, of the same tokenizer and over the same ranks.
        kv_scales: of an fp8 cache, that the checkpoint holds.
        replicas: ranks with the same model, whose engines refuse the same requests.
        in_step: all ranks of replicas that share experts, see ``Engine``.

    Raises:
        ValueError: if an engine cannot run the model so, or not two pages fit.
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
    return Engine(model, replace(limits, num_pages=num_pages), draft, in_step)


def sequence_limit(model: LanguageModel, config: InferenceConfig) -> int:
    """Tokens that one prompt and its text may have together."""
    positions = model.config.max_position_embeddings
    limit = config.inference_max_seq_length or min(positions or _LONGEST, _LONGEST)
    return min(limit, positions) if positions else limit


def stream_texts(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    config: InferenceConfig,
    *,
    seed: int = 1234,
    eod: int | None = None,
    stop: Sequence[Sequence[int]] = (),
    draft: LanguageModel | None = None,
    structure: Structure | None = None,
    grammars: Grammars | None = None,
    kv_scales: Mapping[int, Scales] = MappingProxyType({}),
    replicas: Axis = SINGLE,
    in_step: Axis = SINGLE,
) -> Iterator[NewToken]:
    """Write after prompts on an engine, or as ``stream`` does where no engine can.

    See ``stream`` for the arguments; ``config`` has the limits of the engine, ``draft``
    proposes tokens, texts are held to ``structure`` by ``grammars``, and ``kv_scales`` are
    those of an fp8 cache that the checkpoint holds. Each of ``replicas`` is given all prompts
    and writes after every so many-th, from its own rank on; ``in_step`` is as in ``Engine``.

    Raises:
        ValueError: if a prompt is empty, too long, or does not fit the cache, or if an option
            needs an engine and none can run the model.
        StructureError: if a text cannot go on with its structure.
    """
    if reason := engine_refusal(model.config):
        if structure is not None:
            raise ValueError(f"{reason}: texts cannot be held to a structure.")
        check_without_engine(reason, config, kv_scales, replicas)
        yield from stream(model, prompts, sampling, seed=seed, eod=eod, stop=stop)
        return
    engine = build_engine(model, config, draft, kv_scales, replicas, in_step)
    engine.grammars = grammars
    limit = engine.config.max_sequence_tokens
    rows: dict[int, int] = {}  # by request: a search takes further numbers for its steps
    for i, prompt in enumerate(prompts):
        wanted = room(model, sampling.num_tokens, prompt, limit, f"prompt {i}")
        request = engine.add(
            prompt,
            sampling,
            num_tokens=wanted,
            seed=seed + i,
            eod=eod,
            stop=stop,
            structure=structure,
        )
        rows[request] = i
        if i % replicas.size != replicas.rank:
            engine.abort(request)  # another's; each replica refuses what any would
    for event in engine.run():
        if isinstance(event, NewToken):
            yield replace(event, row=rows[event.row])
        elif event[1].finish_reason == "error":
            raise StructureError(
                f"text {rows[event[0]]} cannot keep to its --json-schema or --regex: no token "
                "of the vocabulary goes on with it."
            )
