"""Configs whose fields carry their rules, alone and together with the others of a command."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from mcore_base.command_line import parse
from mcore_base.options import (
    ON,
    Because,
    Options,
    OptionsError,
    Rule,
    When,
    describe_rules,
    find_faults,
    idle_options,
    option,
    rules,
    rules_of,
)

FROZEN = {"frozen": True, "kw_only": True, "slots": True}


@dataclass(**FROZEN)
class Oven(Options):
    """An oven."""

    trays: int = field(metadata=rules(minimum=1))
    degrees: float = option(180.0, above=0, maximum=300, shrinks_to=20.0)
    mode: Literal["", "fan", "grill"] = option("", selects_path="heat.{mode}")
    steam: bool = False
    steam_liters: float = option(1.0, minimum=0, below=5, part_of={"steam": ON})
    stone: bool = option(
        False, excludes={"mode": Because("which burns it", "grill"), "loaves": ON}
    )
    timer: int = option(0, minimum=0, zero="off", needs={"clock": ("wall", "own")})

    rules = (
        Rule(
            ("trays", "degrees"),
            lambda v: v.trays * v.degrees > 600,
            "--trays {trays} at --degrees {degrees:g} need more than the oven has: use fewer.",
        ),
    )

    @property
    def is_moist(self) -> bool:
        return self.steam


@dataclass(**FROZEN)
class Dough(Options):
    """A dough."""

    part_of = (When("mode", lambda mode: mode != "grill", "--mode other than grill"),)

    loaves: int = 0
    clock: Literal["none", "wall", "own"] = "none"
    crust: bool = option(True, idle_with=(When("is_moist", bool, "steam"),))
    glaze: Literal["", "egg"] = option("", idle_with={"clock": Because("as it burns", "own")})

    rules = (
        Rule(
            ("loaves", "trays"),
            lambda v: v.loaves > 4 * v.trays and "--loaves: at most four a tray.",
        ),
        Rule(("loaves", "stone"), lambda v: v.loaves == 3, "three loaves", is_note=True),
    )


def test_a_config_alone_raises_all_its_own_faults():
    with pytest.raises(OptionsError) as refused:
        Oven(trays=0, degrees=301, mode="microwave", steam=True, steam_liters=5)
    assert refused.value.lines == (
        "--trays 0 must be 1 or more.",
        "--degrees 301 must be above 0 and at most 300.",
        "--mode 'microwave' is unknown: use fan or grill.",
        "--steam-liters 5 must be at least 0 and below 5.",
    )
    with pytest.raises(OptionsError, match="--trays 3 at --degrees 250 need more"):
        Oven(trays=3, degrees=250.0)
    with pytest.raises(OptionsError, match="--degrees nan is not finite"):
        Oven(trays=3, degrees=float("nan"))


def test_a_rule_is_not_computed_from_values_that_are_at_fault():
    with pytest.raises(OptionsError) as refused:
        Oven(trays=-700, degrees=-1.0)
    assert len(refused.value.lines) == 2


def test_options_of_a_feature_that_is_off_are_refused_by_the_command_alone():
    oven = Oven(trays=1, steam_liters=9.0)
    assert find_faults(oven) == [
        "--steam-liters 9.0 has no effect without --steam: give that, or leave it out."
    ]
    assert idle_options({"steam_liters": 9.0}, [Oven]) == {"steam_liters"}
    assert idle_options({"mode": "grill"}, [Oven, Dough]) >= {"loaves", "clock", "timer"}


def test_configs_of_a_command_are_checked_against_each_other():
    assert find_faults(Oven(trays=1, timer=3)) == []  # no config here has a clock
    oven, dough = Oven(trays=1, timer=3, stone=True), Dough(loaves=5)
    assert find_faults(oven, dough) == [
        "--stone and --loaves 5 exclude each other: leave one out.",
        "--timer 3 has no effect without --clock wall or own: give that, or leave it out.",
        "--loaves: at most four a tray.",
    ]
    assert find_faults(Oven(trays=1, timer=3), Dough(clock="own")) == []
    assert find_faults(oven, Dough(loaves=3), notes=True) == ["three loaves"]
    (line,) = find_faults(Oven(trays=1, mode="grill"), Dough(loaves=2, clock="own"))
    assert line == (
        "--loaves 2 and --clock own have no effect without --mode other than grill: give "
        "that, or leave them out."
    )
    with pytest.raises(OptionsError, match="--stone and --mode grill exclude each other, whi"):
        Oven(trays=1, mode="grill", stone=True)
    moist = find_faults(Oven(trays=1, steam=True), Dough(crust=False))
    assert moist == ["--no-crust has no effect with steam: leave it out."]
    with pytest.raises(
        OptionsError, match="egg has no effect with --clock own, as it burns: l"
    ):
        Dough(glaze="egg", clock="own")


def test_a_class_that_changes_a_default_keeps_the_rules_of_the_field():
    @dataclass(**FROZEN)
    class HotOven(Oven):
        """A hotter oven."""

        degrees: float = 250.0

    with pytest.raises(OptionsError, match=r"--degrees 400\.0 must be above 0"):
        HotOven(trays=1, degrees=400.0)
    assert rules_of(HotOven)["degrees"].shrinks_to == 20.0
    assert rules_of(HotOven)["mode"].selects_path == "heat.{mode}"


def test_rules_are_described_for_help_and_docs():
    assert describe_rules(rules_of(Oven)["timer"]) == "Needs --clock wall or own."
    assert describe_rules(rules_of(Oven)["stone"]) == "Excludes --mode grill or --loaves."
    assert describe_rules(rules_of(Dough)["loaves"]) == "Needs --mode other than grill."
    assert describe_rules(rules_of(Oven)["trays"]) == ""


def test_arguments_of_a_command_are_checked_with_its_other_faults():
    def bake(
        oven: Oven,
        times: Annotated[int, rules(minimum=1)] = 1,
        note: Annotated[
            str, Rule(("note", "trays"), lambda v: v.note and v.trays == 1, "x")
        ] = "",
    ) -> int:
        """Bake."""
        return times

    with pytest.raises(OptionsError) as refused:
        parse(
            bake,
            "bake",
            [
                "--trays",
                "1",
                "--times",
                "0",
                "--note",
                "a",
                "--degrees",
                "999",
                "--colour",
                "red",
            ],
        )
    assert refused.value.lines == (
        "unknown option --colour.",
        "--degrees 999.0 must be above 0 and at most 300.",
        "--times 0 must be 1 or more.",
        "x",
    )
    assert parse(bake, "bake", ["--trays", "2", "--note", "a"]) == 1
