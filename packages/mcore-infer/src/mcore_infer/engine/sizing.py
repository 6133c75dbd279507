"""Sizes an engine's cache: the number of pages that fit into the free memory.

If the cache is smaller than all requests need together, the scheduler lets requests wait.
"""

import torch

from mcore_infer.engine.limits import EngineConfig, Fp8Cache
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.scheduler import Chunk, Step
from mcore_infer.engine.stages import last_stage_logits, run_stages
from mcore_infer.engine.step_layout import rows_to_choose_after, step_tensors
from mcore_models.kernels.batch_invariant import token_log_probs
from mcore_models.protocol import LanguageModel
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis

_GPU_SHARE = 0.9
"""Share of a GPU's free memory that the cache may use; the rest is for workspaces,
fragmentation and other processes."""
_LARGEST_STEPS = 2
"""Number of largest steps whose memory is reserved: one step without a graph, and the memory
pool of the graphs."""
_CPU_BYTES = 2 << 30


def fitting_pages(
    model: LanguageModel,
    config: EngineConfig,
    draft: LanguageModel | None = None,
    replicas: Axis = SINGLE,
) -> int:
    """Return the number of pages that fit into memory, at most as many as all requests need.

    Runs the model on one token to measure a page. Without ``cache_bytes`` on a GPU it also runs
    the largest step and resets torch's peak of that GPU's memory. All-reduces over ``tp``,
    ``pp`` and ``replicas``, so all ranks return the same number.

    Args:
        model: whole or a stage, in eval mode.
        config: limits; ``cache_bytes`` 0: use the free memory.
        draft: model that proposes tokens and keeps keys and values in the same pages.
        replicas: ranks with the same model, whose engines refuse the same requests.

    Raises:
        ValueError: if fewer than two pages fit.
    """
    page_bytes, slot_bytes = measured_bytes(model, config.page_tokens, config.fp8_cache)
    if config.num_speculative_tokens and config.speculative_drafts == "mtp":
        # The prediction layer has a cache in the model's dtype, of the size of one layer.
        unquantized_bytes, _ = measured_bytes(model, config.page_tokens)
        page_bytes += unquantized_bytes // model.config.num_layers + 1
    if draft is not None:
        page_bytes += measured_bytes(draft, config.page_tokens)[0]
    # One page and one slot more than requests use are for the padding of a step.
    states_bytes = (config.max_requests + 1) * slot_bytes
    memory = config.cache_bytes or _free_bytes(model, config)
    num_pages = (memory - states_bytes) // page_bytes - 1
    if not config.cache_bytes:
        needed = config.max_requests * -(-config.max_sequence_tokens // config.page_tokens)
        num_pages = min(num_pages, needed)
    min_pages = torch.tensor(num_pages, device=next(model.parameters()).device)
    for axis in (model.tp, model.pp, replicas):
        min_pages = all_reduce(min_pages, axis, "min")
    num_pages = int(min_pages.item())
    if num_pages < 1:
        raise ValueError(
            f"a cache of {memory} bytes does not hold two pages of {page_bytes}"
            + f" and {states_bytes} of recurrent states" * (states_bytes > 0)
            + ": raise --inference-dynamic-batching-buffer-size-gb"
            + " or lower --inference-max-requests" * (states_bytes > 0)
            + "."
        )
    return num_pages


@torch.no_grad()
def measured_bytes(
    model: LanguageModel, page_tokens: int, fp8: Fp8Cache | None = None
) -> tuple[int, int]:
    """Return the bytes of a page and of a request's recurrent state on this rank, all layers.

    A page of a model without attention counts as 1 byte. Runs the model on one token;
    communicates over ``tp`` as the model does, and over ``pp``.
    """
    cache = PagedCache(1, page_tokens, 1, fp8)
    chunk = Chunk(0, 0, 0, (0,), (0,), wants_token=True)
    step = step_tensors(Step((chunk,)), page_tokens, next(model.parameters()).device)
    cache.step = step
    run_stages(model, step.tokens, step.positions, cache)
    # The cache has two pages and two slots: one of each is for padding.
    return max(1, cache.num_bytes // 2), cache.num_state_bytes // 2


def largest_step(config: EngineConfig, positions: int) -> Step:
    """Return a step with the most requests and tokens, each at the end of the longest text.

    All token ids are 0, and all requests use the first page only.

    Args:
        config: limits.
        positions: number of positions of the model; 0: no limit.
    """
    length = min(config.max_sequence_tokens, positions or config.max_sequence_tokens)
    pages = (0,) * -(-length // config.page_tokens)
    chunks, remaining = [], config.max_tokens
    for num_others in reversed(range(config.max_requests)):
        count = min(length, remaining - num_others)  # leave a token for each later request
        remaining -= count
        chunks.append(Chunk(0, 0, length - count, (0,) * count, pages, wants_token=True))
    return Step(tuple(chunks))


@torch.no_grad()
def _step_bytes(model: LanguageModel, config: EngineConfig) -> int:
    """Run the largest step on a GPU; return the bytes that it allocates, without the cache."""
    device = next(model.parameters()).device
    cache = PagedCache(1, config.page_tokens, 1, config.fp8_cache)
    step = largest_step(config, model.config.max_position_embeddings)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    cache.step = inputs = step_tensors(step, config.page_tokens, device)
    hidden = run_stages(model, inputs.tokens, inputs.positions, cache)
    logits = last_stage_logits(model, hidden[rows_to_choose_after(step)])
    token_log_probs(logits, logits.argmax(-1))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _free_bytes(model: LanguageModel, config: EngineConfig) -> int:
    """Return the default size of a cache: on a GPU, a share of the memory that steps leave."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return _CPU_BYTES
    reserved = _LARGEST_STEPS * _step_bytes(model, config)
    torch.cuda.empty_cache()  # cached blocks count as free
    return max(0, int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0]) - reserved)
