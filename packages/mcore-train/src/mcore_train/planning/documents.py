"""Compares the founding documents' table of layouts with the planner's.

``plan --reproduce-table`` prints the comparison. Where the documents contradict themselves, the
text states the contradiction, and the row is corrected as the text describes.
"""

from dataclasses import dataclass, replace

from mcore_models.families import GPT_FAMILY
from mcore_train.composition import TrainConfig
from mcore_train.options.parsing import parse
from mcore_train.planning.memory import CONTEXT_GIB, GIB, predict_memory
from mcore_train.planning.search import Row, search_layouts
from mcore_train.planning.step_time import predict_step
from mcore_train.planning.system import SYSTEMS, System

CONTRADICTIONS = (
    (
        "405B: TP 8 x PP 8 x DP 2 x CP 2 is 256 ranks, and the table has 128 GPUs; later text "
        "has DP 1, which is 128. Mended: CP 2 and DP 1."
    ),
    (
        "Mixtral: the total is not TP x PP x EP x DP. World = TP x CP x PP x DP, and expert "
        "ranks are folded over TP, CP and DP."
    ),
    (
        '"8 experts x 7B = 56GB" takes parameters for bytes: Mixtral 8x7B has 46.7 B '
        "parameters, 87 GiB in bf16."
    ),
    (
        '"--recompute-method block --recompute-num-layers 1, checkpoint every layer": block '
        "with 1 recomputes one layer of a stage; every layer is uniform with 1."
    ),
    (
        '"128 tokens/s/GPU on 64 H100" and "1.2 T tokens in 7 days" differ by 240 times: that '
        "takes 31 000 tokens/s/GPU."
    ),
)
"""Contradictory statements of the documents, and the correct ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentRow:
    """A row of the documents' table."""

    name: str
    preset: str
    gpus: int
    tp: int
    pp: int
    dp: int
    cp: int
    batch: int
    mended_dp: int = 0
    """Data ranks with which the row's degrees multiply to its GPUs; 0: ``dp``."""


ROWS = (
    DocumentRow(name="7B", preset="llama-2-7b", gpus=8, tp=1, pp=1, dp=8, cp=1, batch=128),
    DocumentRow(name="13B", preset="llama-2-13b", gpus=8, tp=2, pp=1, dp=4, cp=1, batch=128),
    DocumentRow(name="70B", preset="llama-3-70b", gpus=64, tp=4, pp=4, dp=4, cp=1, batch=1024),
    DocumentRow(
        name="405B",
        preset="llama-3.1-405b",
        gpus=128,
        tp=8,
        pp=8,
        dp=2,
        cp=2,
        batch=1024,
        mended_dp=1,
    ),
)


def documents_text(system: System = SYSTEMS["h100"]) -> str:
    """Write the documents' layouts, the planner's, and the documents' contradictions."""
    lines = [
        f"the documents' layouts and the planner's on {system.name}, 4 096 tokens a sequence",
        "",
        f"{'model':6}{'GPUs':>5}  {'documents':26}{'tok/s/GPU':>10}{'GiB':>7}  planner",
    ]
    for document in ROWS:
        config = _config(document)
        given, step_s, gib = _documents_layout(document, config, system)
        tokens = config.batch.global_batch_size * config.batch.seq_length
        best = _best(document, config, system)
        limit = system.memory_gib - CONTEXT_GIB
        verdict = f"{gib:>7.1f}" + ("" if gib < limit else " does not fit")
        lines.append(
            f"{document.name:6}{document.gpus:>5}  {given:26}"
            f"{tokens / step_s / document.gpus:>10,.0f}{verdict}  {best.name}, "
            f"{best.tokens_per_s:,.0f} tok/s/GPU, {best.memory.total / GIB:.1f} GiB"
        )
    lines += ["", "contradictions in the documents:"]
    return "\n".join([*lines, *(f"  - {text}" for text in CONTRADICTIONS)])


def _config(document: DocumentRow) -> TrainConfig:
    flags = (
        f"--model {document.preset} --seq-length 4096 --global-batch-size {document.batch} "
        "--bf16 --mock-data --lr 1e-4 --train-iters 10 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather"
    )
    return parse(flags.split(), "mcore-train plan")


def _documents_layout(
    document: DocumentRow, config: TrainConfig, system: System
) -> tuple[str, float, float]:
    """Return the name of the documents' layout, the seconds of its step and its GiB."""
    dp = document.mended_dp or document.dp
    world = document.tp * document.pp * document.cp * dp
    layout = replace(
        config,
        parallelism=replace(
            config.parallelism,
            tensor_model_parallel_size=document.tp,
            sequence_parallel=document.tp > 1,
            pipeline_model_parallel_size=document.pp,
            context_parallel_size=document.cp,
        ),
        # 126 layers over 8 ranks: 15 on the first and the last, 16 on the others.
        pipeline=replace(
            config.pipeline,
            decoder_first_pipeline_num_layers=15,
            decoder_last_pipeline_num_layers=15,
        )
        if config.model.num_layers % document.pp
        else config.pipeline,
    )
    vocab_size = config.tokenizer.vocab_size
    step = predict_step(layout, GPT_FAMILY, world, vocab_size, system)
    memory = predict_memory(layout, GPT_FAMILY, world, vocab_size, system)
    words = f"tp{document.tp} pp{document.pp} dp{document.dp} cp{document.cp}"
    if document.mended_dp:
        words += f" (dp{document.mended_dp})"
    return words, step.total, memory.total / GIB


def _best(document: DocumentRow, config: TrainConfig, system: System) -> Row:
    vocab_size = config.tokenizer.vocab_size
    pinned = ("micro_batch_size",)
    search = search_layouts(
        config, GPT_FAMILY, document.gpus, vocab_size, system, pinned, top=1
    )
    return search.rows[0]
