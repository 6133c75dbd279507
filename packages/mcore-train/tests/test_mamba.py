"""``mcore-train mamba``: hybrid stacks through the whole program."""

import json
from functools import partial

import pytest
from warm_ranks import run_ranks

from mcore_ckpt.storage.index import read_index
from mcore_infer import SamplingConfig, generate, load_model
from mcore_models.presets import load_preset
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.stages import build_stages
from mcore_train.checkpoints.adapter_bases import check_model
from mcore_train.cli import main
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.layout_check import verification
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.options.parsing import parse
from mcore_train.resolution import resolve

SIZES = "--hidden-size 16 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 4"
RUN = "--mock-data --mock-vocab-size 40 --seq-length 16 --lr 1e-2 --log-interval 1"


def parsed(text):
    return parse(text.split(), beginning=FAMILY_COMMANDS["mamba"].beginning)


def test_a_pattern_says_layers_heads_and_stages():
    text = f"--hybrid-layer-pattern MM|-M --num-attention-heads 2 {SIZES} {RUN} --train-iters 1"
    config = parsed(text)
    assert config.model.num_layers == 4
    assert config.model.position_embedding_type == "none"
    assert parsed(text.replace("MM|-M", "--M*")).model.hybrid_override_pattern == "--M*"
    cut = parsed(f"{text} --pipeline-model-parallel-size 2")
    stages = build_stages(cut.pipeline, 4, 2)
    assert [list(stage.layers) for stage in stages] == [[0, 1], [2, 3]]
    uneven = parsed(text.replace("MM|-M", "M|*M-") + " --pipeline-model-parallel-size 2")
    assert uneven.pipeline.pipeline_model_parallel_layout == "Et|tttL"
    assert uneven.model.hybrid_override_pattern == "M*M-"
    further = parsed(text.replace("MM|-M", "MM-/*-/*-"))
    assert (further.model.num_layers, further.model.mtp_num_layers) == (3, 2)
    preset = parsed(
        f"--model nemotron-h-8b --hybrid-override-pattern M-M* {RUN} --train-iters 1"
    )
    assert (preset.model.num_layers, preset.model.hidden_size) == (4, 4096)
    assert preset.model.position_embedding_type == "none"
    rotated = parsed(f"--model bamba-9b {RUN} --train-iters 1")
    assert rotated.model == load_preset("bamba-9b").config
    without_attention = parsed(
        f"--model nemotron-h-8b --hybrid-override-pattern M-M- {RUN} --train-iters 1"
    )
    assert without_attention.model.num_query_groups == 0
    several = parsed(
        text.replace("MM|-M", "[M-]|[*-][G-]") + " --pipeline-model-parallel-size 2"
    )
    assert several.model.num_layers == 3
    assert several.pipeline.pipeline_model_parallel_layout == "Et|ttL"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--hybrid-override-pattern MxM", "unknown x. Use M"),
        ("--hybrid-override-pattern --bf16", "--hybrid-override-pattern needs a value"),
        ("--hybrid-override-pattern M/", "after each / there must be the same letters"),
        (
            "--num-attention-heads 2 --hybrid-override-pattern M/*/M",
            "after each / there must be the same letters",
        ),
        (
            "--num-attention-heads 2 --hybrid-override-pattern M/*- --mtp-num-layers 2",
            "leave --mtp-num-layers out",
        ),
        ("--hybrid-override-pattern [M-", "brackets must enclose the letters"),
        ("--hybrid-override-pattern [M|-]", "cannot contain |"),
        ("--hybrid-override-pattern G --linear-num-value-heads 24", "use a multiple of 16"),
        ("--hybrid-override-pattern ME", "give both or neither"),
        ("--hybrid-override-pattern M --num-layers 3", "leave --num-layers out"),
        ("--hybrid-override-pattern M --mamba-num-groups 3", "groups must divide heads"),
        ("--num-layers 2 --num-attention-heads 2", "one letter a layer"),
        (
            "--hybrid-override-pattern M --nproc 8 --tensor-model-parallel-size 8",
            "4 Mamba heads",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_change(flags, told, capsys):
    assert main(["mamba", *f"{SIZES} {RUN} --train-iters 1 {flags}".split()]) == 2
    assert told in capsys.readouterr().err


def test_a_run_trains_continues_is_exported_and_writes(tmp_path):
    save = f"--save {tmp_path} --auto-resume --save-hf --lr-decay-iters 3 --train-iters"
    for steps in (2, 3):
        command = f"--hybrid-override-pattern MM {SIZES} {RUN} {save} {steps}"
        assert main(["mamba", *command.split()]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    folder = tmp_path / "iter_0000003"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mamba2"
    sampling = SamplingConfig(num_tokens=4, top_k=1)
    model = load_model(tmp_path, ParallelContext.single()).model
    texts = [generate(model, [[1, 2, 3]], sampling)]
    (folder / "index.json").unlink()  # what is left is transformers' folder
    model = load_model(folder, ParallelContext.single()).model
    texts.append(generate(model, [[1, 2, 3]], sampling))
    assert texts[0][0].ids == texts[1][0].ids


def test_a_run_that_goes_on_rotates_as_it_did(tmp_path):
    stack = (
        "--hybrid-override-pattern M* --num-attention-heads 2 --position-embedding-type rope"
    )
    words = f"{stack} {SIZES} {RUN} --train-iters 1 --save {tmp_path}".split()
    assert main(["mamba", *words]) == 0
    again = parsed(f"--load {tmp_path} {RUN} --train-iters 2").model
    assert (again.num_layers, again.position_embedding_type) == (2, "rope")


@pytest.mark.parametrize("marks", ["", "of an older version"])
def test_stage_marks_of_a_saved_hybrid_are_no_part_of_its_model(tmp_path, marks):
    size = "--pipeline-model-parallel-size"
    words = f"--hybrid-override-pattern MM|-M {SIZES} {RUN} --lr-decay-iters 2 --train-iters 1"
    words += f" --save {tmp_path}"
    assert main(["mamba", *words.split()]) == 0
    folder = tmp_path / "iter_0000001"
    index = read_index(folder)
    description = index.extra["model"]
    assert description["config"]["hybrid_override_pattern"] == "MM-M"
    if marks:
        description["config"]["hybrid_override_pattern"] = "MM|-M"
        (folder / "index.json").write_bytes(index.to_bytes())
    for layout, ranks in (
        ("--mamba-chunk-size 8", 1),
        (f"{size} 4", 4),
        (f"{size} 2 --pipeline-schedule zb-v", 2),
    ):
        plan = resolve(parsed(f"--load {tmp_path} {RUN} --train-iters 2 {layout}"), ranks)
        assert plan.config.model.hybrid_override_pattern == "MM-M"
        check_model(description, plan, tmp_path)
    again = f"{words} --load {tmp_path} --train-iters 2"
    assert main(["mamba", *again.split()]) == 0


def test_a_small_run_keeps_the_kinds_of_layers_and_how_groups_divide():
    config = parsed(
        "--hybrid-override-pattern MM*-ME|M-M*ME|MM*-MM|MMM-ME --hidden-size 4096 "
        "--num-attention-heads 32 --num-query-groups 8 --mamba-num-heads 128 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
        "--context-parallel-size 2 --num-experts 8 --global-batch-size 8 "
        f"{RUN} --seq-length 4096 --train-iters 9"
    )
    plan = resolve(config, 16)
    small = build_small_run(plan, 8)
    model = small.config.model
    assert model.num_layers == len(model.hybrid_override_pattern) == 4
    assert model.mamba_num_groups == 4
    assert not [what for what in small.uncovered if "Mamba" in what]


def test_the_layout_of_a_hybrid_is_certified(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "run_ranks", partial(run_ranks, check_shapes=False))
    certificate = tmp_path / "verify.json"
    command = (
        f"verify mamba --hybrid-override-pattern M[*-]G/*- --num-attention-heads 2 {SIZES} "
        f"{RUN} "
        "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel --train-iters 9 "
        "--precision auto "
        f"--device cpu --quiet --certificate {certificate}"
    )
    assert main(command.split()) == 0
    table = json.loads(certificate.read_text())
    assert table["passed"]
    assert table["layout"] == "2 ranks: tp2 sp"
