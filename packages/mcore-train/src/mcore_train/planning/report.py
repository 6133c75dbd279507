"""Formats a plan: the table, one layout in full, JSON, a recipe."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mcore_models.families import Family
from mcore_train.composition import TrainConfig
from mcore_train.options.recipe import Value, changed_options, to_flags, write_recipe
from mcore_train.planning.memory import GIB
from mcore_train.planning.search import Row, Search, expert_bytes, parameters
from mcore_train.planning.system import System

DAY = 86400.0
_LEFT_OUT = {"train_iters", "lr", "mock_data", "nproc", "recipe"}
"""Options that a recipe contains only if the user gave them: a plan does not need them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A finished search with its inputs."""

    search: Search
    config: TrainConfig
    """Options of the user."""
    family: Family
    command: str
    """``gpt``, ``mamba``, ``bert`` or ``t5``."""
    world_size: int
    vocab_size: int
    system: System
    train_tokens: float
    seconds: float
    """Duration of the search."""


def plan_text(plan: Planned, top: int) -> str:
    """Return the ranked table, the reasons of rejected layouts, and the rules of thumb."""
    batch, system = plan.config.batch, plan.system
    count = parameters(plan.config, plan.family, plan.vocab_size)
    hosts = -(-plan.world_size // system.gpus_per_node)
    name = plan.config.launch.model or plan.command
    lines = [
        (
            f"{name}, {count / 1e9:.2f} B parameters, on {plan.world_size} x {system.name} "
            f"({hosts} host{'s' * (hosts > 1)}, {system.network_gb_s:g} GB/s a GPU between)"
        ),
        (
            f"--seq-length {batch.seq_length} --global-batch-size {batch.global_batch_size}: "
            f"{batch.seq_length * batch.global_batch_size / 1e6:.2f} M tokens a step"
        ),
        (
            f"{plan.search.num_tried} layouts timed in {plan.seconds:.1f} s; constants: "
            f"{system.source}"
        ),
        "",
        *_table(plan, top),
        "",
        "not in the table:",
        *_rejections(plan.search),
        "",
        "rules of thumb for the best:",
        *(f"  {line}" for line in rules_of_thumb(plan, plan.search.rows[0])),
    ]
    if plan.config.experts.num_experts:
        whole, share = expert_bytes(plan.search.rows[0].config, plan.family, plan.vocab_size)
        lines += [
            "",
            (
                f"experts of a rank in bf16: {whole / GIB:.1f} GiB without expert parallelism, "
                f"{share / GIB:.1f} GiB in the best layout ({1 - share / whole:.0%} saved)"
            ),
        ]
    return "\n".join(lines)


def _table(plan: Planned, top: int) -> list[str]:
    rows = plan.search.rows[:top]
    width = max(len(row.name) for row in rows)
    days = bool(plan.train_tokens)
    head = f"{'#':>3} {'layout':{width}} {'tok/s/GPU':>10} {'MFU':>6} {'step':>9} "
    head += f"{'GiB':>6} {'exposed':>8} {'bubble':>7} {'rest':>6}"
    lines = [head + (f" {'days':>7}" if days else "")]
    for place, row in enumerate(rows, start=1):
        total = row.step.total
        exposed = sum(row.step.parts.get(axis, 0.0) for axis in AXES)
        rest = sum(row.step.parts.get(part, 0.0) for part in REST)
        line = (
            f"{place:>3} {row.name:{width}} {row.tokens_per_s:>10,.0f} {row.mfu:>6.1%} "
            f"{_duration(total):>9} {row.memory.total / GIB:>6.1f} {exposed / total:>8.1%} "
            f"{row.step.parts.get('bubble', 0.0) / total:>7.1%} {rest / total:>6.1%}"
        )
        if days:
            line += f" {training_days(plan, row):>7.1f}"
        lines.append(line)
    return lines


AXES = ("tp", "cp", "ep", "fsdp", "dp")
"""Parts of a step that are exposed communication."""
REST = ("optimizer", "offload", "host", "host waits")


def training_days(plan: Planned, row: Row) -> float:
    """Return the days of ``--train-tokens``."""
    return plan.train_tokens / (row.tokens_per_s * plan.world_size) / DAY


def _rejections(search: Search) -> list[str]:
    lines = []
    for reason, count in search.rejected.most_common():
        lines.append(f"  {count:>6} {reason} ({search.examples[reason]})")
    return lines or ["  none"]


def rules_of_thumb(plan: Planned, row: Row) -> list[str]:
    """Return, for each usual rule, whether a layout follows it, and else why not."""
    parallel = row.config.parallelism
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, inside = parallel.context_parallel_size, plan.system.gpus_per_node
    billions = parameters(plan.config, plan.family, plan.vocab_size) / 1e9
    length = plan.config.batch.seq_length
    zero = row.config.data_parallelism.sharding
    dp = plan.world_size // (tp * pp * cp)
    answers = [
        (
            f"tp <= {inside}, within a host",
            tp <= inside,
            f"tp {tp} exchanges every layer's activations, over NVLink only inside a host",
        ),
        (
            "pp for models above 70B",
            (pp > 1) == (billions > 70),
            f"{billions:.0f}B with pp {pp}: by the estimate "
            + (
                "a pipeline costs less than wider tensor parallelism or sharded weights here"
                if pp > 1
                else f"{zero or 'replicated'} weights fit and no bubble is cheaper"
            ),
        ),
        (
            "cp for sequences above 8 192 tokens",
            (cp > 1) == (length > 8192),
            f"{length} tokens with cp {cp}: "
            + (
                "splitting sequences is cheaper here than other ways to the same memory"
                if cp > 1
                else "activations fit without splitting sequences"
            ),
        ),
        ("dp fills the rest", True, f"dp {dp}"),
    ]
    return [
        f"{rule}: followed ({reason})"
        if follows and rule.startswith("dp")
        else f"{rule}: followed"
        if follows
        else f"{rule}: NOT followed; {reason}"
        for rule, follows, reason in answers
    ]


def explain_text(plan: Planned, place: int) -> str:
    """Return all details of one row of the table.

    Raises:
        ValueError: if the table has no such row.
    """
    row = chosen_row(plan, place)
    total, memory = row.step.total, row.memory
    lines = [
        f"{place}. {row.name}",
        f"{row.tokens_per_s:,.0f} tokens/s/GPU, {row.mfu:.1%} MFU, {_duration(total)} a step",
        "",
        "time",
    ]
    for part, seconds in sorted(row.step.parts.items(), key=lambda item: -item[1]):
        note = "exposed " * (part in AXES)
        lines.append(f"  {note + part:28} {_duration(seconds):>10} {seconds / total:>7.1%}")
    lines += ["", f"memory of the fullest rank, of {plan.system.memory_gib:.0f} GiB"]
    for part, size in memory.parts.items():
        lines.append(f"  {part:28} {size / GIB:>8.2f} GiB")
    lines.append(f"  {'fragmentation allowance':28} {memory.fragmentation / GIB:>8.2f} GiB")
    lines.append(f"  {'sum':28} {memory.total / GIB:>8.2f} GiB")
    if memory.host:
        lines.append(f"  {'in host memory':28} {memory.host / GIB:>8.2f} GiB")
    lines += ["", "flags", "  " + " ".join(layout_flags(plan, row))]
    return "\n".join(lines)


def chosen_row(plan: Planned, place: int) -> Row:
    """Return a row of the table by its number, from 1."""
    rows = plan.search.rows
    if not 1 <= place <= len(rows):
        raise ValueError(f"--explain {place}: the table has rows 1 to {len(rows)}.")
    return rows[place - 1]


def layout_flags(plan: Planned, row: Row) -> list[str]:
    """Return the flags in which a layout differs from the user's options."""
    before = changed_options(plan.config)
    after = changed_options(row.config)
    return to_flags({k: v for k, v in after.items() if before.get(k) != v})


def recipe_text(plan: Planned, row: Row, given: Collection[str]) -> str:
    """Return a layout as a recipe of ``mcore-train gpt``, with comments on further flags."""
    table: dict[str, Value] = {
        name: value
        for name, value in changed_options(row.config).items()
        if name in given or name not in _LEFT_OUT
    }
    head = (
        f"# mcore-train {plan.command} on {plan.world_size} x {plan.system.name}: {row.name}\n"
        f"# predicted: {row.tokens_per_s:,.0f} tokens/s/GPU, {_duration(row.step.total)} a "
        f"step, {row.memory.total / GIB:.1f} GiB\n"
        "# Add --lr, --train-iters or --train-samples, and data.\n"
    )
    return head + write_recipe(table)


def plan_json(plan: Planned) -> dict[str, Any]:
    """Return the plan as one JSON object, in bytes and seconds."""
    return {
        "command": plan.command,
        "parameters": parameters(plan.config, plan.family, plan.vocab_size),
        "gpus": plan.world_size,
        "system": asdict(plan.system),
        "seq_length": plan.config.batch.seq_length,
        "global_batch_size": plan.config.batch.global_batch_size,
        "layouts_timed": plan.search.num_tried,
        "search_s": round(plan.seconds, 2),
        "rows": [_row_json(plan, row) for row in plan.search.rows],
        "rejected": {
            reason: {"layouts": count, "example": plan.search.examples[reason]}
            for reason, count in plan.search.rejected.most_common()
        },
    }


def _row_json(plan: Planned, row: Row) -> dict[str, Any]:
    days: Mapping[str, float] = {}
    if plan.train_tokens:
        days = {"train_days": training_days(plan, row)}
    return {
        "layout": row.name,
        "tokens_per_s_per_gpu": row.tokens_per_s,
        "mfu": row.mfu,
        "step_s": row.step.total,
        **days,
        "step_parts_s": row.step.parts,
        "bubble_fraction": row.step.bubble_fraction,
        "rank_bytes": row.memory.total,
        "rank_parts_bytes": {
            **row.memory.parts,
            "fragmentation allowance": row.memory.fragmentation,
        },
        "host_bytes": row.memory.host,
        "flags": layout_flags(plan, row),
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
