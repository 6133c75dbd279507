"""Each example runs, on one rank and on several, with equal numbers; scripts for more GPUs
than there are here give a plan."""

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
from math import prod

import pytest
import torch
from docs.blocks import ROOT, all_blocks, blocks_of
from e2e.fake_schedulers import fake, on_path
from e2e.launched import run_as_torchrun_does
from warm_ranks import run_command, run_ranks

from mcore_models.encoder_shapes import bert_shapes
from mcore_models.families import BERT_FAMILY
from mcore_models.logical_tensors import tensor_shapes
from mcore_models.presets import find_preset
from mcore_parallel import parallel_state
from mcore_train.composition import BertTrainConfig
from mcore_train.options.parsing import parse
from mcore_train.resolution import resolve

SMALL = [
    *("--num-layers", "2", "--hidden-size", "48", "--num-attention-heads", "4"),
    *("--vocab-size", "96", "--sequence-length", "16", "--steps", "3"),
]


def run_example(name, arguments):
    """Load an example by its path and run it; a rank grid that it leaves is destroyed."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.main(arguments)
    finally:
        parallel_state.destroy_model_parallel()


def test_the_guides_first_program_gives_equal_losses_on_one_rank_and_two():
    single = run_example("first_program", SMALL)
    arguments = [*SMALL, "--tensor-model-parallel-size", "2"]
    for losses in run_ranks(run_example, 2, "first_program", arguments):
        assert losses == pytest.approx(single, rel=1e-5)
    assert single[-1] < single[0]


def test_the_loop_of_weight_sync_generates_with_the_trainers_log_probabilities():
    arguments = ["--iterations", "2", "--use-distributed-optimizer"]
    first, second = run_ranks(run_example, 2, "weight_sync_loop", arguments)
    assert first == second
    assert [differing for _, differing in first] == [0, 0]
    assert len({reward for reward, _ in first}) == 2


@pytest.mark.parametrize(
    "layout",
    [[], ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]],
)
def test_the_simple_loop_trains_and_resumes_on_one_rank_and_two(layout):
    name = "run_simple_mcore_train_loop"
    world_size = 2 if layout else 1
    answers = run_ranks(run_example, world_size, name, layout)
    assert all(losses == answers[0] for losses in answers)
    assert len(answers[0]) == 6
    assert answers[0][-1] < answers[0][0]


def run_own_model(folder):
    """Run the README's own model on this rank, in a folder; return its results."""
    place = ROOT / "packages/mcore-parallel/README.md"
    text = "## Your own model" + place.read_text().split("## Your own model")[1]
    names = {"__name__": "own_model"}
    with contextlib.chdir(folder):
        for block in blocks_of(text.split("## Pipelines")[0], "own_model"):
            if block.run_by:
                continue
            exec(compile(block.code, f"{place} {block.line}", "exec"), names)
    found = {name: names[name] for name in ("losses", "goes_on", "attended", "scale_norm")}
    return found | {"interleaved": names.get("interleaved_losses")}


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.parity_long)])
def test_a_model_of_ones_own_computes_the_same_over_ranks_of_every_kind(ranks, tmp_path):
    folders = tmp_path / "one", tmp_path / "many"
    for folder in folders:
        folder.mkdir()
    single = run_own_model(folders[0])
    assert single["goes_on"][-1] < single["losses"][-1] < single["losses"][0]
    for found in run_ranks(run_own_model, ranks, folders[1]):
        for name in ("losses", "goes_on", "scale_norm"):
            assert found[name] == pytest.approx(single[name], rel=1e-5)
        assert found["interleaved"] == pytest.approx(single["losses"], rel=1e-5)
        for output_and_gradient in found["attended"].values():
            torch.testing.assert_close(
                output_and_gradient, single["attended"]["a2a"], rtol=1e-5, atol=1e-6
            )


def test_a_program_of_ones_own_is_compared_under_layouts(tmp_path, monkeypatch):
    name = "test_a_program_of_ones_own_is_compared_under_layouts"
    (block,) = (b for b in all_blocks() if b.run_by.endswith(name))
    file = tmp_path / "test_layouts.py"
    file.write_text(block.code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    module.test_every_layout_computes_what_one_rank_computes()


def shown_by(script, *words, **variables):
    """Run a script that shows what it would start."""
    env = {"PATH": os.environ["PATH"], "LAUNCH": "echo", **variables}
    return subprocess.run(
        ["bash", str(ROOT / "examples" / script), *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def planned(script, **variables):
    """Resolve what a script would start, on the ranks that it would start."""
    done = shown_by(script, MASTER_ADDR="host0", **variables)
    assert done.returncode == 0, done.stderr
    launcher, command = done.stdout.split(" -m mcore_train gpt ")
    words = launcher.split()
    values = dict(zip(words[::2], words[1::2], strict=True))
    assert values["--master_addr"] == "host0"
    world_size = int(values["--nproc_per_node"]) * int(values["--nnodes"])
    config = parse(shlex.split(command))
    num_words = 1000 if config.tokenizer.tokenizer_model else 0
    return resolve(config, world_size, tokenizer_vocab_size=num_words)


LLAMA = "llama/train_llama_70b.sh"
LLAMA_FP8 = "llama/train_llama3_8b_h100_fp8.sh"
MIXTRAL = "mixtral/train_mixtral_8x7b_distributed.sh"
BERT = "bert/train_bert_340m_distributed.sh"


def num_trained(plan):
    """Count the parameters of a plan's model."""
    shapes = tensor_shapes(plan.config.model, plan.vocab_size, plan.config.experts)
    return sum(map(prod, shapes.values()))


def test_the_llama_script_has_the_layout_of_the_guides():
    plan = planned(LLAMA)
    assert num_trained(plan) == find_preset("llama-3-70b").parameters
    model, layout = plan.config.model, plan.config.parallelism
    assert (plan.world_size, plan.data_parallel_size, plan.num_microbatches) == (64, 4, 256)
    assert (layout.tensor_model_parallel_size, len(plan.stages)) == (4, 4)
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (80, 8192, 64)
    assert (plan.schedule.max_lr, plan.config.data.mock_data) == (3e-4, True)


def test_the_llama_script_hears_its_variables():
    size = {"NNODES": "2", "TP": "8", "PP": "1", "NUM_LAYERS": "8", "GLOBAL_BATCH": "64"}
    files = {"DATA_PATH": "book", "TOKENIZER_MODEL": "words", "CHECKPOINT_PATH": "run"}
    plan = planned(LLAMA, **size, **files)
    assert (plan.world_size, plan.data_parallel_size, len(plan.stages)) == (16, 2, 1)
    assert plan.config.data.data_path == ("book",)
    assert plan.config.saving.save == "run"


def test_the_fp8_script_trains_on_mock_data_and_gathers_what_its_recipe_casts():
    plan = planned(LLAMA_FP8)
    config = plan.config
    assert (plan.world_size, plan.data_parallel_size, plan.num_microbatches) == (8, 8, 16)
    assert num_trained(plan) == find_preset("llama-3-8b").parameters
    assert (config.data.mock_data, config.precision.bf16) == (True, True)
    assert (config.fp8.fp8_format, config.fp8.fp8_recipe) == ("hybrid", "tensorwise")
    assert config.data_parallelism.fp8_param_gather
    delayed = planned(LLAMA_FP8, FP8_RECIPE="delayed", TP="2").config
    assert (delayed.fp8.fp8_recipe, delayed.parallelism.sequence_parallel) == ("delayed", True)
    assert not delayed.data_parallelism.fp8_param_gather


def test_the_mixtral_script_has_an_expert_a_gpu_and_four_stages():
    plan = planned(MIXTRAL)
    assert num_trained(plan) == find_preset("mixtral-8x7b").parameters
    layout, experts = plan.config.parallelism, plan.config.experts
    assert (plan.world_size, len(plan.stages), plan.data_parallel_size) == (32, 4, 8)
    assert layout.expert_model_parallel_size == experts.num_experts == 8
    assert (experts.moe_router_topk, experts.moe_grouped_gemm) == (2, True)


def test_the_fp8_script_is_found_by_its_older_name_too():
    older = LLAMA_FP8.replace("_h100", "")
    assert shown_by(older, "--seed", "5").stdout == shown_by(LLAMA_FP8, "--seed", "5").stdout


def test_the_gpt3_script_is_of_175_billion_parameters_on_1024_gpus_with_a_batch_ramp():
    plan = planned("gpt3/train_gpt3_175b_distributed.sh")
    model, layout = plan.config.model, plan.config.parallelism
    assert (plan.world_size, plan.data_parallel_size, plan.global_batch_size) == (1024, 8, 1536)
    assert (layout.tensor_model_parallel_size, len(plan.stages)) == (8, 16)
    assert num_trained(plan) == pytest.approx(174.6e9, rel=1e-3)
    assert (model.normalization, model.openai_gelu, model.add_bias_linear) == (
        *("LayerNorm", True),
        True,
    )
    assert model.hidden_dropout == model.attention_dropout == 0.1
    assert plan.ramp.size_at(0) == 16
    assert plan.ramp.size_at(6_000_000) == 1536


@pytest.mark.parametrize("script", [LLAMA, LLAMA_FP8, MIXTRAL])
def test_a_script_of_a_model_leaves_none_of_megatrons_defaults_open(script, caplog):
    caplog.set_level("INFO")
    planned(script)
    assert "--group-query-attention: " in caplog.text  # Megatron's spelling
    assert "Megatron's defaults" not in caplog.text


SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 48 --seq-length 16 --max-position-embeddings 16 --vocab-size 64 "
    "--global-batch-size 4 --train-iters 2 --no-bf16 --device cpu --num-workers 0 "
    "--log-interval 1"
)


@pytest.mark.parametrize(
    ("script", "layout", "wanted"),
    [
        (LLAMA, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "lm loss: "),
        (
            MIXTRAL,
            "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
            "load_balancing_loss: ",
        ),
    ],
)
def test_a_script_trains_its_model_made_small_on_four_ranks(script, layout, wanted):
    done = shown_by(script, *SIZES.split(), *layout.split(), NNODES="1", GPUS_PER_NODE="4")
    launcher, command = done.stdout.split(" -m mcore_train gpt ")
    assert "--nproc_per_node 4 --nnodes 1" in launcher
    printed = "".join(run_as_torchrun_does(4, "mcore_train", "gpt", *shlex.split(command)))
    assert "iteration        2/       2" in printed
    assert wanted in printed


def test_a_batch_script_of_slurm_starts_itself_on_each_host_of_the_job(tmp_path):
    """As under sbatch: a copy of the script, which runs on the job's first host."""
    copy = tmp_path / "slurm_script"
    copy.write_text((ROOT / "examples" / LLAMA).read_text())
    asked = "case $2 in hostnames) printf 'n1\\nn2\\n' ;; job) echo ' Command=" + str(
        ROOT / "examples" / LLAMA
    )
    fake(tmp_path, "scontrol", asked + " --seed 5' ;; esac")
    fake(
        tmp_path,
        "srun",
        'shift; for id in 0 1; do SLURM_STEP_ID=0 SLURM_NODEID=$id "$@" || exit 1; done',
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(
        ["bash", str(copy), "--seed", "5"],
        env=on_path(tmp_path, LAUNCH="echo", **job),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert f"--nnodes 2 --node_rank {rank} --master_addr n1" in line
        assert line.endswith("--seed 5")


@pytest.mark.parametrize("script", [LLAMA, MIXTRAL])
def test_a_script_for_several_hosts_asks_for_the_first_ones_name(script):
    done = shown_by(script)
    assert done.returncode == 2
    assert "give MASTER_ADDR" in done.stderr
    assert shown_by(script, NNODES="1").returncode == 0


def test_megatrons_entry_takes_its_flags_and_names_those_that_do_nothing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    flags = (
        "--use-mcore-models --transformer-impl transformer_engine --use-flash-attn "
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
        "--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 3e-4 "
        "--lr-decay-style cosine --mock-data --vocab-size 64 --num-workers 0 --device cpu"
    )
    done = run_command("pretrain_gpt", *flags.split(), is_ours=True)
    assert done.returncode == 0, done.stderr
    assert "iteration        1/       1" in done.stdout
    told = done.stdout + done.stderr
    for ignored in ("--use-mcore-models", "--use-flash-attn"):
        assert f"{ignored}: " in told
    assert "Megatron's defaults that this run does not use: --normalization" in told
    assert "--transformer-impl transformer_engine needs a GPU" in told


def test_the_bert_script_is_of_340_million_parameters_and_trains_made_small(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    launcher, command = shown_by(BERT).stdout.split(" -m mcore_train bert ")
    assert "--nproc_per_node 8 --nnodes 1" in launcher
    config = parse(shlex.split(command), "mcore-train bert", BertTrainConfig)
    plan = resolve(config, 8, family=BERT_FAMILY)
    shapes = bert_shapes(config.model, plan.vocab_size)
    assert sum(map(prod, shapes.values())) == 336_226_108
    small = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 "
        "--vocab-size 90 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 "
        "--no-bf16 --device cpu --num-workers 0 --eval-interval 0 --num-tokentypes 2 "
    )
    done = run_command("pretrain_bert", *shlex.split(command), *small.split(), is_ours=True)
    assert done.returncode == 0, done.stderr
    assert "iteration        1/       1" in done.stdout
    assert "sop loss: " in done.stdout
    # No flag of this command line is Megatron's alone: the entry's name is enough.
    assert "does not use: --norm-epsilon 1e-05 --openai-gelu." in done.stdout + done.stderr


def test_the_t5_entry_trains(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    flags = (
        "--encoder-num-layers 2 --decoder-num-layers 1 --hidden-size 32 "
        "--num-attention-heads 4 --encoder-seq-length 32 --decoder-seq-length 16 "
        "--vocab-size 140 --micro-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data "
        "--device cpu --num-workers 0"
    )
    done = run_command("pretrain_t5", *flags.split(), is_ours=True)
    assert done.returncode == 0, done.stderr
    assert "iteration        1/       1" in done.stdout
