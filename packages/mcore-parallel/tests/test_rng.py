"""Layout-free normal filling, and named streams."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from warm_ranks import run_ranks

from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.rng import (
    RngStreams,
    StreamDropout,
    fill_normal_,
    fill_parameter_,
)
from mcore_parallel.sharding import NamedParameter, ParamLayout, Part


def filled(shape, offsets=None, lengths=None, dtype=torch.float32, **options):
    view = torch.full(lengths or shape, torch.nan, dtype=dtype)
    options = {"seed": 1, "name": "w", "std": 1.0} | options
    fill_normal_(view, shape=shape, offsets=offsets or (0,) * len(shape), **options)
    return view


@st.composite
def boxes(draw):
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 100_000)),
            st.tuples(st.integers(1, 300), st.integers(1, 1500)),
            st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 600)),
        )
    )
    begins = [draw(st.integers(0, n - 1)) for n in shape]
    ends = [draw(st.integers(b, n)) for b, n in zip(begins, shape, strict=True)]
    return shape, tuple(begins), tuple(e - b for b, e in zip(begins, ends, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(boxes())
def test_any_box_equals_the_slice_of_the_whole_bitwise(case):
    shape, offsets, lengths = case
    whole = filled(shape)
    box = filled(shape, offsets=offsets, lengths=lengths)
    index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    assert torch.equal(box, whole[index])


def test_threads_strides_and_dtypes_do_not_change_the_numbers():
    whole = filled((700, 900), num_threads=1)
    assert torch.equal(filled((700, 900), num_threads=3), whole)
    assert torch.equal(filled((700, 900)), whole)
    strided = torch.zeros(900, 700).t()
    fill_normal_(strided, seed=1, name="w", shape=(700, 900), offsets=(0, 0), std=1.0)
    assert torch.equal(strided, whole)
    assert torch.equal(filled((700, 900), dtype=torch.bfloat16), whole.bfloat16())
    assert torch.equal(filled((700, 900), dtype=torch.float64), whole.double())


def test_names_seeds_and_tiles_give_different_numbers_of_the_right_moments():
    w = filled((512, 1024), std=0.02)
    assert abs(w.mean()) < 4 * 0.02 / 512 / 1.4
    assert abs(w.std() / 0.02 - 1) < 0.01
    tiles = w.view(8, 64, 2, 512).transpose(1, 2).reshape(16, -1)
    for other in (filled((512, 1024), name="v"), filled((512, 1024), seed=2)):
        assert abs(torch.corrcoef(torch.stack([w.flatten(), other.flatten()]))[0, 1]) < 0.01
    off_diagonal = torch.corrcoef(tiles) - torch.eye(16)
    assert off_diagonal.abs().max() < 5 / 32768**0.5
    experts = filled((2, 64, 64))
    assert not torch.equal(experts[0], experts[1])


def test_a_scalar_and_an_empty_box_are_fine():
    assert filled(()).shape == ()
    assert filled((5, 4), offsets=(5, 0), lengths=(0, 4)).numel() == 0


def test_a_box_outside_its_tensor_is_refused():
    with pytest.raises(ValueError, match=r"w: a box of \(3, 4\) at \(3, 0\) is not inside"):
        filled((5, 4), offsets=(3, 0), lengths=(3, 4))


def test_stacked_experts_in_a_parameter_are_filled_by_their_own_names_and_padding_zeroed():
    parameter = torch.nn.Parameter(torch.full((2, 6, 4), torch.nan))
    parts = tuple(
        Part(f"experts.{e}.weight", (5, 8), (0, 4), (i, 0, 0), (1, 5, 4))
        for i, e in enumerate((6, 7))
    )
    fill_parameter_(
        NamedParameter("experts.weight", parameter, ParamLayout(parts)), seed=9, std=1.0
    )
    for i, e in enumerate((6, 7)):
        whole = filled((5, 8), name=f"experts.{e}.weight", seed=9)
        assert torch.equal(parameter[i, :5], whole[:, 4:])
    assert not parameter[:, 5].any()


LAYOUTS = [
    ParallelConfig(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    ),
    ParallelConfig(context_parallel_size=2, pipeline_model_parallel_size=2),
]


def masks(prob):
    """Which elements of ones each stream drops, twice in a row, under each layout."""
    answers = []
    for config in LAYOUTS:
        ctx = ParallelContext.build(config)
        streams = RngStreams(7, ctx)
        found = {}
        for name in RngStreams.NAMES:
            dropout = StreamDropout(prob, streams, name)
            found[name] = [dropout(torch.ones(64)) for _ in range(2)]
        answers.append((found, ctx.tp.rank, (ctx.cp.rank, ctx.dp.rank, ctx.pp.rank)))
    return answers


def test_replicated_masks_agree_over_tensor_ranks_and_all_others_differ():
    ranks = run_ranks(masks, 4, 0.5)
    for answers in zip(*ranks, strict=True):  # those of one layout, by rank
        for name in RngStreams.NAMES:
            for found, tp_rank, place in answers:
                first, second = found[name]
                assert not torch.equal(first, second)
                assert set(first.tolist()) == {0.0, 2.0}
                for other, other_tp_rank, other_place in answers:
                    if (tp_rank, place) == (other_tp_rank, other_place):
                        continue
                    same = name == "replicated" and place == other_place
                    assert torch.equal(first, other[name][0]) == same


def test_forks_leave_the_default_generator_alone_and_continue_their_stream():
    streams = RngStreams(7, ParallelContext.single())
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with streams.fork("replicated"):
        a = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    with streams.fork("replicated"), streams.fork("expert"):
        other = torch.rand(4)
    with streams.fork("replicated"):
        b = torch.rand(4)
    assert not torch.equal(a, b)
    assert not torch.equal(a, other)


def test_a_stream_comes_back_when_its_block_raises():
    streams = RngStreams(7, ParallelContext.single())
    outside = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), streams.fork("replicated"):
        raise ZeroDivisionError
    assert torch.equal(outside, torch.get_rng_state())
    assert set(streams.state()) == set(RngStreams.NAMES)


def test_saved_state_repeats_the_next_masks():
    streams = RngStreams(7, ParallelContext.single())
    dropout = StreamDropout(0.5, streams, "tensor_parallel")
    dropout(torch.ones(64))
    state = streams.state()
    expected = dropout(torch.ones(64))
    fresh = RngStreams(8, ParallelContext.single())
    fresh.set_state(state)
    assert torch.equal(StreamDropout(0.5, fresh, "tensor_parallel")(torch.ones(64)), expected)


def test_wrong_use_of_streams_is_refused():
    streams = RngStreams(7, ParallelContext.single())
    with pytest.raises(KeyError, match="no random stream 'default'"), streams.fork("default"):
        pass
    with (
        streams.fork("expert"),
        pytest.raises(RuntimeError, match="already in use"),
        streams.fork("expert"),
    ):
        pass
    with streams.fork("expert"), pytest.raises(RuntimeError, match="leave their fork"):
        streams.state()
    with pytest.raises(ValueError, match="the state has"):
        streams.set_state({"expert": torch.zeros(1)})
    with pytest.raises(ValueError, match="below 1"):
        StreamDropout(1.0, streams, "expert")
    with pytest.raises(ValueError, match="no random stream"):
        StreamDropout(0.1, streams, "default")


def test_dropout_is_the_identity_in_evaluation_and_draws_nothing():
    streams = RngStreams(7, ParallelContext.single())
    before = streams.state()
    x = torch.ones(8)
    assert StreamDropout(0.5, streams, "expert").eval()(x) is x
    assert StreamDropout(0.0, streams, "expert")(x) is x
    assert all(torch.equal(before[name], state) for name, state in streams.state().items())


@pytest.mark.gpu
def test_a_gpu_gets_the_numbers_of_the_cpu_and_streams_of_its_own_generator():
    whole = filled((130, 700), dtype=torch.bfloat16)
    view = torch.zeros(130, 100, dtype=torch.bfloat16, device="cuda")
    fill_normal_(view, seed=1, name="w", shape=(130, 700), offsets=(0, 600), std=1.0)
    assert torch.equal(view.cpu(), whole[:, 600:])
    streams = RngStreams(7, ParallelContext.single("cuda"))
    dropout = StreamDropout(0.5, streams, "replicated")
    outside = torch.cuda.get_rng_state()
    state = streams.state()
    x = torch.ones(4096, device="cuda")
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    streams.set_state(state)
    assert torch.equal(dropout(x), first)
