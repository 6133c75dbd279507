"""Recipes of known models: each resolves for its cluster, fits, and is on the page."""

import re

import pytest
from docs.blocks import ROOT
from docs.recipes_page import PAGE, RATES, Recipe, recipes, render, small_world

from mcore_train.cli import main
from mcore_train.planning.dry_run import dry_run
from mcore_train.planning.memory import GIB
from mcore_train.planning.system import SYSTEMS

RECIPES = recipes()
FEW = 8
"""GPUs of the recipes whose dry run belongs to the default suite."""


def check_dry_run(recipe: Recipe, num_ranks: int, **changes) -> None:
    config = changes.get("config", recipe.config)
    text = dry_run(config, recipe.command.family, num_ranks)
    assert f"dry run of {num_ranks} ranks" in text
    fullest = re.search(r"fullest rank: .* planned [\d.]+ \(([-+\d.]+)%\)", text)
    assert fullest is not None
    assert abs(float(fullest[1])) < 8, f"{recipe.name}: {fullest[0]}"


def test_the_page_has_the_predictions_of_this_planner():
    assert PAGE.read_text() == render(), "run `uv run python tests/docs/recipes_page.py`"
    for recipe in RECIPES:
        assert recipe.row.memory.total < SYSTEMS[recipe.head[3]].memory_gib * GIB, recipe.name


def test_a_recipe_names_a_model_and_repeats_no_size_of_it():
    for recipe in RECIPES:
        text = recipe.path.read_text()
        assert f'\nmodel = "{recipe.name}"\n' in text
        assert not re.search(r"^(num_layers|hidden_size|vocab_size|num_experts) =", text, re.M)
        assert len(" ".join(recipe.comment[1:])) > 60, f"{recipe.name} has no reason"


def test_every_rate_of_a_recipe_has_a_source_or_says_that_it_is_ours():
    given = {each.name for each in RECIPES if "\n[optimizer]\n" in each.path.read_text()}
    assert given - set(RATES) == set()
    assert set(RATES) - {each.name for each in RECIPES} == set()


def test_recipes_of_one_host_resolve_as_their_ranks_would():
    for recipe in (each for each in RECIPES if each.num_gpus <= FEW):
        check_dry_run(recipe, recipe.num_gpus)


def test_the_recipe_of_405b_resolves_with_the_data_ranks_of_one_replica():
    recipe = next(each for each in RECIPES if each.name == "llama-3.1-405b")
    config, num_ranks = small_world(recipe, 128)
    check_dry_run(recipe, num_ranks, config=config)


@pytest.mark.slow  # nox -s docs; thousands of ranks make tens of thousands of groups
@pytest.mark.parametrize(
    "recipe", [each for each in RECIPES if each.num_gpus > FEW], ids=lambda each: each.name
)
def test_a_recipe_of_several_hosts_resolves_as_its_ranks_would(recipe):
    check_dry_run(recipe, recipe.num_gpus)


def test_the_commands_of_the_page_run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    block = re.search(r"```bash\n(mcore-train plan .*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    for line in block[1].replace("\\\n", " ").strip().splitlines():
        assert main(line.split()[1:]) == 0
    assert "dry run of 8 ranks" in capsys.readouterr().out
