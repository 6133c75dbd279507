import dataclasses
from typing import get_type_hints

import pytest

from mcore_base.command_line import OptionsError, list_options
from mcore_base.options import find_faults
from mcore_moe.config import MoEConfig
from mcore_train.composition import (
    FAMILY_COMMANDS,
    TrainConfig,
    compose,
    field_types,
    flat,
    parts,
)
from mcore_train.options.megatron_defaults import LATENT_DEFAULTS, defaults_not_taken
from mcore_train.options.megatron_flags import megatron_default
from mcore_train.options.parsing import parse

SHAPE = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"]


def test_flags_reach_the_part_that_owns_them():
    config = parse([*SHAPE, "--tensor-model-parallel-size", "2", "--bf16", "--no-swiglu"])
    assert config.parallelism.tensor_model_parallel_size == 2
    assert config.precision.bf16
    assert not config.model.swiglu


def test_the_shape_of_a_model_is_given_by_megatrons_flags():
    words = "--num-layers 3 --hidden-size 48 --num-attention-heads 6 --seq-length 40"
    config = parse([*words.split(), "--max-position-embeddings", "80"])
    shape = config.model
    assert (shape.num_layers, shape.hidden_size, shape.num_attention_heads) == (3, 48, 6)
    assert (config.batch.seq_length, shape.max_position_embeddings) == (40, 80)


def test_initial_spread_dropout_and_experts_are_given_by_megatrons_flags():
    words = (
        "--init-method-std 0.006 --hidden-dropout 0.1 --attention-dropout 0.2 --num-experts 8 "
        "--moe-router-topk 3 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.003"
    )
    config = parse([*SHAPE, *words.split()])
    model, experts = config.model, config.experts
    assert model.init_method_std == 0.006
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.2)
    assert (experts.num_experts, experts.moe_router_topk) == (8, 3)
    assert experts.moe_router_load_balancing_type == "seq_aux_loss"
    assert (experts.moe_aux_loss_coeff, experts.moe_z_loss_coeff) == (0.02, 0.003)


def test_the_attention_backend_may_be_chosen_beside_megatrons_own_switch():
    config = parse([*SHAPE, "--use-flash-attn", "--attention-backend", "unfused"])
    assert config.kernels.attention_backend == "unfused"


def test_a_seed_that_no_generator_takes_is_refused():
    assert parse([*SHAPE, "--seed", str(2**32 - 1)]).run.seed == 2**32 - 1
    with pytest.raises(ValueError, match="--seed 4294967296 must be at least 0 and below"):
        parse([*SHAPE, "--seed", str(2**32)])


def test_notes_on_flags_are_logged_once_a_job(monkeypatch, caplog):
    caplog.set_level("INFO")
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        parse([*SHAPE, "--distributed-backend", "nccl", "--sequence-parallel"])
        for text in ("--distributed-backend", "--sequence-parallel", "Megatron's defaults"):
            assert sum(r.message.startswith(text) for r in caplog.records) == lines


def test_values_of_a_list_flag_are_kept_in_order():
    config = parse([*SHAPE, "--data-path", "0.3", "a", "0.7", "b"])
    assert config.data.data_path == ("0.3", "a", "0.7", "b")


def test_recipes_lie_over_each_other_and_flags_over_both(tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("num_layers = 2\nhidden_size = 64\nnum_attention_heads = 4\nlr = 1.0\n")
    second.write_text("lr = 2.0\nmin_lr = 0.5\nseed = 7\n")
    words = ["--recipe", str(first), "--recipe", str(second), "--seed", "8"]
    config = parse(words)
    assert (config.optimizer.lr, config.optimizer.min_lr, config.run.seed) == (2.0, 0.5, 8)
    assert config.launch.recipe == (str(first), str(second))


def test_a_step_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--ckpt-step 'latest' must be a whole number"):
        parse([*SHAPE, "--load", str(tmp_path), "--ckpt-step", "latest"])


def test_a_file_in_place_of_a_checkpoint_is_refused(tmp_path):
    file = tmp_path / "index.json"
    file.write_text("{}")
    for step in ([], ["--ckpt-step", "3"]):
        with pytest.raises(ValueError, match=r"index\.json is a file: give a run folder or"):
            parse([*SHAPE, "--load", str(file), *step])


def test_a_model_of_a_checkpoint_that_is_not_there_is_refused_by_its_folder(tmp_path):
    absent = tmp_path / "absent"
    assert parse([*SHAPE, "--load", str(absent)]).loading.load == str(absent)
    for flag in ("--load", "--pretrained-checkpoint"):
        for folder, why in ((absent, "does not exist"), (tmp_path, "holds no checkpoint")):
            with pytest.raises(ValueError, match=f"{flag} {folder} {why}: correct the path"):
                parse([flag, str(folder), "--lr", "1"])


def test_a_flag_before_another_flag_has_no_value():
    for flag in ("--recipe", "--load", "--model", "--ckpt-step", "--pretrained-checkpoint"):
        with pytest.raises(ValueError, match=f"{flag} needs a value"):
            parse([flag, "--lr", "1"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'num_layers = "two"', r"x\.toml: --num-layers 'two' must be a whole number"),
        (b"lr = 'high'", r"x\.toml: --lr 'high' must be a number"),
        (b"\xff\xfe", r"x\.toml: not valid TOML: not UTF-8"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path, content, message):
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        parse([*SHAPE, "--recipe", str(tmp_path / "x.toml")])
    with pytest.raises(ValueError, match="is a folder: give a TOML file"):
        parse([*SHAPE, "--recipe", str(tmp_path)])
    with pytest.raises(ValueError, match="--recipe absent does not exist: give"):
        parse(["--recipe", "absent"])


PIPELINE = ["--num-layers", "16", "--pipeline-model-parallel-size", "4", *SHAPE[2:]]


@pytest.mark.parametrize(
    "words", [["--num-layers-per-virtual-pipeline-stage", "2"],
              ["--num_layers_per_virtual_pipeline_stage=2"]],
)  # fmt: skip
def test_layers_per_virtual_stage_say_how_many_stages_a_rank_holds(words):
    config = parse([*words, *PIPELINE])
    assert config.pipeline.num_virtual_stages_per_pipeline_rank == 2


def test_layers_per_virtual_stage_count_the_layers_of_a_recipe(tmp_path):
    recipe = tmp_path / "model.toml"
    recipe.write_text("num_layers = 24\nhidden_size = 64\nnum_attention_heads = 4\n")
    words = ["--num-layers-per-virtual-pipeline-stage", "3", "--recipe", str(recipe)]
    config = parse([*words, *PIPELINE[2:4]])
    assert config.pipeline.num_virtual_stages_per_pipeline_rank == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["3", *PIPELINE], "make the layers a multiple of 12"),
        (["0", *PIPELINE], "make the layers a multiple of 1"),
        (["two", *PIPELINE], "must be a whole number"),
        (["2", "-", "Data", "loading", *PIPELINE], "'- Data loading' belong to no option"),
        (["2", *PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"], "set one option"),
    ],
)
def test_layers_per_virtual_stage_that_do_not_fit_are_refused(words, told):
    with pytest.raises(ValueError, match=told):
        parse(["--num-layers-per-virtual-pipeline-stage", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train-iters", "many"], "--train-iters 'many' must be a whole number"),
        (["--micro-batch-size", "0"], "--micro-batch-size 0 must be 1 or more"),
        (["--device", "tpu"], "--device 'tpu' is unknown: use auto, cpu or cuda"),
    ],
)
def test_a_value_that_a_config_refuses_is_named_with_what_it_may_be(words, message):
    with pytest.raises(ValueError, match=message):
        parse([*SHAPE, *words])


def test_all_faults_of_a_command_are_one_message(tmp_path):
    recipe = tmp_path / "x.toml"
    recipe.write_text("learning = 1\nlr = 'high'\nsteps = 3\n")
    words = "--num-layer 4 --hidden-size 100 --num-attention-heads 3 --batch-size 8 --lr fast"
    words += " --micro-batch-size 0 --rotary-percent 3 --optimizer lamb --ckpt-step last"
    words += f" --model no-such --recipe {recipe}"

    def check(config):
        raise OptionsError(
            ["--hidden-size 7 is odd.", "--train-iters is missing.", "--lr 0 is slow."]
        )

    with pytest.raises(OptionsError) as refusal:
        parse(words.split(), check=check)
    lines = refusal.value.lines
    expected = (
        *("unknown option --num-layer: did you mean --num-layers?", "--batch-size: use"),
        *("x.toml: unknown field learning", "x.toml: unknown field steps", "no-such"),
        *("--ckpt-step 'last' must be", "--optimizer 'lamb' is unknown", "--lr 'fast' must"),
        *("--hidden-size 100 cannot be split over --num-attention-heads 3", "--rotary-percent"),
        *("--micro-batch-size 0 must be 1 or more", "--train-iters is missing."),
    )
    assert len(lines) == len(expected), lines
    for text in expected:
        assert sum(text in line for line in lines) == 1, text


def test_a_line_that_follows_from_another_fault_is_left_out():
    def check(config):
        assert config.model.hidden_size == 1024  # a size that others can be checked with
        raise ValueError("--num-attention-heads 16 is an invention.")

    words = ["--num-layers", "2", "--hidden-size", "wide", "--num-attention-head", "4"]
    with pytest.raises(OptionsError) as refusal:
        parse(words, check=check)
    assert [line[:30] for line in refusal.value.lines] == [
        "unknown option --num-attention",
        "--hidden-size 'wide' must be a",
    ]


def test_a_command_that_needs_an_option_names_it_with_the_other_faults():
    with pytest.raises(OptionsError) as refusal:
        parse([*SHAPE, "--seed", "x"], "mcore-train mamba", needs="--hybrid-override-pattern")
    assert len(refusal.value.lines) == 2
    assert "mcore-train mamba needs --hybrid-override-pattern" in str(refusal.value)


@pytest.mark.parametrize("command", FAMILY_COMMANDS)
def test_megatrons_model_defaults_are_all_of_its_parser(command):
    """``nox -s megatron`` compares the table with the parser."""
    config_type = FAMILY_COMMANDS[command].run
    options = {option.name: megatron_default(option) for option in list_options(config_type)}
    theirs = {name: value for name, value in options.items() if value is not None}
    model = get_type_hints(config_type)["model"]
    without_default = {"max_position_embeddings", "rope_type", "num_layers"}
    for is_latent in (False, True):
        given = {"multi_latent_attention": is_latent}
        taken = defaults_not_taken(given, ["--no-bias-gelu-fusion"], config_type)
        expected = {
            field.name: theirs[field.name]
            for field in dataclasses.fields(model)
            if field.name in theirs and field.name not in without_default
            if is_latent or field.name not in LATENT_DEFAULTS
            if not (is_latent and field.name == "position_embedding_type")
            if theirs[field.name] != "none"
            if not isinstance(field.default, tuple)
            and field.default not in (dataclasses.MISSING, theirs[field.name])
        }
        assert {n: v for n, v in taken.items() if n != "rope_type"} == expected


def test_megatrons_defaults_are_taken_where_nothing_else_is_given(caplog):
    caplog.set_level("INFO")
    words = [*SHAPE, "--max-position-embeddings", "64"]
    model = parse([*words, "--megatron-defaults", "--hidden-dropout", "0.2"]).model
    assert not caplog.records
    assert (model.normalization, model.swiglu, model.add_bias_linear) == (
        *("LayerNorm", False),
        True,
    )
    assert (model.position_embedding_type, model.openai_gelu) == ("learned_absolute", True)
    assert (model.attention_dropout, model.hidden_dropout) == (0.1, 0.2)
    exact = parse([*words, "--megatron-defaults", "--no-bias-gelu-fusion"]).model
    assert not exact.openai_gelu
    latent = parse([*SHAPE, "--megatron-defaults", "--multi-latent-attention"]).model
    assert (latent.kv_lora_rank, latent.rope_type) == (32, "yarn")
    gated = parse([*words, "--megatron-defaults", "--swiglu", "--disable-bias-linear"]).model
    assert (gated.swiglu, gated.openai_gelu, gated.add_bias_linear) == (True, False, False)
    with pytest.raises(ValueError, match="no effect on --model tiny"):
        parse(["--model", "tiny", "--megatron-defaults"])


def test_a_run_in_megatrons_spelling_is_told_which_defaults_it_lacks(caplog):
    caplog.set_level("INFO")
    parse(SHAPE)
    assert not caplog.records
    parse([*SHAPE, "--use-mcore-models", "--no-swiglu", "--hidden-dropout", "0"])
    (line,) = [r.getMessage() for r in caplog.records if "--megatron-defaults" in r.message]
    assert "--normalization LayerNorm" in line
    assert "--attention-dropout 0.1" in line
    assert "swiglu" not in line
    assert "hidden-dropout" not in line
    caplog.clear()
    parse(SHAPE, is_megatron_script=True)
    assert "--position-embedding-type learned_absolute" in caplog.text
    caplog.clear()
    parse(["--model", "tiny", "--use-mcore-models"], is_megatron_script=True)
    assert "--megatron-defaults" not in caplog.text


def test_no_two_parts_own_one_field_and_every_field_has_a_help_text():
    assert len(field_types()) == sum(
        len(dataclasses.fields(getattr(parse(SHAPE), part.name)))
        for part in dataclasses.fields(TrainConfig)
    )


def test_a_flat_table_gives_the_config_back():
    config = parse([*SHAPE, "--lr", "1e-3", "--data-path", "a", "b"])
    assert compose(flat(config)) == config
    with pytest.raises(ValueError, match="no option is called layers"):
        compose({"layers": 3})


def test_what_a_preset_says_of_a_part_that_flags_turn_off_is_left_out():
    dense = [
        "--model",
        "deepseek-v3",
        "--num-experts",
        "0",
        "--mtp-num-layers",
        "0",
        "--rope-type",
        "rope",
    ]
    found = parse(dense)
    assert found.experts == MoEConfig()
    assert (found.model.mtp_loss_scaling_factor, found.model.beta_fast) == (0.1, 32.0)
    assert found.model.kv_lora_rank == 512
    given = parse([*dense, "--moe-router-topk", "4"])
    (line,) = [line for line in find_faults(*parts(given)) if "--num-experts" in line]
    assert line.startswith("--moe-router-topk 4 has no effect without --num-experts")
