"""Predicts step time and memory of a run with other values of options.

``predict_gain`` compares one change with the run as it is, ``predict_gains`` ranks several;
``faster_changes`` and ``smaller_changes`` list those worth a try. All are functions of a run's
config alone: the diagnosis of a run folder and the alarms of a running job call them.
"""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mcore_base.options import idle_options
from mcore_models.families import Family
from mcore_train.composition import TrainConfig, compose, flat, parts
from mcore_train.options.recipe import to_flags
from mcore_train.planning.expert_wgrads import with_chosen_wgrads
from mcore_train.planning.memory import CONTEXT_GIB, GIB, predict_memory
from mcore_train.planning.step_time import predict_step
from mcore_train.planning.system import System
from mcore_train.resolution import resolve

Changes = dict[str, Any]
"""Options by field, with their new values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Prediction for one set of options."""

    step_s: float
    tokens_per_s: float
    """Per GPU."""
    bytes: float
    """Memory of the fullest rank, with the allowance for fragmentation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Predictions for a run as it is and with some options changed."""

    changes: Changes
    before: Cost
    after: Cost
    limit: float
    """Bytes that a rank of the system can allocate."""

    @property
    def flags(self) -> str:
        """Flags of the changes, with the global batch size that must stay the same."""
        table = {k: list(v) if isinstance(v, tuple) else v for k, v in self.changes.items()}
        return shlex.join(to_flags(table))

    @property
    def faster(self) -> float:
        """Relative gain in tokens per second: 0.1 is 10 % faster."""
        return self.after.tokens_per_s / self.before.tokens_per_s - 1

    @property
    def saved_bytes(self) -> float:
        """Bytes that the change saves on the fullest rank."""
        return self.before.bytes - self.after.bytes

    @property
    def fits(self) -> bool:
        """Whether the changed run fits the GPU."""
        return self.after.bytes <= self.limit

    def describe(self) -> str:
        """Write step time, rate and memory, before and after."""
        before, after = self.before, self.after
        return (
            f"predicted {100 * self.faster:+.1f} % tokens/s (step {before.step_s:.3g} s -> "
            f"{after.step_s:.3g} s), memory {before.bytes / GIB:.1f} -> "
            f"{after.bytes / GIB:.1f} GiB"
        )


def predict_gain(
    config: TrainConfig,
    changes: Changes,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
) -> Gain:
    """Predict step time and memory of a run with some options changed, and without.

    Args:
        config: options of the run.
        changes: options to change, by field, such as ``{"micro_batch_size": 2}``.
        family: of the model.
        world_size: ranks.
        vocab_size: tokens of the model.
        system: constants of the cluster.

    Raises:
        ValueError: if the changed options conflict.
    """
    batch = config.batch
    # Keep a derived batch size, since a change may touch the options that it follows from.
    if not batch.global_batch_size:
        derived = batch.micro_batch_size * _data_ranks(config, world_size)
        changes = {"global_batch_size": derived, **changes}
    table = {**flat(config), **changes}
    # Drop options of features that the change turns off: ``compose`` would reject them.
    idle = idle_options(table, [type(part) for part in parts(config)]) - set(changes)
    changed = compose({k: v for k, v in table.items() if k not in idle}, type(config))
    resolve(changed, world_size, family=family, tokenizer_vocab_size=vocab_size)
    run = family, world_size, vocab_size, system
    return Gain(
        changes=changes,
        before=_cost(config, *run),
        after=_cost(changed, *run),
        limit=(system.memory_gib - CONTEXT_GIB) * GIB,
    )


def predict_gains(
    config: TrainConfig,
    candidates: Iterable[Changes],
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
) -> list[Gain]:
    """Return the gains of all changes without conflicts, the fastest first."""
    gains = []
    for changes in candidates:
        try:
            gains.append(predict_gain(config, changes, family, world_size, vocab_size, system))
        except ValueError:
            continue
    return sorted(gains, key=lambda gain: -gain.faster)


def _cost(
    config: TrainConfig, family: Family, world_size: int, vocab_size: int, system: System
) -> Cost:
    config = with_chosen_wgrads(config, family, world_size, vocab_size, system)
    step_s = predict_step(config, family, world_size, vocab_size, system).total
    memory = predict_memory(config, family, world_size, vocab_size, system)
    batch = config.batch
    sequences = batch.micro_batch_size * _data_ranks(config, world_size)
    tokens = (batch.global_batch_size or sequences) * batch.seq_length
    return Cost(step_s=step_s, tokens_per_s=tokens / step_s / world_size, bytes=memory.total)


def _data_ranks(config: TrainConfig, world_size: int) -> int:
    parallel = config.parallelism
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return world_size // (ranks * parallel.context_parallel_size)


def faster_changes(config: TrainConfig) -> Iterator[Changes]:
    """Yield single changes that may make a run faster without changing its results."""
    parallel, data = config.parallelism, config.data_parallelism
    tp = parallel.tensor_model_parallel_size
    if not data.is_fully_sharded:
        yield {"overlap_grad_reduce": True}
        if data.use_distributed_optimizer:
            yield {"overlap_param_gather": True}
            yield {"overlap_grad_reduce": True, "overlap_param_gather": True}
    if tp > 1:
        yield {"tensor_model_parallel_size": tp // 2}
        yield {"sequence_parallel": True}
    yield {"micro_batch_size": 2 * config.batch.micro_batch_size}
    yield from recomputing_less(config)
    yield from shorter_bubbles(config)
    if config.offloading.optimizer_cpu_offload:
        yield {"optimizer_cpu_offload": False}
    if config.run.cuda_graph_impl == "none":
        yield {"cuda_graph_impl": "local"}
        yield {"cuda_graph_impl": "full_iteration"}


def recomputing_less(config: TrainConfig) -> Iterator[Changes]:
    """Yield changes that recompute less in backward."""
    granularity = config.recomputation.recompute_granularity
    if granularity:
        yield {"recompute_granularity": ""}
    if granularity == "full":
        yield {"recompute_granularity": "selective"}


def shorter_bubbles(config: TrainConfig) -> Iterator[Changes]:
    """Yield changes to schedules with shorter bubbles, and to half the micro-batch."""
    if config.parallelism.pipeline_model_parallel_size == 1:
        return
    for name in ("zb-h1", "zb-v", "dualpipev"):
        yield {"pipeline_schedule": name, "num_virtual_stages_per_pipeline_rank": 1}
    chunks = config.pipeline.num_virtual_stages_per_pipeline_rank
    for more in range(max(2, chunks + 1), max(2, chunks) + 3):
        yield {
            "pipeline_schedule": "interleaved",
            "num_virtual_stages_per_pipeline_rank": more,
        }
    if config.batch.micro_batch_size > 1:
        yield {"micro_batch_size": config.batch.micro_batch_size // 2}


def smaller_changes(config: TrainConfig) -> Iterator[Changes]:
    """Yield single changes that may save memory without changing the results of a run."""
    parallel, data = config.parallelism, config.data_parallelism
    if not data.is_fully_sharded and not data.use_distributed_optimizer:
        yield {"use_distributed_optimizer": True}
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield {"sequence_parallel": True}
    if config.recomputation.recompute_granularity == "":
        light = ("layernorm", "moe_act" if config.experts.num_experts else "mlp_act")
        yield {"recompute_granularity": "selective", "recompute_modules": light}
        yield {"recompute_granularity": "selective"}
    if config.recomputation.recompute_granularity != "full":
        yield {"recompute_granularity": "full"}
    if config.batch.micro_batch_size > 1:
        yield {"micro_batch_size": config.batch.micro_batch_size // 2}
    yield {"tensor_model_parallel_size": 2 * parallel.tensor_model_parallel_size,
           "sequence_parallel": True}  # fmt: skip
    if not config.offloading.optimizer_cpu_offload:
        yield {"optimizer_cpu_offload": True}
    if not data.is_fully_sharded:
        yield {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "use_distributed_optimizer": False,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        }
