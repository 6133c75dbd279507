from dataclasses import replace
from pathlib import Path

import pytest

from mcore_models.presets import load_preset, preset_names
from mcore_train.composition import compose, field_types, flat
from mcore_train.options.parsing import parse
from mcore_train.options.recipe import changed_options, read_recipe, to_flags, write_recipe

RECIPES = sorted((Path(__file__).parents[4] / "recipes").rglob("*.toml"))
RECIPES = [
    path for path in RECIPES if path.parent.name != "known"
]  # tests/docs/test_recipes.py


def write(folder, text):
    path = folder / "some.toml"
    path.write_text(text)
    return path


def test_an_unknown_field_names_the_file_and_the_nearest_field(tmp_path):
    path = write(tmp_path, "[model]\nnum_layer = 3\n")
    with pytest.raises(
        ValueError, match=r"some\.toml: unknown field num_layer: did you mean num_layers"
    ):
        read_recipe(path, field_types())


@pytest.mark.parametrize(
    "text", ["lr = 1.0\nlr = 2.0\n", "[optimizer]\nlr = 1.0\n[other]\nlr = 2.0\n"]
)
def test_a_doubled_field_names_the_file_and_the_field(tmp_path, text):
    with pytest.raises(ValueError, match=r"some\.toml: lr is given twice"):
        read_recipe(write(tmp_path, text), field_types())


def test_a_file_that_is_no_toml_is_told_with_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"some\.toml: not valid TOML"):
        read_recipe(write(tmp_path, "lr = = 1\n"), field_types())


def test_fields_become_flags_switches_and_lists(tmp_path):
    path = write(tmp_path, 'swiglu = false\nbf16 = true\ndata_path = ["0.3", "a"]\nlr = 1e-3\n')
    assert to_flags(read_recipe(path, field_types())) == [
        "--no-swiglu",
        "--bf16",
        *("--data-path", "0.3", "a"),
        *("--lr", "0.001"),
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_reads_and_gives_a_valid_config(path):
    shape = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"]
    shape = [] if path.parent.name == "model" else shape
    config = parse(["--recipe", str(path), *shape])
    assert config.launch.recipe == (str(path),)


def test_a_published_model_is_named_and_flags_and_recipes_lie_over_it(tmp_path):
    config = parse(["--model", "gemma-2-9b", "--num-layers", "4", "--window-size", "7", "0"])
    preset = load_preset("gemma-2-9b")
    assert config.model == replace(preset.config, num_layers=4, window_size=(7, 0))
    assert config.tokenizer.vocab_size == preset.vocab_size
    path = write(tmp_path, 'model = "llama-3-8b"\nnum_layers = 2\n')
    again = parse(["--recipe", str(path)])
    assert again.model == replace(load_preset("llama-3-8b").config, num_layers=2)
    with pytest.raises(ValueError, match="unknown preset llama-9: did you mean llama-"):
        parse(["--model", "llama-9"])
    with pytest.raises(ValueError, match="--model bert-base is of another family: use"):
        parse(["--model", "bert-base"])


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if p.stem in preset_names()], ids=lambda path: path.stem
)
def test_a_recipe_and_a_preset_of_one_name_are_one_model(path):
    config = parse(["--recipe", str(path)])
    preset = load_preset(path.stem)
    assert (config.model, config.experts) == (preset.config, preset.moe)
    assert config.tokenizer.vocab_size in (0, preset.vocab_size)


def test_a_run_can_be_repeated_from_the_recipe_that_it_keeps(tmp_path):
    config = compose(
        {
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "lr": 1e-3,
            "data_path": ("0.5", 'a "b"'),
            "bf16": True,
        }
    )
    path = write(tmp_path, write_recipe(changed_options(config)))
    assert flat(compose(read_recipe(path, field_types()))) == flat(config)
