"""Whether a model fits a layout: every problem at once, each with its mend."""

from dataclasses import replace

import pytest

from mcore_models.building.encoder_layouts import encoder_layout_problems, t5_layout_problems
from mcore_models.building.layouts import check_layout, layout_problems
from mcore_models.config import TransformerConfig
from mcore_models.encoder_config import BertConfig, T5Config
from mcore_models.layers.attention import cp_comm_type
from mcore_moe.config import MoEConfig
from mcore_parallel import ParallelConfig

MODEL = TransformerConfig(
    num_layers=4,
    hidden_size=96,
    num_attention_heads=12,
    num_query_groups=4,
    ffn_hidden_size=240,
    max_position_embeddings=64,
)

HEADS = (
    "--num-attention-heads 12 cannot be split over --tensor-model-parallel-size 8: heads must "
    "divide evenly. Use 1, 2, 3, 4, 6 or 12."
)
GROUPS = (
    "--num-query-groups 4 cannot be split over --tensor-model-parallel-size 3: one must divide "
    "the other. Use 1, 2, 4 or 12 tensor ranks."
)


def parallel(**degrees):
    return ParallelConfig(**degrees)


def test_a_model_that_fits_has_no_problem():
    fits = parallel(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=4,
        context_parallel_size=2,
        sequence_parallel=True,
    )
    assert layout_problems(MODEL, fits, seq_length=64) == []
    assert layout_problems(MODEL, parallel(tensor_model_parallel_size=12)) == []


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (
            {"tensor_model_parallel_size": 8},
            HEADS,
        ),
        (
            {"tensor_model_parallel_size": 3},
            GROUPS,
        ),
        (
            {"pipeline_model_parallel_size": 7},
            (
                "--pipeline-model-parallel-size 7 exceeds --num-layers 4, embedding and loss: "
                "use at most 6."
            ),
        ),
    ],
)
def test_a_degree_that_does_not_fit_is_named_with_what_would(degrees, words):
    assert words in layout_problems(MODEL, parallel(**degrees))


def test_widths_must_divide_over_tensor_ranks():
    config = TransformerConfig(
        num_layers=1, hidden_size=96, num_attention_heads=12, ffn_hidden_size=250
    )
    (problem,) = layout_problems(config, parallel(tensor_model_parallel_size=4))
    assert problem == (
        "--ffn-hidden-size 250 cannot be split over --tensor-model-parallel-size 4: use a "
        "multiple of 4, such as 252."
    )


def test_experts_must_divide_over_expert_ranks():
    moe = MoEConfig(
        num_experts=6, moe_ffn_hidden_size=10, moe_shared_expert_intermediate_size=6
    )
    degrees = parallel(
        tensor_model_parallel_size=4,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=4,
    )
    problems = layout_problems(MODEL, degrees, moe)
    assert len(problems) == 3
    assert "--moe-ffn-hidden-size 10" in problems[0]
    assert "--expert-tensor-parallel-size 4" in problems[0]
    assert "--moe-shared-expert-intermediate-size 6" in problems[1]
    assert "--num-experts 6" in problems[2]
    assert "use 1, 2, 3 or 6" in problems[2]


@pytest.mark.parametrize(
    ("degrees", "length", "words"),
    [
        ({}, 65, "a sequence of 65 tokens is longer than --max-position-embeddings 64"),
        ({"context_parallel_size": 2}, 30, "use a multiple of 4, such as 32"),
        (
            {"tensor_model_parallel_size": 4, "sequence_parallel": True},
            30,
            "--sequence-parallel over --tensor-model-parallel-size 4: use a multiple of 4",
        ),
        (
            {
                "context_parallel_size": 2,
                "tensor_model_parallel_size": 4,
                "sequence_parallel": True,
            },
            24,
            "use a multiple of 16, such as 32",
        ),
    ],
)
def test_a_sequence_that_does_not_fit_is_answered_with_one_that_does(degrees, length, words):
    (problem,) = layout_problems(MODEL, parallel(**degrees), seq_length=length)
    assert words in problem


def test_all_problems_are_raised_at_once():
    bad = parallel(tensor_model_parallel_size=5, pipeline_model_parallel_size=9)
    with pytest.raises(ValueError, match=r"(?s)--num-attention-heads 12.*--num-layers 4"):
        check_layout(MODEL, bad)


SIZES = "hierarchical_context_parallel_sizes"


def test_heads_are_exchanged_over_context_ranks_only_if_they_divide():
    fits = {"context_parallel_size": 3, "tensor_model_parallel_size": 2}
    assert layout_problems(MODEL, parallel(**fits, cp_comm_type="a2a")) == []
    (problem,) = layout_problems(MODEL, parallel(context_parallel_size=8, cp_comm_type="a2a"))
    assert "cannot exchange --num-attention-heads 12 over" in problem
    assert "heads must be a multiple of 8. Use p2p or all_gather." in problem
    levels = {"context_parallel_size": 8, "cp_comm_type": "a2a+p2p"}
    fits = parallel(**levels, **{SIZES: (4, 2)})
    assert layout_problems(MODEL, fits) == []
    bad = parallel(**levels | {"context_parallel_size": 16}, **{SIZES: (8, 2)})
    windowed = replace(MODEL, window_size=(8, 0))
    exchange, window = layout_problems(windowed, bad)
    assert "the first of --hierarchical-context-parallel-sizes 8: heads must be" in exchange
    assert "--cp-comm-type a2a+p2p does not support windows (--window-size)" in window


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window_size": (8, 0)}, "not support windows (--window-size)"),
        ({"attention_dropout": 0.1}, "not support dropout (--attention-dropout)"),
    ],
)
def test_a_ring_has_neither_windows_nor_dropout_but_what_is_derived_has(changes, words):
    model = replace(MODEL, **changes)
    (problem,) = layout_problems(model, parallel(context_parallel_size=2, cp_comm_type="p2p"))
    assert words in problem
    derived = parallel(context_parallel_size=2)
    assert layout_problems(model, derived) == []
    assert cp_comm_type(model, derived, 0) == "all_gather"
    assert cp_comm_type(MODEL, derived, 0) == "p2p"


@pytest.mark.parametrize(
    ("changes", "degrees", "words"),
    [
        (
            {"hybrid_override_pattern": "[C-]" * MODEL.num_layers},
            {"tensor_model_parallel_size": 5},
            "of gated short convolutions cannot be split",
        ),
        (
            {"hybrid_override_pattern": "[L-]" * MODEL.num_layers},
            {"tensor_model_parallel_size": 5},
            "of lightning attention cannot be split",
        ),
        (
            {"hybrid_override_pattern": "[K-]" * MODEL.num_layers},
            {"context_parallel_size": 3},
            "of Kimi Delta Attention cannot be split",
        ),
        (
            {"multi_latent_attention": True, "num_query_groups": 0}
            | {"q_lora_rank": 8, "dsa_indexer_topk": 4},
            {"context_parallel_size": 2},
            "use --context-parallel-size 1",
        ),
    ],
)
def test_layers_that_cannot_be_split_are_refused(changes, degrees, words):
    problems = layout_problems(replace(MODEL, **changes), parallel(**degrees))
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("value_norm", True),
        ("layer_output_scale", True),
        ("residual_multiplier", 0.5),
        ("attn_logit_softcapping", 30.0),
        ("final_logit_softcapping", 30.0),
        ("softmax_scale", 0.2),
        ("norm_placement", "output"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "problems_of"),
    [(BertConfig, encoder_layout_problems), (T5Config, t5_layout_problems)],
)
def test_models_with_an_encoder_refuse_what_their_layers_do_not_read(
    kind, problems_of, field, value
):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    assert problems_of(kind(**sizes), ParallelConfig()) == []
    (problem,) = problems_of(kind(**sizes, **{field: value}), ParallelConfig())
    assert problem.startswith("--" + field.replace("_", "-"))
    assert "leave it out" in problem


@pytest.mark.parametrize("name", ["swiglu", "geglu", "exact_geglu", "relu", "xielu"])
def test_a_t5_refuses_activations_other_than_its_own(name):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: --feed-forward-proj"):
        T5Config(**sizes, **{name: True})
