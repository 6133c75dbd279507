"""The table of docs/performance.md beside other programs, its plot, and the goals missed.

Every figure of ours is read from a file of benchmarks/results, and so is the peer's where its
run was kept. Other figures of peers were noted when they ran on the same hosts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Read = Callable[[str], dict[str, Any]]
"""Reads a result by the name of its file."""
Place = tuple[str, ...]
"""Name of a file, then the keys of a case in it."""

BANDWIDTH = 4.8e12
"""Bytes a second of an H200's memory, from NVIDIA's data sheet."""
FP8_FLOPS, ATTENTION_FLOPS = 1330e12, 580e12
"""Operations/s of long GEMMs in fp8, and of flash-attn-4 over 4 096 tokens."""
LAYER_WEIGHTS, HEAD_WEIGHTS = 6_979_321_856, 525_336_576
"""Weights in the matrices of all layers of Llama-3-8B, and in its head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One row: a figure of ours and a peer's. More is better, unless in milliseconds."""

    work: str
    key: str
    """Name of the figure in its case."""
    ours: Place
    peer: str
    """Program and version."""
    theirs: Place | float
    """Where the peer's figure is; a number was noted, and its run was not kept."""
    goal: str = ""
    factor: float = 0.0
    """The goal is this times the figure at ``of``; 0: there is none."""
    of: Place | None = None
    """None: the goal is ``factor`` itself."""
    limit: float | None = None
    """None: computed from the file of ours, see ``_limit``."""


_DENSE = ("llama-3-8b-h200-x4-dp-beside-peer",)
_PEER = ("megatron-core-llama-3-8b-h200-x4-dp",)
_FP8 = ("llama-3-8b-h200-x4-dp-fp8",)
_LAYERS = "llama-3-8b-8-layers-te-h200"
_EXPERTS = ("qwen3-30b-h200-x4-ep-allgather",)
_MIXTRAL = ("mixtral-8x7b-h200-x4-ep-symmetric", "ways", "symmetric")
_MEGATRON, _TE = "megatron-core 0.19.2", "Transformer Engine 2.20.2 in our layers"
_PER_GPU = {"key": "tokens_per_s_per_gpu"}
_FLOPS = {"key": "tflops_per_gpu"}


def _training() -> list[Comparison]:
    text = "Llama-3-8B, {}, 4 GPUs, tokens/s of each"
    bf16, fp8 = text.format("bf16"), text.format("fp8")
    ways = {name: (_LAYERS, "ways", name) for name in ("bf16", "delayed")}
    peers = {name: (_LAYERS, "ways", f"{name}, te") for name in ways}
    fp8_goal: dict[str, Any] = {"goal": "17,000", "factor": 17000}
    return [
        Comparison(
            work=bf16, ours=_DENSE, peer=_MEGATRON, theirs=_PEER, goal="1.12 times the peer",
            factor=1.12, of=_PEER, **_PER_GPU,
        ),
        Comparison(work=bf16, ours=_DENSE, peer="torchtitan 0.2.2", theirs=9808, **_PER_GPU),
        Comparison(
            work=fp8, ours=_FP8, peer=_MEGATRON, theirs=13213, **fp8_goal, **_PER_GPU
        ),
        Comparison(
            work=fp8, ours=_FP8, peer="torchtitan 0.2.2", theirs=11288, **fp8_goal, **_PER_GPU
        ),
        Comparison(
            work="8 layers of it, bf16, 1 GPU, tokens/s", ours=ways["bf16"], peer=_TE,
            theirs=peers["bf16"], goal="820 ms a step", factor=32768 / 0.820, **_PER_GPU,
        ),
        Comparison(
            work="8 layers of it, fp8 `delayed`, 1 GPU, tokens/s", ours=ways["delayed"],
            peer=_TE, theirs=peers["delayed"], goal="1.40 times our bf16", factor=1.40,
            of=ways["bf16"], **_PER_GPU,
        ),
        Comparison(
            work="Qwen3-30B-A3B, 20 layers, 4 GPUs, TFLOP/s of each", ours=_EXPERTS,
            peer=_MEGATRON, theirs=82, goal="400", factor=400, **_FLOPS,
        ),
        Comparison(
            work="Mixtral-8x7B, 12 layers, 4 GPUs, TFLOP/s of each", ours=_MIXTRAL,
            peer=_MEGATRON, theirs=440, goal="540", factor=540, **_FLOPS,
        ),
    ]  # fmt: skip


def _decoding() -> list[Comparison]:
    ours, theirs = "decode-llama-3-8b-beside-vllm-h200", "vllm-llama-3-8b-h200"
    cases = {f"batch {n}": f"{n} text{'s' * (n > 1)}" for n in (1, 32)}
    return [
        Comparison(
            work=f"decode Llama-3-8B, bf16, {text}, tokens/s", key="tokens_per_s",
            ours=(ours, "cases", case), peer="vLLM 0.25.1", theirs=(theirs, "cases", case),
            goal="1.25 times the peer", factor=1.25, of=(theirs, "cases", case),
        )
        for case, text in cases.items()
    ]  # fmt: skip


def _serving_in_fp8() -> list[Comparison]:
    """Llama-3-8B on one GPU, weights, keys and values in fp8, without the whole-step kernel."""
    ours, theirs = "decode-llama-3-8b-fp8-beside-vllm-h200", "vllm-llama-3-8b-fp8-h200"
    works = {
        "batch 1": "decode Llama-3-8B, fp8, 1 text, tokens/s",
        "batch 8": "decode Llama-3-8B, fp8, 8 texts, tokens/s",
        "batch 32": "decode Llama-3-8B, fp8, 32 texts, tokens/s",
        "offline 512x128x2048": "512 requests of 128 + 2 048 tokens, fp8, tokens/s",
        "offline 512x1000x1000": "512 requests of 1 000 + 1 000 tokens, fp8, tokens/s",
    }
    our_cases = {"offline 512x128x2048": "offline"}  # other cases have the peer's names
    rows = [
        Comparison(
            work=work, key="tokens_per_s", ours=(ours, "cases", our_cases.get(case, case)),
            peer="vLLM 0.25.1", theirs=(theirs, "cases", case), goal="1.25 times the peer",
            factor=1.25, of=(theirs, "cases", case), limit=_offline_limit(case),
        )
        for case, work in works.items()
    ]  # fmt: skip
    operations_s = 4096 * 2 * LAYER_WEIGHTS / FP8_FLOPS + 32 * 2 * 4096**3 / ATTENTION_FLOPS
    first = "cases", "first token"
    rows.append(
        Comparison(
            work="a prompt of 4 096 tokens to its first token, fp8, ms", key="ms",
            ours=(ours, *first), peer="vLLM 0.25.1", theirs=(theirs, *first),
            goal="50 ms", factor=50, limit=1e3 * operations_s,
        )
    )  # fmt: skip
    return rows


def _offline_limit(case: str) -> float | None:
    """Return the tokens/s of a GPU that only reads keys and values and runs GEMMs, in fp8.

    None for cases that are not ``offline REQUESTSxPROMPTxNEW``.
    """
    if not case.startswith("offline"):
        return None
    requests, prompt, new = map(int, case.split()[1].split("x"))
    tokens = requests * new
    key_bytes = tokens * (prompt + new / 2) * 32 * 2 * 8 * 128
    flops = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS)
    prompts_s = requests * prompt * 2 * LAYER_WEIGHTS / FP8_FLOPS
    return tokens / (key_bytes / BANDWIDTH + tokens * flops / FP8_FLOPS + prompts_s)


COMPARISONS = (*_training(), *_decoding(), *_serving_in_fp8())

INTRODUCTION = """\
![Ours over each other program, and the goals](performance_peers.svg)

H200s, torch 2.11.0. The two programs of a row ran on the same host minutes apart. Figures with
an asterisk ran on such hosts in the same week, and their runs were not kept. Spread: p10 and
p90 of our steps over the median. The limit of training is the time of its GEMMs and attention
in the profiled step; of decoding, the memory's bandwidth over the bytes of the weights."""
HEAD = "work | ours | spread | other program | ours over it | goal | limit"


def case_of(read: Read, place: Place) -> dict[str, Any]:
    """Return a case of a result."""
    case = read(place[0])
    for key in place[1:]:
        case = case[key]
    return case


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a row, in the unit of ours."""

    ours: float
    theirs: float
    ratio: float
    """How many times as good ours is."""
    goal_ratio: float
    """Of the goal over the peer's; 0: no goal."""
    limit: float

    @property
    def is_missed(self) -> bool:
        """Whether ours is worse than the goal."""
        return self.ratio < self.goal_ratio


def figures(read: Read, row: Comparison) -> Figures:
    """Read the numbers of a row."""
    ours, theirs = case_of(read, row.ours)[row.key], row.theirs
    if isinstance(theirs, tuple):
        theirs = case_of(read, theirs)[row.key]
    goal = row.factor if row.of is None else row.factor * case_of(read, row.of)[row.key]
    ratios = [ours / theirs, goal / theirs]
    if row.key == "ms":
        ratios = [theirs / ours, theirs / goal if goal else 0.0]
    return Figures(ours, theirs, *ratios, row.limit or _limit(read, row))


def _limit(read: Read, row: Comparison) -> float:
    """Return the rate without everything that is not a GEMM or attention, or not a weight."""
    case = case_of(read, row.ours)
    if "split_ms" in case:
        split = case["split_ms"]
        return case[row.key] * split["step"] / (split["gemm"] + split["attention"])
    num_texts = int(row.ours[-1].rpartition(" ")[2])  # "batch 32"
    return num_texts * BANDWIDTH / read(row.ours[0])["weight_bytes"]


def spread(case: dict[str, Any]) -> str:
    """Return p10 and p90 of a case over its median, in per cent."""
    key = next((k for k in ("step_ms", "tokens_per_s", "ms") if f"{k}_p10" in case), "")
    parts = [f"{100 * (case[f'{key}_p{p}'] / case[key] - 1):+.1f}" for p in (10, 90) if key]
    return f"{' to '.join(parts)} %" if key else ""


def rows(read: Read) -> Iterator[Sequence[object]]:
    """Yield the rows of the table as text."""
    for row in COMPARISONS:
        numbers, digits = figures(read, row), int(row.key == "ms")
        peer = f"{row.peer}: {numbers.theirs:,.{digits}f}"
        yield (
            row.work,
            _link(f"{numbers.ours:,.{digits}f}", row.ours[0]),
            spread(case_of(read, row.ours)),
            _link(peer, row.theirs[0]) if isinstance(row.theirs, tuple) else f"{peer}*",
            f"{numbers.ratio:.2f}",
            row.goal + (" (missed)" if numbers.is_missed else ""),
            f"{numbers.limit:,.{digits}f}",
        )


def _link(text: str, name: str) -> str:
    return f"[{text}](../benchmarks/results/{name}.json)"


MISSES: Sequence[tuple[str, Place | None, str]] = (
    (
        "Llama-3-8B, bf16, 4 GPUs: 1.12 times megatron-core",
        _DENSE,
        """GEMMs run at the limit of power, where the GPU slows them by most of what is saved
        elsewhere: cublasLt's best proposals shortened a step by 0.6 %, quack's gated GEMMs by
        0.3 %. Gathers and sums by copy engines would save 0.8 %; fewer CTAs of NCCL cost 0 to
        6 %.""",
    ),
    (
        "Llama-3-8B, fp8, 4 GPUs: 17 000 tokens/s",
        _FP8,
        """Weights and their transposes are cast once a step for its four micro-batches;
        activations are cast into both orders in one pass, the gated one within its activation.
        Casts within norms saved 0.4 % for 691 lines and were removed.""",
    ),
    (
        "8 layers, bf16: 820 ms",
        (_LAYERS, "ways", "bf16"),
        """830 to 848 ms on other GPUs. Elementwise kernels run at a copy's rate, 4.2 to 4.9
        TB/s.""",
    ),
    (
        "8 layers, fp8 `delayed`: 1.40 times bf16",
        (_LAYERS, "ways", "delayed"),
        """Casts are 14 ms of elementwise work more than in bf16: without any the ratio would be
        1.38.""",
    ),
    (
        "Qwen3-30B-A3B, 20 layers, 4 GPUs: 400 TFLOP/s",
        _EXPERTS,
        """Weight gradients of four micro-batches in one GEMM (`--moe-wgrad-micro-batches 4`)
        make a step of one GPU 1.14 times as fast; they were not run on four. On four GPUs an
        expert has four times the rows, and all of the fixed number of rows are stored: the
        planner predicts a gain of 1 % for 42 GiB, so `auto` is 1. For `--micro-batch-size 2`
        and 4 it predicts gains of 5 % and 8 %: half and a quarter of the exchanges and of the
        traffic of main gradients, without copies.""",
    ),
    (
        "fp8 experts over bf16, whole step: 1.20 (Qwen3-30B-A3B) and 1.25 (Mixtral)",
        None,
        """1.05 and 1.14. Weights' gradients, a third of the FLOPs, are GEMMs in bf16. Of the
        25.2 ms of a layer of Mixtral's sizes GEMMs take 19.8 and casts 4.3
        (`moe-layer-fp8-main-grads-h200`). Weight gradients in fp8 were estimated and not built:
        in Mixtral's step of 300 ms they would save half of 53 ms, and cost 4 to 6 ms to scale
        and transpose both factors by expert, and 10 ms to add torch's bf16 result to the main
        gradients (2.5 with four micro-batches together). That is 1.20 at best, with gradients
        rounded to e4m3. Qwen3 would save 15 ms of GEMMs and need 16 of casts.""",
    ),
    (
        "a prompt of 4 096 tokens of Llama-3-8B to its first token, bf16: 80 ms",
        None,
        """97.3 ms through the engine (`first-token-llama-3-8b-h200`), 99.1 while the last
        layer's MLP ran on all tokens. Of a prompt after a pause GEMMs take 73, attention 7.6,
        norms and gates 4.6, writes of keys and values 1.4, the host some 10 before and after.
        In steady use GEMMs of 55.7 TFLOP at 685 TFLOP/s and attention take 89, so the goal is
        below what the limit of power allows.""",
    ),
    (
        "the same prompt in fp8: 50 ms, and no later than vLLM",
        None,
        """80.6 ms, of which kernels take 54 (GEMMs 37, attention 7, casts of activations 5):
        the host launches some 25 kernels a layer and is slower than the GPU. vLLM compiles
        prompt steps and runs them as CUDA graphs, and takes 64.7 ms
        (`decode-llama-3-8b-fp8-beside-vllm-h200`).""",
    ),
    (
        "1 and 8 texts in fp8: 1.25 times vLLM",
        None,
        """1.18 and 1.15 with keys and values in fp8, layer by layer. The whole-step kernel
        requires keys and values in bf16; with them it writes 453 tokens/s of one text. A
        variant that read fp8 was removed: its trial found errors of 0.17. That trial's inputs
        were later found to give errors of this size in bf16 layers too, so the variant is
        worth a second trial.""",
    ),
    (
        "one text over four GPUs, Llama-3-8B in fp8: 700 tokens/s",
        None,
        """363 (`decode-llama-3-8b-fp8-h200-x4-tp`), where each layer has two all-reduces of
        their own launches. The kernel of a whole step now exchanges partial sums itself: over
        two GPUs 677, and 329 without it (`decode-llama-3-8b-fp8-whole-step-h200-x2-tp`). Over
        four GPUs it is not measured yet.""",
    ),
)
"""Goals that were not reached: what was wanted, where the split is, and what was tried."""
MISSES_HEAD = "goal | split of the step, ms | what is in the way, and what was tried"


def miss_rows(read: Read) -> Iterator[Sequence[object]]:
    """Yield the goals missed with the splits of their steps."""
    for goal, place, tried in MISSES:
        split = {} if place is None else case_of(read, place)["split_ms"]
        parts = ("gemm", "attention", "elementwise", "copy", "exposed_communication", "gap")
        shown = [f"{p.replace('_', ' ')} {split[p]:.0f}" for p in parts if split.get(p, 0) >= 1]
        yield goal, ", ".join(shown), " ".join(tried.split())


def draw(read: Read, head: Callable[[int, int], str]) -> str:
    """Draw how many times as good ours is, with a mark at each goal, as SVG."""
    height = 24 * len(COMPARISONS) + 44
    parts = [head(760, height)]
    for index, row in enumerate(COMPARISONS):
        numbers, y = figures(read, row), 24 * index + 8
        width, end = 150 * min(numbers.ratio, 2.0), 150 * min(numbers.ratio, 2.0)
        parts += [
            f'<text x="392" y="{y + 13}" text-anchor="end">{_short(row)}</text>',
            f'<rect x="400" y="{y}" width="{width:.1f}" height="17" fill="#3b4f8a"/>',
        ]
        if 0 < numbers.goal_ratio < 2:
            x = 400 + 150 * numbers.goal_ratio
            colour = "#a04b4b" if numbers.is_missed else "#2f7f5f"
            mark = f"M{x:.1f} {y - 2}V{y + 19}"
            parts.append(f'<path d="{mark}" stroke="{colour}" stroke-width="3"/>')
            end = max(end, x - 400)
        # Bars end at twice the peer: a longer one is marked, and its number says how long.
        is_cut = "… " if numbers.ratio > 2 else ""
        text = f"{is_cut}{numbers.ratio:.2f}"
        parts.append(f'<text x="{406 + end:.1f}" y="{y + 13}">{text}</text>')
    parts.append(f'<path d="M550 4V{height - 36}" stroke="#555555" stroke-dasharray="3 3"/>')
    note = "ours over the other; marks: goals, red if missed"
    parts.append(
        f'<text x="752" y="{height - 8}" text-anchor="end" fill="#555555">{note}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def _short(row: Comparison) -> str:
    work = row.work.rpartition(", ")[0].replace("`", "")
    return f"{work}: {row.peer.split(' in ')[0].rpartition(' ')[0]}"
