"""Published models by name: one layout of each architecture computes what one rank computes."""

import pytest
from warm_ranks import run_ranks

from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.layout_check.verification import verify_on_rank
from mcore_train.options.parsing import parse
from mcore_train.resolution import resolve

TP2, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
CP2, ZERO = "--context-parallel-size 2", "--use-distributed-optimizer"
EP2 = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
LAYOUTS = {
    "deepseek-v2-lite": ("gpt", 4, f"{TP2} {CP2} {EP2} {SP} {ZERO}"),
    "deepseek-v3": (
        "gpt",
        8,
        (
            f"{EP2} --pipeline-model-parallel-size 4 {ZERO} "
            "--pipeline-model-parallel-layout Et*31|t*30|m|L"
        ),
    ),
    "deepseek-v3.2": ("gpt", 4, f"{TP2} {SP} {EP2} {ZERO}"),
    "kimi-k2": (
        "gpt",
        4,
        f"{CP2} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 30",
    ),
    "glm-4.5": ("gpt", 4, f"{TP2} {CP2} {SP} {EP2}"),
    "glm-4.7-flash": ("gpt", 2, f"{TP2} {SP} {EP2}"),
    "kimi-linear-48b-a3b": ("mamba", 4, f"{TP2} {CP2} {SP} {EP2}"),
    "minimax-text-01": ("mamba", 4, f"--pipeline-model-parallel-size 2 {EP2}"),
    "minimax-m1": ("mamba", 4, f"{TP2} {CP2} {SP} {EP2}"),
    "minimax-m2": ("gpt", 4, f"{TP2} {CP2} {SP} {EP2}"),
    "hunyuan-a13b": ("gpt", 4, f"{TP2} {CP2} {SP} {EP2}"),
    "qwen2.5-0.5b": ("gpt", 2, f"{TP2} {SP}"),
    "qwen3-30b-a3b": ("gpt", 4, f"{CP2} {EP2} --tensor-model-parallel-size 2 {SP}"),
    "gemma-2-2b": ("gpt", 2, f"{CP2}"),
    "gemma-3-1b": ("gpt", 2, f"{TP2} {SP}"),
    "gemma-3n-e2b": ("gpt", 4, f"{TP2} {SP} --pipeline-model-parallel-size 2"),
    "gemma-4-31b": ("gpt", 4, f"{CP2} --cp-comm-type a2a --pipeline-model-parallel-size 2"),
    "gemma-4-e2b": ("gpt", 4, f"{TP2} {CP2} {SP}"),
    "gpt-oss-20b": ("gpt", 4, f"{TP2} {CP2} {SP} {EP2}"),
    "olmo-2-7b": ("gpt", 2, f"{TP2} {SP}"),
    "phi-4-mini": ("gpt", 2, f"{CP2} --cp-comm-type a2a"),
    "llama-4-scout": ("gpt", 2, f"{CP2}"),
    "pythia-70m": ("gpt", 2, f"{TP2}"),
    "opt-125m": ("gpt", 2, f"{TP2} {SP}"),
    "falcon-40b": ("gpt", 2, f"{TP2} {SP}"),
    "phi-2": ("gpt", 4, f"{TP2} {SP} --pipeline-model-parallel-size 2"),
    "olmo-1b": ("gpt", 2, f"{TP2} {SP}"),
    "apertus-8b": ("gpt", 2, f"{TP2} {SP}"),
    "grin-moe": ("gpt", 4, f"{TP2} {SP} {EP2}"),
    "nanochat-d20": ("gpt", 4, f"{TP2} {SP} --pipeline-model-parallel-size 2"),
    "granite-3.0-2b": ("gpt", 2, f"{TP2} {SP}"),
    "command-r-35b": ("gpt", 2, f"{TP2} {SP}"),
    "starcoder2-3b": ("gpt", 2, f"{CP2}"),
    "qwen3-next-80b-a3b": ("mamba", 4, f"{TP2} {CP2} {SP}"),
    "qwen3.5-27b": ("mamba", 2, f"{TP2} {SP}"),
    "lfm2-1.2b": ("mamba", 4, f"{TP2} {CP2} {SP}"),
    "lfm2-8b-a1b": ("mamba", 4, f"--pipeline-model-parallel-size 2 {EP2}"),
    "bamba-9b": ("mamba", 2, f"{TP2} {SP}"),
    "mamba2-130m": ("mamba", 4, f"{TP2} {CP2} --mamba-num-groups 4"),
    "nemotron-h-8b": ("mamba", 4, f"{TP2} {SP} --pipeline-model-parallel-size 2"),
    "mamba2-hybrid-8b": ("mamba", 4, f"{CP2} {TP2}"),
    "bert-base": ("bert", 4, f"{TP2} --pipeline-model-parallel-size 2"),
    "roberta-base": ("bert", 2, f"{TP2} {SP}"),
    "modernbert-base": ("bert", 4, f"{TP2} {CP2} {SP}"),
    "bert-345m": ("bert", 4, f"{TP2} {CP2} {SP}"),
    "t5-base": ("t5", 4, f"{TP2} --pipeline-model-parallel-size 2 {ZERO}"),
}
RUN = "--mock-data --seq-length 512 --micro-batch-size 1 --global-batch-size 8 --train-iters 10"


def small_run(name):
    command, world_size, flags = LAYOUTS[name]
    family = FAMILY_COMMANDS[command]
    words = f"--model {name} {RUN} --lr 1e-3 {flags}".split()
    config = parse(words, f"mcore-train {command}", family.run, family.beginning)
    plan = resolve(config, world_size, family=family.family)
    return build_small_run(plan, world_size)


def verify(small):
    return verify_on_rank(small)


@pytest.mark.parity_long
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_model_is_verified_under_a_layout(name):
    small = small_run(name)
    certificate = run_ranks(verify, small.world_size, small)[0]
    assert certificate.passed, [line for line in certificate.lines if not line.passed]


def test_every_published_model_has_a_small_run_of_its_kinds():
    for name in LAYOUTS:
        notes = small_run(name).notes
        assert not any("kinds of layers" in note for note in notes), (name, notes)
