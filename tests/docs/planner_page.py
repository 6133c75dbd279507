"""The page of the planner's errors: every training result of benchmarks/results, predicted.

``uv run python tests/docs/planner_page.py`` writes docs/planner.md anew.
"""

import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.planner_published import PublishedRow, published_rows
from house.sources import ROOT

from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.parsing import parse
from mcore_train.planning.memory import GIB, predict_memory
from mcore_train.planning.step_time import predict_step
from mcore_train.planning.system import SYSTEMS, System

PAGE = ROOT / "docs/planner.md"
RESULTS = ROOT / "benchmarks/results"
PROGRAMS = {"bert": "bert", "t5": "t5", "mamba2": "mamba", "nemotron": "mamba"}
"""Commands of other families, by how the names of their files begin."""
SKIPPED = ("checkpoint-", "decode-", "moe-layer", "preprocess-", "quant", "fp8-quality")
SKIPPED += ("fp8-errors", "determinism", "server", "load", "mamba-2.7b", "index")
SKIPPED += ("optimizers-", "observing-", "redesign-")
"""Results that time no training step by its options."""
GRAPHS = {
    "eager": "",
    "local": "--cuda-graph-impl local",
    "local, cut": "--cuda-graph-impl local",
    "local, whole": "--cuda-graph-impl local",
    "full_iteration": "--cuda-graph-impl full_iteration",
}
REMOVED = ("--gemm-backend torch", "--gemm-backend tuned", "--mlp-backend auto")
REMOVED += ("--mlp-backend torch", "--nccl-communicator-config-path /tmp/nccl.toml")
"""Options of some results that training has no more, or whose file is not kept."""
HELD_OUT = ("llama-2-13b", "llama-30b", "llama-70b", "llama-3-8b-262k", "llama-3-8b-long")
HELD_OUT += ("llama-3-8b-mtp", "llama-3-8b-pp", "llama-3-8b-16-layers-pp2", "nemotron")
HELD_OUT += ("llama-3-8b-8-layers-h200-x2-pp2", "llama-3-8b-h200-x2-zero1")
HELD_OUT += ("fp8-param-gather", "llama-3-8b-8-layers-long", "unmeasured")
"""Files from which no constant was set."""


SPLIT = {
    "GEMMs": (("gemm",), ("gemm", "experts")),
    "attention": (("attention",), ("attention",)),
    "other kernels": (("elementwise", "copy"), ("other kernels", "optimizer", "offload")),
    "exposed messages": (("exposed_communication",), ("tp", "cp", "ep", "dp", "fsdp")),
    "host": (("gap",), ("host", "host waits", "bubble")),
}
"""Kinds of kernels of a profile, and the parts of a prediction that correspond to them."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a step was off its prediction, and by how much where that follows from the cause."""

    why: str
    ms: float = 0.0
    """Milliseconds of a step that the cause adds."""
    gib: float = 0.0
    """Peak memory that the cause adds."""
    replaced: str = ""
    """Commit that replaced the timed code, later than the commit that added the row's file;
    empty: the row belongs to the comparison."""


_HOSTS = (
    "without graphs the host is the limit, and hosts differ: the same flags took 246 and 354 ms"
)
_GATED = (
    "measured with a gated layer that computed its activation within the GEMMs, since removed: "
    "14 336 channels of bf16 fewer are kept of each layer and micro-batch in flight, {} of them"
)
_LEFT_OVER = (
    "not fp8's: bf16, the first of the ways that one process measured, is within 2 %, and all "
    "later ones have the same 2.9 GiB more than where "
    "they were measured again (`llama-3-8b-8-layers-fp8-recipes-cudnn-h200-x1`)"
)
_KEPT = 14336 * 2 * 8192 / 2**30
OUTLIERS = {
    "nemotron": Cause(
        "its Mamba layers ran in plain torch (benchmarks/README.md), which moves and keeps "
        "float32 tensors of a whole scan: 505 ms of copies and elementwise kernels in its "
        "profile; the planner counts the fused scan",
        replaced="86ba8424",
    ),
    "graphs-of-layers-h200: 32 experts, 24 layers, local, cut": Cause(
        "a variant, since removed, whose graphs ended at the experts, which the host launched: "
        "24 layers x 4 micro-batches x 2.7 ms, above 106 ms of kernels; hosts differ",
        ms=24 * 4 * 0.85 * 3.2 - 106,
    ),
    "graphs-of-layers-h200: gpt2-345m, eager": Cause(_HOSTS),
    "gpt2-345m-recomputed": Cause(
        f"{_HOSTS}. Memory: 0.76 GiB more than launched singly, where graphs of layers without "
        "recomputation need 0.2 more; the recomputed inputs of fc2 are 0.75 GiB, 32 MiB in "
        "each of 24 layers; what holds them is not found"
    ),
    "gpt2-345m": Cause(_HOSTS),
    "llama-30b-h200-x2-tp2": Cause(
        "rounding weights stochastically was 18 kernels of torch at that commit, which move "
        "150 bytes for each of 16.3e9 weights; one kernel now",
        ms=1e3 * 16.26e9 * 150 / 4.2e12,
        replaced="db18755d",
    ),
    "llama-3-8b-8-layers-h200-x4-tp4-sp-overlap": Cause(
        "--tp-comm-overlap makes the launches of the host the limit, which the planner does "
        "not count: the GPU waits 221 ms for the host in the profile below, 13 ms on another "
        "host; steps take 302 to 389 ms"
    ),
    "mixtral-8x7b-4-layers": Cause(
        "a commit before rows of experts moved without sorts and their gradients were added "
        "within the GEMM: 174 ms of elementwise kernels and copies in its profile",
        replaced="d903233b",
    ),
    "qwen3-30b-16-layers-h200-x2-ep2-ways: symmetric": Cause(
        "kernels that read the other rank's memory wait for that rank: 316 ms of kernels other "
        "than GEMMs, 129 predicted; the planner counts no waits of unevenly loaded ranks"
    ),
    "mixtral-8x7b-3-layers": Cause(
        "without quack and flash-attn-4, of which the planner counts the latter; experts are "
        "not forced to be balanced, as the planner takes them; steps take 289 to 318 ms"
    ),
    "llama-3-8b-pp-schedules-h200-x4: dualpipev": Cause(
        "its messages of both ways shared a group; with a group for each way, as now, forward "
        "and backward take 3 356 ms instead of 3 663 (`llama-3-8b-pp4-message-groups-h200-x4`)",
        ms=3662.554 - 3355.675,
        replaced="0bec2d3d",
    ),
    "llama-3-8b-pp4-schedules-h200-x4: interleaved": Cause(
        _GATED.format(44), gib=-44 * _KEPT, replaced="c579de57"
    ),
    "llama-3-8b-pp4-schedules-h200-x4": Cause(
        _GATED.format(32), gib=-32 * _KEPT, replaced="c579de57"
    ),
    "llama-3-8b-pp4-h200-x4: interleaved": Cause(
        "weights and gradients of 1f1b, which the same process had measured before, were not "
        "freed at that commit: 6 bytes for each of 2.27e9 parameters",
        gib=6 * 2.270e9 / 2**30,
        replaced="538154a9",
    ),
    "qlora-llama-3-8b-h200": Cause(
        "4-bit weights were widened by plain torch at that commit, in 14.5 ms for 8 layers, "
        "and by one kernel since, in 1.5 (`qlora-llama-3-8b-8-layers-widening-h200`): "
        "32 layers, forward and backward",
        ms=2 * 4 * (14.49 - 1.49),
        replaced="00676e16",
    ),
    "llama-3-8b-8-layers-fp8-recipes-h200-x1": Cause(_LEFT_OVER, gib=2.87),
}
"""Why a row is off by more than 10 % in time or 5 % in memory, by how its name begins."""
CHOICES = {
    "Llama-3-8B on 4 GPUs, 16 sequences of 8 192 tokens": (
        "llama-3-8b-h200-x4-dp",
        "llama-3-8b-pp4-schedules-h200-x4: 1f1b",
        "llama-3-8b-pp4-schedules-h200-x4: interleaved",
        "llama-3-8b-pp4-schedules-h200-x4: zb-h1",
        "llama-3-8b-pp-schedules-h200-x4: zb-v",
        "llama-3-8b-pp-schedules-h200-x4: dualpipev",
    ),
    "its schedules on 4 pipeline ranks": (
        "llama-3-8b-pp4-schedules-h200-x4: 1f1b",
        "llama-3-8b-pp4-schedules-h200-x4: interleaved",
        "llama-3-8b-pp4-schedules-h200-x4: zb-h1",
        "llama-3-8b-pp-schedules-h200-x4: zb-v",
        "llama-3-8b-pp-schedules-h200-x4: dualpipev",
    ),
    "16 layers of it on 2 pipeline ranks": (
        "llama-3-8b-16-layers-pp2-schedules-h200-x2: 1f1b",
        "llama-3-8b-16-layers-pp2-schedules-h200-x2: zb-v",
        "llama-3-8b-16-layers-pp2-schedules-h200-x2: dualpipev",
    ),
    "Llama-3-8B on 2 GPUs that must shard or recompute": (
        "llama-3-8b-h200-x2-zero1-offload",
        "llama-3-8b-h200-x2-zero1-recompute",
        "llama-3-8b-h200-x2-zero2",
        "llama-3-8b-h200-x2-zero3",
    ),
    "8 layers, 131 072 tokens on 4 context ranks": (
        "llama-3-8b-8-layers-131k-cp4-a2a",
        "llama-3-8b-8-layers-131k-cp4-all_gather",
        "llama-3-8b-8-layers-131k-cp4-p2p",
        "llama-3-8b-8-layers-131k-h200-x4-cp2x2",
    ),
    "Mixtral, 12 layers, 4 expert ranks": (
        "mixtral-8x7b-h200-x4-ep: alltoall",
        "mixtral-8x7b-h200-x4-ep: alltoall beside",
        "mixtral-8x7b-h200-x4-ep: allgather",
        "mixtral-8x7b-h200-x4-ep: symmetric",
    ),
    "Qwen3-30B-A3B, 16 layers, 2 expert ranks": (
        "qwen3-30b-16-layers-h200-x2-ep2",
        "qwen3-30b-16-layers-h200-x2-ep2-allgather",
        "qwen3-30b-16-layers-h200-x2-ep2-graph",
    ),
    "4 layers of Llama-3-8B that keep less": (
        "offload-h200: activations",
        "offload-h200: recompute",
        "offload-h200: optimizer",
        "offload-h200: half of the optimizer",
    ),
}
"""Layouts of one model and batch that were all measured."""


_INTRODUCTION = (
    "Written by `uv run python tests/docs/planner_page.py`. [From a cluster to a layout]"
    "(planning.md) shows how the planner is used."
)
_METHOD = (
    "Each of the {count} training steps of `benchmarks/results` is predicted from its flags "
    "alone, with the shipped constants of the H200. Memory is the peak of torch's allocator, "
    "without the allowance for fragmentation. Errors are predicted over measured, less 1."
)
_BIAS = (
    "The mean error of time is {:+.1f} % over all and {:+.1f} % over the rows held out. The "
    "goals are 4 % (median) and 10 % (worst) for time, 1.5 % and 5 % for memory: the medians "
    "meet them, the worst rows are the outliers."
)
_REPLACED = (
    "A row is outside the comparison if a later commit replaced the code that it timed, and no "
    "flag runs that code. `git show COMMIT` prints the replacement. A test shows that the row "
    "was added earlier (`git log --diff-filter=A -- benchmarks/results/FILE.json`). The last "
    "row of the first table includes these rows."
)
_CHOICES = (
    "`dualpipev` on 4 ranks counts with a group of messages for each way, as it has now: see "
    "the outliers."
)
_OUTLIERS = (
    "More than 10 % off in time, or 5 % in memory. The error that is left counts the cause, "
    "where it has a number, and is the distance to the measured steps between p10 and p90."
)
_SPLITS = (
    "Where time parts from the prediction, for each row that is more than 4 % off and has a "
    "profile: milliseconds measured in the profiled step, then predicted. The profiler slows "
    "the host, so that `host` holds more than a step without it."
)
_PUBLISHED = (
    "Measured with other programs. The planner predicts ours; `theirs` counts what is known to "
    "be otherwise there, with the same constants: in Megatron-LM tensor messages pass under "
    "GEMMs, and slow them by 45 % of their time; Megatron-FSDP gathers without copies, which "
    "are 27 % of a step of our fully sharded 8B; in 2021 attention moved its scores through "
    "memory, 52 bytes for each. Layouts and batches of the scaling studies are assumed where "
    "they were published as pictures only; the weak scaling from 2B to 462B has its ends here."
)
_QWEN = (
    "The row that is furthest off is Qwen3-30B-A3B in fp8: 5 275 tokens/s on 16 GPUs, where "
    "another program published 12 040 in bf16 on 8. Two programs differ by more than the "
    "prediction does from either."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A measured step beside its prediction."""

    name: str
    gpus: int
    measured_ms: float
    predicted_ms: float
    range_ms: tuple[float, float]
    """From p10 to p90 of the measured steps."""
    measured_gib: float
    predicted_gib: float
    measured_split_ms: Mapping[str, float]
    """Of a profiled step, whose host is slower, by kind of kernel; empty: none was kept."""
    predicted_parts_s: Mapping[str, float]

    @property
    def time_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_gib / self.measured_gib - 1

    @property
    def is_held_out(self) -> bool:
        """Whether no constant was set from its file."""
        return self.name.startswith(HELD_OUT)

    @property
    def is_replaced(self) -> bool:
        """Whether the code that was timed is no longer in the repository."""
        return self.is_off and bool(self.cause.replaced)

    @property
    def is_far(self) -> bool:
        """Whether a row of the comparison is off by more than the goals."""
        return self.is_off and not self.is_replaced

    @property
    def is_off(self) -> bool:
        """Whether it is off by more than the goals."""
        return abs(self.time_error) > 0.1 or abs(self.memory_error) > 0.05

    @property
    def cause(self) -> Cause:
        """Why it is off, if the page has a reason."""
        found = [cause for name, cause in OUTLIERS.items() if self.name.startswith(name)]
        return found[0] if found else Cause("")

    @property
    def time_left(self) -> float:
        """Error of the time with the cause, to the nearest of the measured steps' range."""
        predicted = self.predicted_ms + self.cause.ms
        low, high = self.range_ms
        return predicted / min(max(predicted, low), high) - 1

    @property
    def memory_left(self) -> float:
        """Error of the memory with the cause."""
        return (self.predicted_gib + self.cause.gib) / self.measured_gib - 1


def compare_results() -> list[Comparison]:
    """Predict every training step of benchmarks/results."""
    return [row for file in sorted(RESULTS.glob("*.json")) for row in _compare_file(file)]


def _compare_file(file: Path) -> Iterator[Comparison]:
    name = file.stem
    if name.startswith(SKIPPED):
        return
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    flags = table.get("flags")
    if flags is None:
        return  # another program's
    if isinstance(table.get("step_ms"), float):
        yield _compare(name, table, table, flags)
    if "kernel_step_ms" in table:  # fastest, median and slowest with a kernel
        low, middle, high = table["kernel_step_ms"]
        entry = {"step_ms": middle, "step_ms_p10": low, "step_ms_p90": high}
        yield _compare(name, table, {**table, **entry}, flags)
    for kind in ("ways", "schedules", "cases"):
        for way, entry in dict(table.get(kind) or {}).items():
            for inner, own, more in _entries(kind, way, entry):
                base = flags[way] if isinstance(flags, dict) else flags
                yield _compare(f"{name}: {inner}", table, own, f"{base} {more}")


def _entries(
    kind: str, way: str, entry: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield each timed way of a file with the flags that make it."""
    if not {"step_ms", "ms"} & set(entry):
        for inner in filter(GRAPHS.__contains__, entry):
            yield f"{way}, {inner}", entry[inner], GRAPHS[inner]
        return
    more = str(entry.get("flags", "")).partition(" --by ")[0]
    if kind == "schedules":
        more = f"--pipeline-schedule {way}"
        more += " --num-virtual-stages-per-pipeline-rank 2" * (way == "interleaved")
    elif kind == "cases" and way.startswith("fp8-"):
        recipe = way.removeprefix("fp8-")
        form = "e4m3" if recipe == "blockwise" else "hybrid"
        more = f"--fp8-format {form} --fp8-recipe {recipe}"
    yield way, entry, more


def _compare(
    name: str, table: Mapping[str, Any], entry: Mapping[str, Any], flags: str
) -> Comparison:
    program = next((p for start, p in PROGRAMS.items() if name.startswith(start)), "gpt")
    for words in REMOVED:
        flags = flags.replace(words, "")
    command = FAMILY_COMMANDS[program]
    flags += f" {entry.get('chosen', '')}"  # flags that the run chose on its GPU
    words = shlex.split(flags.replace("recipes/", f"{ROOT}/recipes/"))
    config = parse(words, f"mcore-train {program}", command.run, command.beginning)
    gpus = entry.get("num_gpus") or table.get("num_gpus") or 1
    vocab_size = config.tokenizer.vocab_size
    system = _system(table, entry)
    step = predict_step(config, command.family, gpus, vocab_size, system)
    memory = predict_memory(config, command.family, gpus, vocab_size, system)
    return Comparison(
        name=name,
        gpus=gpus,
        measured_ms=entry.get("step_ms") or entry["ms"],
        range_ms=_range_ms(entry),
        predicted_ms=1e3 * step.total,
        measured_gib=entry["peak_gib"],
        predicted_gib=memory.allocated / GIB,
        measured_split_ms=entry.get("split_ms") or {},
        predicted_parts_s=step.parts,
    )


def _range_ms(entry: Mapping[str, Any]) -> tuple[float, float]:
    name = "step_ms" if "step_ms" in entry else "ms"
    return entry.get(f"{name}_p10", entry[name]), entry.get(f"{name}_p90", entry[name])


def _system(table: Mapping[str, Any], entry: Mapping[str, Any]) -> System:
    """Return the H200's constants, with the attention kernel that the run had."""
    has = table.get("flash_attn_4")
    if has is None:
        has = "flash-attn-4" in (table.get("kernel_packages") or {})
    has &= "transformer_engine" not in str(entry.get("flags", ""))
    return SYSTEMS["h200"] if has else SYSTEMS["h200"].without_flash_attn_4()


def _split_lines(rows: Iterable[Comparison]) -> Iterator[str]:
    """Write what a profiled step measured of each kind of kernel beside the prediction."""
    yield f"| run | {' | '.join(SPLIT)} |"
    yield "| --- |" + " --- |" * len(SPLIT)
    for row in rows:
        cells = []
        for measured, predicted in SPLIT.values():
            both = (
                sum(row.measured_split_ms.get(kind, 0.0) for kind in measured),
                1e3 * sum(row.predicted_parts_s.get(part, 0.0) for part in predicted),
            )
            cells.append("{:.0f}, {:.0f}".format(*both))
        yield f"| `{row.name}` | {' | '.join(cells)} |"


def errors(rows: list[Comparison], kind: str) -> tuple[float, float]:
    """Return the median and the worst error of rows, both without sign."""
    found = [abs(getattr(row, f"{kind}_error")) for row in rows]
    return statistics.median(found), max(found)


def choice_losses(rows: list[Comparison]) -> dict[str, tuple[str, str, float]]:
    """Return of each set of layouts the planner's choice, the best, and what it costs.

    Measured times are those without the causes of ``OUTLIERS``.
    """
    by_name = {row.name: row for row in rows}
    found = {}
    for title, names in CHOICES.items():
        layouts = [by_name[name] for name in names]
        chosen = min(layouts, key=lambda row: row.predicted_ms)
        best = min(layouts, key=lambda row: row.measured_ms - row.cause.ms)
        times = [row.measured_ms - row.cause.ms for row in (chosen, best)]
        found[title] = chosen.name, best.name, times[0] / times[1] - 1
    return found


def page(rows: list[Comparison]) -> str:
    """Write the page, but for what others published."""
    compared = [row for row in rows if not row.is_replaced]
    held = [row for row in compared if row.is_held_out]
    plain = [row for row in compared if not row.is_far]
    lines = [
        "# How well the planner predicts",
        "",
        _INTRODUCTION,
        "",
        _METHOD.format(count=len(rows)),
        "",
        "| rows | | time, median | time, worst | memory, median | memory, worst |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for title, chosen in (
        ("all but the rows of replaced code", compared),
        ("without the outliers below", plain),
        ("held out: no constant was set from their files", held),
        ("all, with the rows of replaced code", rows),
    ):
        time, memory = errors(chosen, "time"), errors(chosen, "memory")
        numbers = " | ".join(f"{100 * e:.1f} %" for e in (*time, *memory))
        lines.append(f"| {title} | {len(chosen)} | {numbers} |")
    bias = statistics.mean(row.time_error for row in compared)
    held_bias = statistics.mean(row.time_error for row in held)
    lines += [
        "",
        _BIAS.format(100 * bias, 100 * held_bias),
        "",
        "## The planner's choice beside the best that was measured",
        "",
        "| layouts | planner's choice | best measured | choice costs |",
        "| --- | --- | --- | --- |",
    ]
    for title, (chosen_name, best, loss) in choice_losses(rows).items():
        lines.append(f"| {title} | `{chosen_name}` | `{best}` | {100 * loss:.1f} % |")
    lines += ["", _CHOICES]
    lines += ["", "## Outliers", "", _OUTLIERS, "", *_cause_lines(r for r in rows if r.is_far)]
    lines += ["", "## Rows of replaced code", "", _REPLACED, ""]
    lines += _cause_lines(row for row in rows if row.is_replaced)
    profiled = [row for row in rows if abs(row.time_error) > 0.04 and row.measured_split_ms]
    lines += ["", _SPLITS, "", *_split_lines(profiled)]
    lines += ["", "## Every row", ""]
    lines += [
        "| run | GPUs | measured ms | predicted | error | measured GiB | predicted | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        held_mark = " (held out)" if row.is_held_out else ""
        lines.append(
            f"| `{row.name}`{held_mark} | {row.gpus} | {row.measured_ms:.1f} | "
            f"{row.predicted_ms:.1f} | {100 * row.time_error:+.1f} % | "
            f"{row.measured_gib:.2f} | "
            f"{row.predicted_gib:.2f} | {100 * row.memory_error:+.1f} % |"
        )
    return "\n".join(lines) + "\n"


def _cause_lines(rows: Iterable[Comparison]) -> Iterator[str]:
    """Yield a table of rows: their errors, and what is left after the known cause."""
    yield "| run | time | with the cause | memory | with the cause | why |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        pairs = (row.time_error, row.time_left), (row.memory_error, row.memory_left)
        numbers = " | ".join(f"{100 * error:+.1f} %" for pair in pairs for error in pair)
        commit = f" (replaced by {row.cause.replaced})" * bool(row.cause.replaced)
        yield f"| `{row.name}` | {numbers} | {row.cause.why}{commit} |"


def published() -> list[str]:
    """Write what others published beside the prediction for our program."""
    found = published_rows()
    lines = [
        "",
        "## Rows that others published",
        "",
        _PUBLISHED,
        "",
        "| model | GPUs | layout | published | ours | theirs | | error of theirs | source |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        digits = 1 if row.ours < 100 else 0
        lines.append(
            f"| {row.model} | {row.gpus} | {row.layout} | {row.published:g} | "
            f"{row.ours:.{digits}f} | {row.theirs:.{digits}f} | {row.unit} | "
            f"{100 * row.difference:+.0f} % | {row.source} |"
        )
    lines += ["", _QWEN, "", *_summary(found)]
    return lines


def _summary(found: Sequence[PublishedRow]) -> Iterator[str]:
    """Write the mean error and the bias of the rows of each GPU."""
    yield "| GPU | rows | mean error | median | bias | mean error of ours | bias of ours |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for title in ("H100", "A100"):
        rows = [row for row in found if ("A100" in row.model) == (title == "A100")]
        theirs = [row.difference for row in rows]
        ours = [row.ours / row.published - 1 for row in rows]
        numbers = (
            statistics.mean(map(abs, theirs)),
            statistics.median(map(abs, theirs)),
            statistics.mean(theirs),
            statistics.mean(map(abs, ours)),
            statistics.mean(ours),
        )
        signs = ("", "", "+", "", "+")
        text = " | ".join(f"{100 * n:{s}.0f} %" for n, s in zip(numbers, signs, strict=True))
        yield f"| {title} | {len(rows)} | {text} |"


if __name__ == "__main__":
    text = page(compare_results()) + "\n".join(published()) + "\n"
    PAGE.write_text(text, encoding="utf-8")
