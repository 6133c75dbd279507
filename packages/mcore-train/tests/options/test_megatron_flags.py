import re

import pytest

from mcore_base.command_line import FaultCollector
from mcore_train.composition import FAMILY_COMMANDS, flag_names
from mcore_train.options.megatron_flags import (
    all_flags,
    idle_reasons,
    parser_flags,
    translate,
    translated_names,
)
from mcore_train.options.parsing import LAYERS_PER_STAGE, parse
from mcore_train.resolution import resolve

KNOWN = {"--num-layers", "--swiglu", "--no-swiglu", "--position-embedding-type", "--lr"}


def translated(words, known=KNOWN):
    """Return the words and notes of a translation without faults."""
    faults = FaultCollector()
    line = translate(words, known, faults)
    faults.raise_all()
    return list(line.words), list(line.notes)


def test_known_flags_pass_in_any_spelling_and_keep_their_values():
    words, notes = translated(["--num_layers", "4", "--lr=1e-3", "--no-swiglu"], KNOWN)
    assert words == ["--num-layers", "4", "--lr", "1e-3", "--no-swiglu"]
    assert notes == []


def test_foreign_flags_become_ours_and_take_their_values_with_them():
    words, notes = translated(
        ["--use-rotary-position-embeddings", "--distributed-backend", "nccl", "--lr", "1"],
        KNOWN,
    )
    assert words == ["--position-embedding-type", "rope", "--lr", "1"]
    assert notes == ["--distributed-backend: nccl on GPUs, gloo on CPUs."]


def test_the_guides_switch_for_fp8_is_a_format_of_ours():
    model = ["--num-layers=2", "--hidden-size=64", "--num-attention-heads=4", "--mock-data"]
    config = parse([*model, "--lr=1e-3", "--train-iters=1", "--bf16", "--fp8-hybrid"])
    assert config.fp8.fp8_format == "hybrid"
    with pytest.raises(ValueError, match="scales are always agreed over"):
        translated(["--fp8-hybrid", "--fp8-amax-reduction-group", "tp"])


def test_a_history_of_magnitudes_without_a_recipe_is_delayed_scaling_as_in_megatron(tmp_path):
    model = ["--num-layers=2", "--hidden-size=64", "--num-attention-heads=4", "--bf16"]
    words = "--fp8-hybrid --fp8-amax-compute-algo max --fp8-amax-history-len 1024"
    fp8 = parse([*model, *words.split()]).fp8
    assert (fp8.fp8_recipe, fp8.fp8_amax_history_len) == ("delayed", 1024)
    recipe = tmp_path / "fp8.toml"
    recipe.write_text('fp8_format = "hybrid"\nfp8_amax_history_len = 4\n')
    assert parse([*model, "--recipe", str(recipe)]).fp8.fp8_recipe == "delayed"
    with pytest.raises(ValueError, match="no effect without --fp8-recipe delayed"):
        parse([*model, *words.split(), "--fp8-recipe", "tensorwise"])


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


def test_refused_flags_name_what_to_use_instead():
    for flag, row in all_flags().items():
        if row.refused:
            with pytest.raises(ValueError, match=r"^--.*: .*(use |leave it out)"):
                translated([flag.replace("*", "x"), "its", "values"])


def test_flags_without_effect_are_noted_with_all_their_values():
    noted = {flag: row for flag, row in all_flags().items() if row.note and not row.becomes}
    assert len(noted) > 200
    for flag, row in noted.items():
        given = [row.only or "a"] * row.takes if isinstance(row.takes, int) else ["a", "b"]
        words, (note,) = translated([flag.replace("*", "x"), *given, "--lr", "1"])
        assert words == ["--lr", "1"]
        assert note.startswith(flag.replace("*", "x"))
    with pytest.raises(ValueError, match="--log-memory-interval needs a value"):
        translated(["--log-memory-interval", "--lr", "1"])


def test_values_given_behind_an_equals_sign_are_translated_too():
    known = flag_names()
    assert translated(["--lora-rank=8"], known)[0] == ["--lora-dim", "8"]
    assert translated(["--moe-token-dispatcher-type=flex", "--lr=1"], known)[0] == [
        *("--moe-token-dispatcher-type", "deepep", "--lr", "1"),
    ]
    assert translated(["--window-size", "(128,0)"], known)[0] == ["--window-size", "128", "0"]


def test_faults_of_a_command_line_are_found_in_one_pass():
    faults = FaultCollector()
    words = "--num-layer 4 --batch-size 8 --fp8-margin 2 --lr 1 --ckpt-format torch --nonsense"
    line = translate(words.split(), flag_names(), faults)
    assert [text.partition(":")[0] for text in faults.lines] == [
        *("unknown option --num-layer", "--batch-size", "--fp8-margin 2"),
        "unknown option --nonsense.",
    ]
    assert line.words == ("--lr", "1")
    assert line.foreign == {"--fp8-margin", "--ckpt-format"}
    assert {"--num-layers", "--micro-batch-size"} <= faults.unsettled


SHAPE = ["--num-layers=2", "--hidden-size=64", "--num-attention-heads=4"]


def test_a_learned_table_of_positions_is_all_that_its_switch_turns_off():
    assert parse([*SHAPE, "--no-position-embedding"]).model.position_embedding_type == "rope"
    for positions in ("rope", "none"):
        words = ["--no-position-embedding", "--position-embedding-type", positions]
        assert parse([*SHAPE, *words]).model.position_embedding_type == positions
    learned = "--position-embedding-type learned_absolute --max-position-embeddings 8"
    for words in (learned.split(), ["--megatron-defaults", "--max-position-embeddings=8"]):
        with pytest.raises(ValueError, match="turns --position-embedding-type learned_abs"):
            parse([*SHAPE, *words, "--no-position-embedding"])


@pytest.mark.parametrize("positions", ["learned_absolute", "none"])
def test_rotary_options_have_no_effect_on_other_positions(positions):
    words = [*SHAPE, "--position-embedding-type", positions, "--max-position-embeddings=8"]
    rotary = ["--rotary-base", "--rotary-percent", "--rotary-seq-len-interpolation-factor"]
    given = [f"{name}=0.5" for name in rotary] + ["--rope-skip-freq=2"]
    with pytest.raises(ValueError, match="without --position-embedding-type rope") as caught:
        resolve(parse([*words, *given]), 1)
    told = next(line for line in str(caught.value).splitlines() if "rotary-base" in line)
    assert all(name in told for name in (*rotary, "--rope-skip-freq 2"))


def test_switches_of_attention_and_graphs_mean_what_megatrons_parser_makes_of_them():
    for words in ("--enable-cuda-graph", "--cuda-graph-impl transformer_engine"):
        assert parse([*SHAPE, *words.split()]).run.cuda_graph_impl == "local"
    assert parse([*SHAPE, "--group-query-attention"]).model.num_query_groups == 1
    words = ["--num-query-groups=2", "--group-query-attention"]
    assert parse([*SHAPE, *words]).model.num_query_groups == 2
    groups = ["--num-query-groups", "2", "--use-mcore-models"]
    assert "query groups take effect here without" in translated(groups, flag_names())[1][-1]
    words = ["--model", "llama-3-8b", "--group-query-attention"]
    assert parse(words).model.num_query_groups == 8
    model = parse([*SHAPE, "--position-embedding-type", "yarn", "--yarn-beta-fast", "8"]).model
    assert (model.position_embedding_type, model.rope_type, model.beta_fast) == (
        *("rope", "yarn"),
        8.0,
    )


def test_an_optimizer_in_host_memory_may_be_named_as_the_guides_do():
    words = [*SHAPE, "--cpu-optimizer", "--cpu-optimizer-type"]
    config = parse([*words, "ADAM"])
    assert config.offloading.optimizer_cpu_offload
    assert config.optimizer.optimizer == "adam"
    with pytest.raises(ValueError, match="--cpu-optimizer-type SGD: use ADAM"):
        parse([*words, "SGD"])
    with pytest.raises(ValueError, match=r"--cpu-optimizer-type .* contradict"):
        parse([*words, "ADAM", "--optimizer", "sgd"])


def test_sequence_parallel_on_one_tensor_rank_is_noted_and_off(caplog):
    caplog.set_level("INFO")
    assert not parse([*SHAPE, "--sequence-parallel"]).parallelism.sequence_parallel
    assert "has no effect with --tensor-model-parallel-size 1" in caplog.text


def test_options_of_logs_without_their_feature_are_noted_and_dropped(caplog):
    caplog.set_level("INFO")
    flags = idle_reasons()
    assert {"--tensorboard-queue-size", "--wandb-exp-name", "--profile-ranks"} <= flags.keys()
    for flag, reason in flags.items():
        value = ["7"] if parser_flags()[flag].takes else []
        assert parse([*SHAPE, flag, *value]) == parse(SHAPE)
        assert f"{flag}: {reason}." in caplog.text
    options = parse([*SHAPE, "--tensorboard-dir", "x", "--tensorboard-queue-size", "7"]).logging
    assert (options.tensorboard, options.tensorboard_queue_size) == (True, 7)


def test_an_unknown_flag_is_answered_with_the_nearest_known_one():
    with pytest.raises(
        ValueError, match="unknown option --num-layer: did you mean --num-layers"
    ):
        translated(["--num-layer", "4"], KNOWN)
    with pytest.raises(ValueError, match=r"unknown option --wandering-prospect\.$"):
        translated(["--wandering-prospect"], flag_names())


def test_every_row_means_one_thing_and_becomes_flags_that_exist():
    known = set().union(*(flag_names(command.run) for command in FAMILY_COMMANDS.values()))
    for name, row in all_flags().items():
        assert not (row.refused and (row.becomes or row.note)), name
        has_meaning = bool(row.refused or row.becomes or row.note)
        if name != LAYERS_PER_STAGE:
            assert has_meaning != (name in known), name
        becomes = " ".join([row.becomes, *row.values.values()]).split()
        assert {word for word in becomes if word.startswith("--")} <= known


def test_flags_named_in_notes_and_refusals_exist():
    commands = FAMILY_COMMANDS.values()
    known = translated_names().union(*(flag_names(command.run) for command in commands))
    for row in all_flags().values():
        for flag in re.findall(r"--[a-z0-9-]+", row.refused + row.note):
            assert flag in known, row


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
        ("--disable-bias-linear --add-bias-linear", "--disable-bias-linear .* and --add-bias"),
        ("--enable-cuda-graph --cuda-graph-impl none", "--enable-cuda-graph .* contradict"),
        ("--verify-integrity --no-load-checksums", "and --no-load-checksums contradict"),
    ],
)
def test_two_names_that_set_one_option_differently_contradict(words, told):
    with pytest.raises(ValueError, match=told):
        translated(words.split(), flag_names())


def test_two_names_may_say_the_same_and_of_one_name_the_last_value_counts():
    for words in (
        "--recompute-activations --recompute-granularity selective",
        "--disable-bias-linear --no-add-bias-linear",
        "--num-layers 2 --num-layers=4 --swiglu --no-swiglu",
    ):
        translated(words.split(), flag_names())


def test_a_negative_number_is_a_value_and_no_flag():
    assert translated(["--lr", "-1"])[0] == ["--lr", "-1"]


def test_recompute_activations_is_selective_recomputation_of_the_core_attention():
    shape = "--num-layers 2 --hidden-size 16 --num-attention-heads 2"
    options = parse([*shape.split(), "--recompute-activations"]).recomputation
    assert (options.recompute_granularity, options.recompute_modules) == (
        "selective",
        ("core_attn",),
    )
