import re

import pytest

from mcore_train.composition import FAMILY_COMMANDS, flag_names
from mcore_train.options.megatron_flags import INSTEAD, SPELLINGS, translate
from mcore_train.options.parsing import parse

KNOWN = {"--num-layers", "--swiglu", "--no-swiglu", "--position-embedding-type", "--lr"}


def test_known_flags_pass_in_any_spelling_and_keep_their_values():
    words, notes = translate(["--num_layers", "4", "--lr=1e-3", "--no-swiglu"], KNOWN)
    assert words == ["--num-layers", "4", "--lr", "1e-3", "--no-swiglu"]
    assert notes == []


def test_foreign_flags_become_ours_and_take_their_values_with_them():
    words, notes = translate(
        ["--use-rotary-position-embeddings", "--distributed-backend", "nccl", "--lr", "1"],
        KNOWN,
    )
    assert words == ["--position-embedding-type", "rope", "--lr", "1"]
    assert notes == ["--distributed-backend: nccl on GPUs, gloo on CPUs."]


def test_the_guides_switch_for_fp8_is_a_format_of_ours():
    model = ["--num-layers=2", "--hidden-size=64", "--num-attention-heads=4", "--mock-data"]
    config = parse([*model, "--lr=1e-3", "--train-iters=1", "--bf16", "--fp8-hybrid"])
    assert config.fp8.fp8_format == "hybrid"
    with pytest.raises(ValueError, match="all ranks that share a layer agree"):
        translate(["--fp8-hybrid", "--fp8-amax-reduction-group", "tp"], KNOWN)


def test_flags_of_others_for_sharding_and_offload_are_options_of_ours():
    model = ["--num-layers=2", "--hidden-size=64", "--num-attention-heads=4", "--mock-data"]
    model += ["--lr=1e-3", "--train-iters=1", "--bf16"]
    config = parse([*model, "--use-megatron-fsdp", "--cpu-optimizer"])
    assert config.data_parallelism.sharding == "optim_grads_params"
    assert config.offloading.optimizer_cpu_offload
    words = "--use-distributed-optimizer --optimizer-cpu-offload --main-grads-dtype bf16"
    words += " --use-precision-aware-optimizer --main-params-dtype bf16 --exp-avg-dtype bf16"
    config = parse([*model, *words.split(), "--overlap-cpu-optimizer-d2h-h2d"])
    assert config.data_parallelism.sharding == "optim"
    assert config.data_parallelism.has_narrow_grads
    assert config.main_weights.main_params_dtype == config.adam.exp_avg_dtype == "bf16"


@pytest.mark.parametrize("patterns", INSTEAD)
def test_flags_that_are_not_here_say_what_stands_instead(patterns):
    for flag in patterns.split():
        with pytest.raises(ValueError, match=r"^--.*: .*(use |leave it out)"):
            translate([flag.replace("*", "x")], KNOWN)


def test_an_unknown_flag_is_answered_with_the_nearest_known_one():
    with pytest.raises(
        ValueError, match="unknown option --num-layer: did you mean --num-layers"
    ):
        translate(["--num-layer", "4"], KNOWN)
    with pytest.raises(ValueError, match=r"unknown option --wandering-prospect\.$"):
        translate(["--wandering-prospect"], flag_names())


def test_every_spelling_becomes_flags_that_exist_and_is_none_itself():
    known = set().union(*(flag_names(command.run) for command in FAMILY_COMMANDS.values()))
    for name, spelling in SPELLINGS.items():
        assert name not in known, name
        assert {w for w in spelling.becomes if w.startswith("--")} <= known
    instead = {flag for patterns in INSTEAD for flag in patterns.split()}
    assert not instead & (flag_names() | set(SPELLINGS))


def test_what_stands_instead_of_a_flag_exists():
    known = flag_names() | set(SPELLINGS)
    for text in INSTEAD.values():
        for flag in re.findall(r"--[a-z0-9-]+", text):
            assert flag in known | {"--max-restarts"}, text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--recompute-activations --recompute-granularity full",
            r"--recompute-activations .*selective\) and --recompute-granularity full contra",
        ),
        (
            "--position-embedding-type=learned_absolute --use-rotary-position-embeddings",
            "--position-embedding-type learned_absolute and --use-rotary-position-embeddings",
        ),
        (
            "--no-position-embedding --use-rotary-position-embeddings",
            "--no-position-embedding .* and --use-rotary-position-embeddings",
        ),
        ("--disable-bias-linear --add-bias-linear", "--disable-bias-linear .* and --add-bias"),
        ("--enable-cuda-graph --cuda-graph-impl none", "--enable-cuda-graph .* contradict"),
        ("--verify-integrity --no-load-checksums", "and --no-load-checksums contradict"),
    ],
)
def test_two_names_that_set_one_option_differently_contradict(words, told):
    with pytest.raises(ValueError, match=told):
        translate(words.split(), flag_names())


def test_two_names_may_say_the_same_and_of_one_name_the_last_value_counts():
    for words in (
        "--recompute-activations --recompute-granularity selective",
        "--disable-bias-linear --no-add-bias-linear",
        "--num-layers 2 --num-layers=4 --swiglu --no-swiglu",
    ):
        translate(words.split(), flag_names())


def test_a_negative_number_is_a_value_and_no_flag():
    assert translate(["--lr", "-1"], KNOWN)[0] == ["--lr", "-1"]


def test_recompute_activations_is_selective_recomputation_of_the_core_attention():
    shape = "--num-layers 2 --hidden-size 16 --num-attention-heads 2"
    options = parse([*shape.split(), "--recompute-activations"]).recomputation
    assert (options.recompute_granularity, options.recompute_modules) == (
        "selective",
        ("core_attn",),
    )
