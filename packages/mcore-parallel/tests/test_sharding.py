"""Logical tensors: boxes of local parameters against an element by element account."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import (
    NamedParameter,
    ParamLayout,
    Part,
    Shard,
    flat_shards,
    named_parameters,
    named_shards,
    replicated,
    shards_of,
    sliced_layout,
    undeclared_parameters,
    whole_layout,
)
from mcore_parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearOutput,
    RowParallelLinear,
)


def fake_axis(size, rank, name="tp"):
    return Axis(name, size, rank, None, tuple(range(size)))


@st.composite
def parts_along_rows(draw, shape, is_stack):
    """Cut dimension 0 into parts and padding; a part is a box anywhere in a logical tensor."""
    parts, begin = [], 0
    while begin < shape[0]:
        length = 1 if is_stack else draw(st.integers(1, shape[0] - begin))
        is_padding = draw(st.booleans()) and draw(st.booleans())
        if not is_padding:
            # A box inside the rows: from some column on, up to some column.
            inner_begin = [draw(st.integers(0, n - 1)) for n in shape[1:]]
            inner = [
                draw(st.integers(1, n - b)) for n, b in zip(shape[1:], inner_begin, strict=True)
            ]
            lengths = (length, *inner)
            logical = lengths[1:] if is_stack else lengths
            offsets = [draw(st.integers(0, 3)) for _ in logical]
            room = [draw(st.integers(0, 3)) for _ in logical]
            parts.append(
                {
                    "name": f"part{len(parts)}",
                    "shape": tuple(map(sum, zip(offsets, logical, room, strict=True))),
                    "offsets": tuple(offsets),
                    "local_offsets": (begin, *inner_begin),
                    "lengths": lengths,
                }
            )
        begin += length
    return parts


@st.composite
def descriptions(draw):
    """The shape of a parameter of one to three dimensions, and its parts."""
    shape = tuple(draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 3))))
    is_stack = len(shape) == 3 and draw(st.booleans())
    return shape, draw(parts_along_rows(shape, is_stack))


def build(shape, parts):
    """Build a parameter with its layout, elements numbered from 1."""
    numbers = torch.arange(1.0, prod(shape) + 1).view(shape)
    layout = ParamLayout(tuple(Part(**part) for part in parts))
    return NamedParameter("weight", nn.Parameter(numbers), layout)


def account(named, is_held=lambda flat: True):
    """Element by element: (logical name, index) -> value, from the definition of a part."""
    found = {}
    for index in product(*map(range, named.parameter.shape)):
        value = named.parameter[index].item()
        for part in named.layout.parts:
            inside = [i - b for i, b in zip(index, part.local_offsets, strict=True)]
            if not all(0 <= i < n for i, n in zip(inside, part.lengths, strict=True)):
                continue
            drop = len(part.lengths) - len(part.shape)
            place = tuple(o + i for o, i in zip(part.offsets, inside[drop:], strict=True))
            if is_held(int(value) - 1):
                found[part.name, place] = value
    return found


def elements(shards):
    """Element by element what pieces hold; a second holder of an element is an error."""
    found = {}
    for name, shard in shards.items():
        for piece in shard.pieces:
            assert tuple(piece.data.shape) == piece.lengths
            assert prod(piece.lengths) > 0
            for index in product(*map(range, piece.lengths)):
                place = tuple(o + i for o, i in zip(piece.offsets, index, strict=True))
                assert all(p < n for p, n in zip(place, shard.shape, strict=True))
                assert (name, place) not in found
                found[name, place] = piece.data[index].item()
    return found


@settings(max_examples=50, deadline=None, derandomize=True)
@given(descriptions())
def test_shards_of_a_parameter_hold_each_element_once_at_its_logical_place(description):
    named = build(*description)
    shards = shards_of([(named, named.parameter.detach())])
    assert elements(shards) == account(named)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(descriptions(), st.data())
def test_flat_ranges_hold_each_of_their_elements_once_at_its_logical_place(description, data):
    named = build(*description)
    size = named.parameter.numel()
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    # The range lies somewhere in a larger buffer, as a bucket's shard does.
    buffer = torch.cat([torch.zeros(5), named.parameter.detach().flatten()[start:stop]])
    flat = buffer[5:]
    shards = flat_shards([(named, start, stop, flat)])
    assert elements(shards) == account(named, lambda i: start <= i < stop)
    for shard in shards.values():
        assert len(shard.pieces) <= 2 * named.parameter.dim() - 1
        for piece in shard.pieces:
            piece.data.fill_(-1.0)
    assert set(elements(shards).values()) <= {-1.0}
    assert (flat == -1).sum() == sum(p.data.numel() for s in shards.values() for p in s.pieces)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(descriptions(), st.data())
def test_neighbouring_ranges_share_nothing_and_miss_nothing(description, data):
    named = build(*description)
    size = named.parameter.numel()
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    flat = named.parameter.detach().flatten()
    found = {}
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        piece = elements(flat_shards([(named, start, stop, flat[start:stop])]))
        assert not piece.keys() & found.keys()
        found |= piece
    assert found == account(named)


def test_a_range_over_fused_qkv_crosses_three_logical_tensors():
    outputs = (LinearOutput("q", 4), LinearOutput("k", 2), LinearOutput("v", 2))
    layer = ColumnParallelLinear(3, outputs, bias=True)
    layer.weight.data = torch.arange(24.0).view(8, 3)
    weight, _ = named_parameters(layer)
    flat = layer.weight.data.flatten()[10:20]
    shards = flat_shards([(weight, 10, 20, flat)])
    boxes = {
        name: [(p.offsets, p.lengths, p.data.flatten().tolist()) for p in shard.pieces]
        for name, shard in shards.items()
    }
    assert boxes == {
        "q.weight": [((3, 1), (1, 2), [10.0, 11.0])],
        "k.weight": [((0, 0), (2, 3), [12.0, 13.0, 14.0, 15.0, 16.0, 17.0])],
        "v.weight": [((0, 0), (1, 2), [18.0, 19.0])],
    }


def test_rows_of_every_part_are_the_ranks_own_share_though_the_weight_is_fused():
    for rank in range(2):
        axis = fake_axis(2, rank)
        layer = ColumnParallelLinear(
            3, (LinearOutput("gate", 4), LinearOutput("up", 6)), axis=axis
        )
        shards = named_shards(layer)
        (gate,), (up,) = shards["gate.weight"].pieces, shards["up.weight"].pieces
        assert (gate.offsets, gate.lengths) == ((2 * rank, 0), (2, 3))
        assert (up.offsets, up.lengths) == ((3 * rank, 0), (3, 3))
        assert up.data.data_ptr() == layer.weight[2:].data_ptr()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        axis = fake_axis(2, 1)
        self.blocks = nn.ModuleDict({"7": RowParallelLinear(4, 3, axis=axis, bias=True)})
        self.norm = nn.LayerNorm(3)
        self.alias = self.norm


def test_names_are_paths_and_a_parameter_under_two_paths_is_given_once():
    shards = named_shards(Model())
    assert set(shards) == {"blocks.7.weight", "blocks.7.bias", "norm.weight", "norm.bias"}
    assert shards["blocks.7.weight"].shape == (3, 4)
    assert shards["blocks.7.weight"].pieces[0].offsets == (0, 2)
    assert shards["norm.weight"].pieces[0].lengths == (3,)


def test_the_owner_is_the_first_of_all_who_hold_the_same_piece():
    model = Model()
    shards = named_shards(model)
    assert shards["blocks.7.weight"].is_owner
    assert not shards["blocks.7.bias"].is_owner
    assert shards["norm.weight"].is_owner
    later = named_shards(model, {"dense": fake_axis(3, 2, "dp")})
    assert not any(shard.is_owner for shard in later.values())
    assert [axis.name for axis in later["blocks.7.bias"].replicas] == ["tp", "dp"]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))

    def layouts(self):
        layout = whole_layout("3.weight", (2, 3))
        return {
            "weight": ParamLayout(layout.parts, data="expert", tied=fake_axis(2, 1, "ends"))
        }


def test_expert_parameters_replicate_over_their_own_data_ranks_and_tied_ones_over_stages():
    data = {"dense": fake_axis(4, 1, "dp_cp"), "expert": fake_axis(2, 0, "expert_dp")}
    shard = named_shards(Experts(), data)["3.weight"]
    assert [axis.name for axis in shard.replicas] == ["ends", "expert_dp"]


@pytest.mark.parametrize("rank", range(4))
def test_padding_at_the_end_is_never_described(rank):
    axis = fake_axis(4, rank)
    layout = sliced_layout("", (5, 2), 0, axis, (2, 2))
    parameter = nn.Parameter(torch.zeros(2, 2))
    named = NamedParameter("w", parameter, layout)
    rows = [2, 2, 1, 0][rank]
    shards = shards_of([(named, parameter.detach())])
    assert [p.lengths for s in shards.values() for p in s.pieces] == [(rows, 2)] * (rows > 0)
    flat = flat_shards([(named, 0, 4, parameter.detach().flatten())])
    assert sum(p.data.numel() for s in flat.values() for p in s.pieces) == rows * 2


def test_an_uneven_cut_without_padding_is_refused():
    with pytest.raises(
        ValueError, match=r"dimension 0 of \(5, 2\) does not divide over axis tp"
    ):
        sliced_layout("", (5, 2), 0, fake_axis(2, 0))


def test_tensors_and_names_that_contradict_are_refused():
    named = NamedParameter("w", nn.Parameter(torch.zeros(2, 2)), whole_layout("w", (2, 2)))
    with pytest.raises(ValueError, match="w: tensor"):
        shards_of([(named, torch.zeros(4))])
    other = NamedParameter("v", nn.Parameter(torch.zeros(3)), whole_layout("w", (3,)))
    with pytest.raises(ValueError, match="two parameters hold w, one with"):
        shards_of([(named, torch.zeros(2, 2)), (other, torch.zeros(3))])
    assert Shard((2,), torch.float32, ()).is_owner


def test_a_plain_module_is_declared_as_whole_and_layers_keep_their_own_layouts():
    tp = fake_axis(2, 1)
    split = ColumnParallelLinear(4, 6, axis=tp)
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "split": split})
    assert undeclared_parameters(model) == ["norm.weight", "norm.bias"]
    assert replicated(model, tp, partial=True) is model
    assert undeclared_parameters(model) == []
    found = {named.name: named.layout.parts[0] for named in named_parameters(model)}
    assert found["norm.bias"].shape == (4,)
    assert found["norm.bias"].replicas == found["norm.bias"].partial == tp
    assert found["split.weight"].shape == (6, 4)
    assert found["split.weight"].lengths == (3, 4)
    assert not named_shards(model)["norm.weight"].is_owner
