"""Every option of megatron-core's parser has an answer, and the page lists what it is."""

import sys

import pytest
from docs.defaults import megatron_defaults
from docs.megatron_page import PAGE, answer, options_of_parser, own_options, render

from mcore_base.command_line import FaultCollector
from mcore_train.options.megatron_flags import parser_flags, translate
from mcore_train.options.parsing import LAYERS_PER_STAGE, parse

LISTS = {"--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--cp-comm-type"}
"""Options that may have several values there, a layer or a loss each, and have one here."""
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 16"


def test_the_page_is_what_the_tables_of_the_command_say():
    assert PAGE.read_text() == render(), "uv run python tests/docs/megatron_page.py"


def test_every_option_of_megatrons_parser_has_an_answer():
    assert [name for name in parser_flags() if not answer(name)] == []


def test_every_option_that_is_taken_is_taken_with_as_many_values():
    known = {*own_options(), LAYERS_PER_STAGE}
    for name, row in parser_flags().items():
        if row.refused or name in (*LISTS, LAYERS_PER_STAGE, "--window-size"):
            continue
        if name == "--exit-signal":  # one signal or several here
            continue
        own = own_options().get(name)
        if own is not None:
            counts = {"+": None, "*": None, 3: None}  # three numbers are a list here
            assert (own.num_values or 0) == (counts.get(row.takes, row.takes) or 0), name
            continue
        words = [row.only or "8"] * (row.takes if isinstance(row.takes, int) else 2)
        faults = FaultCollector()
        line = translate([*filter(None, [row.needs]), name, *words], known, faults)
        assert not faults.lines, name
        left = [word for word in line.words if word == "8"]
        assert len(left) == (len(words) if row.becomes.endswith("{}") else 0), name


def test_an_option_that_megatron_has_too_has_its_default_in_the_table():
    both = set(parser_flags()) & set(own_options())
    names = {own_options()[flag].name for flag in both}
    assert sorted(names - set(megatron_defaults())) == []


@pytest.mark.megatron
def test_the_options_are_those_of_megatrons_parser():
    rows = {name: (row.takes, row.default) for name, row in parser_flags().items()}
    assert rows == options_of_parser(), "python tests/docs/megatron_page.py options"


MEANINGS = (
    ("--enable-cuda-graph", "cuda_graph_impl", "local"),
    ("--sequence-parallel", "sequence_parallel", False),
    ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
    (
        "--no-position-embedding --position-embedding-type rope",
        "position_embedding_type",
        "rope",
    ),
    ("--recompute-activations", "recompute_granularity", "selective"),
    ("--group-query-attention", "num_query_groups", 1),
    ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
    ("--disable-bias-linear", "add_bias_linear", False),
    ("--window-size 4,0", "window_size", (4, 0)),
    ("--swiglu", "swiglu", True),
    ("--fp8-format hybrid --fp8-amax-history-len 4 --bf16", "fp8_recipe", "delayed"),
    ("--persistent-save-interval 3 --save x", "save_interval", 3),
    ("--encoder-seq-length 16", "seq_length", 16),
)
"""Flags, and what an option is after both have read them."""


@pytest.mark.parametrize(("words", "name", "value"), MEANINGS)
def test_a_translated_flag_sets_the_option_to_what_megatron_sets_it_to(words, name, value):
    assert _ours(words.split(), name) == value


@pytest.mark.megatron
@pytest.mark.parametrize(("words", "name", "value"), MEANINGS)
@pytest.mark.filterwarnings("ignore")
def test_megatrons_parser_sets_the_option_so(words, name, value, monkeypatch, capsys):
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    length = "" if "--encoder-seq-length" in words else "--seq-length 16"
    common = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --transformer-impl local"
    common += " --no-persist-layer-norm"
    given = f"{SHAPE} {length} {common} {words}".split()
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *given])
    arguments = parse_args()
    validate_args(arguments)
    assert getattr(arguments, name) == value


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")
def test_megatron_refuses_its_switch_beside_a_learned_table(monkeypatch):
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    words = f"{SHAPE} --seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3"
    words += " --transformer-impl local --no-persist-layer-norm --no-position-embedding"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words.split()])
    with pytest.raises(RuntimeError, match="use --position-embedding-type"):
        validate_args(parse_args())
    with pytest.raises(ValueError, match="turns --position-embedding-type learned_absolute"):
        _ours(["--no-position-embedding", "--megatron-defaults"], "hidden_size")


def _ours(words, name):
    config = parse([*SHAPE.split(), *words])
    parts = (getattr(config, part) for part in config.__dataclass_fields__)
    (owner,) = (part for part in parts if name in part.__dataclass_fields__)
    return getattr(owner, name)
