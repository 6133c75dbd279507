from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from mcore_base.command_line import OptionsError, parse, unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How large a cake is."""

    num_layers: int
    """Layers, each of
    ``--height`` centimetres."""
    height: float = 2.5
    """Of a layer."""
    icing: Literal["", "sugar", "butter"] = ""
    """What is on top; none by default."""
    candles: bool = True
    """Whether to light some."""
    colours: tuple[str, ...] = ()
    """One a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Oven:
    """Where it is baked."""

    degrees: int = 180
    """Celsius."""

    def __post_init__(self):
        if self.degrees < 0:
            raise ValueError("--degrees must be 0 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What it stands on."""

    legs: int = 4
    """Of the table."""
    width: int = 5
    """Of the table."""

    def __post_init__(self):
        for name in ("legs", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 1 or more.")
        if self.width < self.legs:
            raise ValueError(f"--legs {self.legs} do not fit under --width {self.width}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cake:
    """A cake, from its shape to its oven."""

    shape: Shape
    oven: Oven = field(default_factory=Oven)


def read(*words, **more):
    return parse(Cake, "bake cake", words, **more)


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    """A terminal of 100 columns, whatever the tests run in."""
    monkeypatch.setenv("COLUMNS", "100")


def help_of(capsys, *words, **more):
    with pytest.raises(SystemExit) as end:
        read(*words, **more)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_flags_of_all_parts_are_one_flat_name_space():
    cake = read(
        "--num_layers", "3", "--degrees=200", "--colours", "red", "blue", "--no-candles"
    )
    shape = Shape(num_layers=3, candles=False, colours=("red", "blue"))
    assert cake == Cake(shape=shape, oven=Oven(degrees=200))


def test_negative_numbers_and_patterns_of_layers_are_values_and_the_last_flag_wins():
    assert read("--num-layers", "1", "--height", "-1e-3").shape.height == -1e-3
    assert read("--num-layers", "1", "--height", "1", "--height", "2").shape.height == 2
    patterns = ("-", "--M*", "--")
    assert read("--num-layers", "1", "--colours", *patterns).shape.colours == patterns


def test_defaults_may_come_from_elsewhere_and_flags_lie_over_them():
    cake = read("--height", "4", defaults={"num_layers": 7, "height": 1.0})
    assert (cake.shape.num_layers, cake.shape.height) == (7, 4.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "bake cake needs --num-layers: see bake cake --help."),
        ("--num-layers", "--num-layers needs a value."),
        ("--num-layers x", "--num-layers 'x' must be a whole number."),
        ("--num-layers 3 --height tall", "--height 'tall' must be a number."),
        ("--num-layers 3 --icing salt", "--icing 'salt' is unknown: use sugar or butter."),
        (
            "--num-layers 3 --candles=yes",
            "--candles takes no value: --[no-]candles turns it on or off.",
        ),
        ("--num-layers 3 4", "'4' belongs to no option; options begin with two dashes."),
        ("--num-layer 3", "unknown option --num-layer: did you mean --num-layers?"),
        ("--num-layers 3 --degrees -1", "--degrees must be 0 or more."),
    ],
)
def test_what_cannot_be_read_is_one_line(words, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the whole text is compared below
        read(*words.split())
    assert str(error.value) == message


def test_help_rewraps_docstrings_and_shows_choices_defaults_and_what_is_required(capsys):
    text = help_of(capsys, "--help")
    lines = text.splitlines()
    assert lines[:3] == [
        "usage: bake cake [OPTIONS]",
        "",
        "A cake, from its shape to its oven.",
    ]
    assert "shape: How large a cake is." in lines
    first, second = (line.partition("  ")[2].split(maxsplit=2) for line in lines[5:7])
    assert first == ["--num-layers", "INT", "Layers, each of --height centimetres. Required."]
    assert second == ["--height", "FLOAT", "Of a layer. Default: 2.5."]
    assert "--icing {sugar,butter}" in text
    assert "Whether to light some. On by default." in text


def test_short_help_shows_the_usual_options_and_names_the_topics(capsys):
    text = help_of(capsys, "--help", usual=("num_layers",))
    assert "--num-layers" in text
    assert "--degrees" not in text
    assert "1 of 6 options; --help-all shows all of them." in text
    assert "--help TOPIC shows one of shape, oven," in text
    assert "--degrees" in help_of(capsys, "--num-layers", "3", "--help-all", usual=("candles",))


@pytest.mark.parametrize("topic", ["oven", "--degrees", "deg"])
def test_help_on_a_topic_or_a_name_shows_its_options(capsys, topic):
    text = help_of(capsys, "--help", topic, usual=("num_layers",))
    assert "--degrees INT" in text
    assert "--num-layers" not in text


def test_help_on_an_unknown_topic_names_the_topics():
    with pytest.raises(ValueError, match="unknown topic owen: did you mean oven"):
        read("--help", "owen")


def test_a_function_takes_words_without_flags_and_describes_its_arguments(capsys):
    def bake(folder: Path, more: tuple[Path, ...] = (), /, *, hours: tuple[int, int] = (1, 2)):
        """Bake what is in a folder.

        Args:
            folder: where
                the dough is.
            more: other folders.
            hours: from and to.
        """
        return folder, more, hours

    words = ["a", "--hours", "3", "4", "b", "c"]
    assert parse(bake, "bake", words) == (Path("a"), (Path("b"), Path("c")), (3, 4))
    with pytest.raises(SystemExit):
        parse(bake, "bake", ["--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: bake FOLDER MORE ... [OPTIONS]\n\nBake what is in a folder.")
    assert "where the dough is. Required." in out


@pytest.mark.parametrize(
    ("name", "known", "answer"),
    [
        ("--wandb-project", ["--nproc", "--no-rope"], "unknown option --wandb-project."),
        ("--lr-warmup", ["--lr-warmup-iters", "--lr"], "did you mean --lr-warmup-iters?"),
        (
            "--topk",
            ["--moe-topk", "--topk-groups"],
            "did you mean --moe-topk or --topk-groups?",
        ),
        ("--rank", ["--ranks", "--stages-per-rank"], "did you mean --ranks?"),
        ("--temprature", ["--temperature", "--top-k"], "did you mean --temperature?"),
    ],
)
def test_only_a_name_that_is_near_is_offered_for_an_unknown_one(name, known, answer):
    assert unknown(name, known).endswith(answer)


def test_all_faults_are_found_in_one_pass_and_what_follows_from_them_is_left_out():
    words = "--num-layer 3 --heigth 4 --height tall --degrees -1 --icing salt 7 8 --candles"
    with pytest.raises(OptionsError) as refusal:
        read(*words.split())
    assert refusal.value.lines == (
        "unknown option --num-layer: did you mean --num-layers?",
        "unknown option --heigth: did you mean --height?",
        "--height 'tall' must be a number.",
        "--icing 'salt' is unknown: use sugar or butter.",
        "'7 8' belong to no option; options begin with two dashes.",
        "--degrees must be 0 or more.",
    )


def test_every_fault_of_a_dataclass_is_found_though_it_raises_the_first_alone():
    def bake(oven: Oven, table: Table, hours: int = 1):
        raise AssertionError("called with faults")

    with pytest.raises(OptionsError) as refusal:
        parse(bake, "bake", ["--degrees", "-1", "--legs", "0", "--width", "0", "--hour", "2"])
    assert refusal.value.lines == (
        "unknown option --hour: did you mean --hours?",
        "--degrees must be 0 or more.",
        "--legs must be 1 or more.",
        "--width must be 1 or more.",
    )


def test_options_are_checked_though_a_required_one_of_their_dataclass_is_missing():
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Guests:
        """Who comes."""

        names: tuple[str, ...]
        """Of all."""
        chairs: int = 1
        """For them."""

        def __post_init__(self):
            if self.chairs < 1:
                raise ValueError("--chairs must be 1 or more.")
            if self.chairs < len(self.names):
                raise ValueError("--chairs are too few for --names.")

    with pytest.raises(OptionsError) as refusal:
        parse(Guests, "invite", ["--name", "Ada", "--chairs", "0"])
    assert refusal.value.lines == (
        "unknown option --name: did you mean --names?",
        "--chairs must be 1 or more.",
    )


def test_a_default_that_replaces_a_fault_is_not_reported_against_other_options():
    """``--legs 0`` is reset to 4, beside which ``--width 1`` would be a fault."""
    with pytest.raises(ValueError, match=r"^--legs must be 1 or more\.$"):
        parse(Table, "lay", ["--legs", "0", "--width", "1"])
    with pytest.raises(ValueError, match=r"^--legs 4 do not fit under --width 1\.$"):
        parse(Table, "lay", ["--width", "1"])


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("--no-persist-layer-norm", ["--no-qk-layernorm", "--norm-epsilon"]),
        ("--no-load-rng", ["--load-rng-state"]),
        ("--mtp-standalone", ["--mtp-num-layers", "--standalone-stage"]),
    ],
)
def test_a_name_that_means_something_else_is_not_offered(name, known):
    assert unknown(name, known) == f"unknown option {name}."
