"""Runs forwards through the stages of ``--pipeline-model-parallel-size``.

All ranks of a pipeline make the same calls. Each stage sends the hidden state to the next
stage, and the last stage sends its tokens and scores to all ranks. Each stage has the keys and
values of its layers: the stages split the memory, but a step takes as long as on one rank.
"""

from itertools import pairwise

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mcore_models.building.layouts import stage_problems
from mcore_models.config import TransformerConfig
from mcore_models.logical_tensors import payload_width
from mcore_models.protocol import LanguageModel, ModelState
from mcore_parallel.collectives import all_gather, all_reduce
from mcore_parallel.mesh import Axis
from mcore_parallel.pipeline_parallel.p2p import Message, post
from mcore_parallel.pipeline_parallel.stages import Stage


def own_stage(config: TransformerConfig, pp: Axis) -> Stage | None:
    """Return this rank's stage of evenly divided layers; None without pipeline parallelism.

    Raises:
        ValueError: on all ranks, if there are fewer layers than ranks, or if layers of a stage
            read the keys of a layer on another stage (``--num-kv-shared-layers``).
    """
    num_layers = config.num_layers
    if pp.size == 1:
        return None
    if num_layers < pp.size:
        raise ValueError(
            f"--pipeline-model-parallel-size {pp.size} exceeds the {num_layers} layers of the "
            "model: use fewer stages."
        )
    bounds = [num_layers * rank // pp.size for rank in range(pp.size + 1)]
    stages = [range(begin, end) for begin, end in pairwise(bounds)]
    if problems := stage_problems(config, stages):
        raise ValueError("\n".join(problems))
    is_last = pp.rank == pp.size - 1
    return Stage(pp.rank, stages[pp.rank], pp.rank == 0, is_last, rank=pp.rank)


def run_stages(
    model: LanguageModel,
    tokens: Int[Tensor, "B S"],
    positions: Int[Tensor, "*B S"] | None = None,
    state: ModelState | None = None,
) -> Float[Tensor, "R B D"]:
    """Run this rank's stage on tokens; all ranks of ``pp`` call it together.

    Receives the hidden state of the previous stage and sends the result to the next stage.

    Args:
        model: whole or a stage, in eval mode.
        tokens: the same on all stages.
        positions: of the tokens; None: consecutive.
        state: cache of this stage's layers; the tokens are appended.

    Returns:
        The hidden state after this stage's layers, for ``last_stage_logits``: of all S tokens,
        unless the model's last block computes fewer.
    """
    x: Tensor = tokens
    pp, (num_rows, length) = model.pp, tokens.shape
    if pp.rank:
        shape = length, num_rows, payload_width(model.config)
        x = torch.empty(shape, dtype=model.dtype, device=tokens.device)
        post([Message(x, pp.rank - 1, is_send=False)], pp).wait()
    hidden, _ = model(x, positions, state)
    if pp.rank < pp.size - 1:
        post([Message(hidden.contiguous(), pp.rank + 1, is_send=True)], pp).wait()
    return hidden


def last_stage_logits(
    model: LanguageModel, hidden: Float[Tensor, "R 1 D"]
) -> Float[Tensor, "R V"]:
    """Compute the logits of the vocabulary, and all-gather them over ``tp``.

    Stages before the last return zeros. They still choose tokens, so that all ranks consume the
    same random numbers; ``from_last_stage`` replaces those tokens.
    """
    if not model.stage.has_loss:
        return hidden.new_zeros(()).expand(hidden.shape[0], model.vocab_size)
    logits = model.logits(hidden)[:, 0]  # [R, 1, V/tp]
    return all_gather(logits, model.tp, dim=-1)[:, : model.vocab_size]


def from_last_stage(x: Shaped[Tensor, "..."], pp: Axis) -> Shaped[Tensor, "..."]:
    """Return the last stage's tensor on all stages, by an all-reduce over ``pp``."""
    return all_reduce(x if pp.rank == pp.size - 1 else torch.zeros_like(x), pp)


def agree_on_tokens(chosen: Int[Tensor, " R"], tp: Axis, pp: Axis) -> Int[Tensor, " R"]:
    """Return the tokens of the first ``tp`` rank of the last stage on all ranks.

    Ranks whose kernels round differently would otherwise continue with different texts.
    All-reduces over ``tp``, then over ``pp``.
    """
    chosen = all_reduce(chosen if tp.rank == 0 else torch.zeros_like(chosen), tp)
    return from_last_stage(chosen, pp)
