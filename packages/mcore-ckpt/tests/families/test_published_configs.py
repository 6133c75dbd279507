"""What a published config.json leaves out means what transformers takes for it."""

from copy import deepcopy

import pytest
import transformers

from mcore_ckpt.families import find_family
from mcore_ckpt.formats.text_towers import text_tower
from mcore_ckpt.storage.index import TensorEntry
from mcore_models.presets import load_preset

EXAONE = {"model_type": "exaone4", "vocab_size": 37, "hidden_size": 16}
EXAONE |= {"num_hidden_layers": 3, "intermediate_size": 22}
EXAONE |= {"num_attention_heads": 2, "num_key_value_heads": 1}
FULL = {"layer_types": ["full_attention"] * 3}


def described(config):
    return find_family(config["model_type"]).to_ours(config)


@pytest.mark.parametrize("name", ["nemotron-h-8b", "nemotron-h-56b"])
def test_a_preset_of_nemotron_h_has_the_form_of_transformers(name):
    theirs = find_family("nemotron_h").to_theirs(load_preset(name).to_dict())
    ours = described(theirs)
    assert ours["config"]["mamba_dt_limit"] == [0.001, 0.0]
    assert find_family("nemotron_h").to_theirs(ours) == theirs


@pytest.mark.parametrize(("window", "skipped"), [(8, "1"), (None, "0")])
def test_no_layer_of_exaone4_rotates_where_a_window_is_said_and_none_has_it(window, skipped):
    description = described(EXAONE | FULL | {"sliding_window": window})
    assert description["config"].get("rope_skip_freq", "0") == skipped
    theirs = find_family("exaone4").to_theirs(description)
    assert theirs["sliding_window"] == window
    assert theirs["layer_types"] == FULL["layer_types"]
    assert described(theirs) == description
    with pytest.raises(ValueError, match="sliding_window=0"):
        described(EXAONE | FULL | {"sliding_window": 0})


def test_letters_for_layers_are_refused_where_no_list_names_the_layers():
    letters = EXAONE | {"sliding_window": 8, "sliding_window_pattern": "LLLG"}
    with pytest.raises(ValueError, match=r"sliding_window_pattern='LLLG'.*layer_types"):
        described(letters)
    assert described(letters | FULL) == described(EXAONE | FULL | {"sliding_window": 8})


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gemma2", "Gemma2"), ("gemma3_text", "Gemma3Text"), ("gemma3n_text", "Gemma3nText")],
)
def test_a_gemma_that_states_no_size_has_those_of_transformers(name, kind):
    whole = getattr(transformers, f"{kind}Config")().to_dict()
    assert described({"model_type": name}) == described(whole)


def test_the_text_tower_of_a_published_gemma3_is_read():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    published = {"model_type": "gemma3", "text_config": text, "mm_tokens_per_image": 256}
    own, _ = text_tower(published | {"initializer_range": 0.02}, {})
    assert described(own) == described(transformers.Gemma3TextConfig(**text).to_dict())
    # Either kind of layer may be left out, or be null.
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    stated = {"model_type": "gemma3_text", "rope_theta": 3e5, "rope_local_base_freq": 2e4}
    for rope in (
        {"full_attention": linear},
        {"full_attention": linear, "sliding_attention": None},
        {"sliding_attention": {"rope_theta": 3e4}},
    ):
        theirs = transformers.Gemma3TextConfig(rope_parameters=deepcopy(rope), **stated)
        assert described(stated | {"rope_parameters": rope}) == described(theirs.to_dict())


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_the_text_model_of_a_gemma_for_audio_is_read_without_its_other_parts(name):
    parts = (
        "embed_audio.",
        "embed_vision.",
        "audio_tower.",
        "vision_tower.",
        "language_model.",
    )
    tensors = {f"model.{part}norm.weight": TensorEntry((2,), "F32", ()) for part in parts}
    text, kept = text_tower({"model_type": name, "text_config": {"hidden_size": 8}}, tensors)
    assert text["model_type"] == f"{name}_text"
    assert text["tie_word_embeddings"]
    assert [*kept] == ["model.norm.weight"]


@pytest.mark.parametrize("inner", [True, False])
def test_the_text_model_of_a_llama4_ties_itself(inner):
    outer = {"model_type": "llama4", "tie_word_embeddings": not inner}
    own, _ = text_tower(outer | {"text_config": {"tie_word_embeddings": inner}}, {})
    assert own["tie_word_embeddings"] is inner
    own, _ = text_tower(outer | {"text_config": {"hidden_size": 8}}, {})
    assert not own["tie_word_embeddings"]


def test_gelu_of_the_first_gemma_is_its_tanh_form():
    sizes = EXAONE | {"model_type": "gemma"}
    tanh = described(sizes | {"hidden_act": "gelu_pytorch_tanh"})
    assert described(sizes | {"hidden_act": "gelu"}) == tanh
    with pytest.raises(ValueError, match="hidden_act='silu'"):
        described(sizes | {"hidden_act": "silu"})


def test_cwm_stretches_its_positions_where_nothing_is_said():
    sizes = EXAONE | {"model_type": "cwm", "vocab_size": 128256}
    sizes |= {"max_position_embeddings": 131072}
    assert described(sizes) == described(transformers.CwmConfig(**sizes).to_dict())
    plain = sizes | {"rope_parameters": {"rope_type": "default"}}
    assert described(plain) == described(transformers.CwmConfig(**plain).to_dict())


@pytest.mark.parametrize(
    ("end", "step", "layers"),
    [(-1, 1, "0111"), (2, 1, "0110"), (4, 1, "0111"), (53, 2, "0101"), (-2, 1, "0000")],
)
def test_experts_of_ernie4_5_end_where_transformers_ends_them(end, step, layers):
    sizes = EXAONE | {"model_type": "ernie4_5_moe", "num_hidden_layers": 4}
    sizes |= {"max_position_embeddings": 64}
    description = described(sizes | {"moe_layer_end_index": end, "moe_layer_interval": step})
    assert description["moe"]["moe_layer_freq"] == f"[{','.join(layers)}]"
    assert described(find_family("ernie4_5_moe").to_theirs(description)) == description
    with pytest.raises(ValueError, match="moe_layer_interval=0: it must be 1 or more"):
        described(sizes | {"moe_layer_interval": 0})


def test_biases_of_internlm3_are_in_all_linears_or_in_none():
    sizes = EXAONE | {"model_type": "internlm3", "max_position_embeddings": 64}
    for words in (("qkv_bias", "bias"), ("attention_bias", "mlp_bias")):
        for one in words:
            with pytest.raises(ValueError, match=r"qkv_bias=.* and bias=.*all linears or in n"):
                described(sizes | {one: True})
        both = described(sizes | dict.fromkeys(words, True))
        assert described(find_family("internlm3").to_theirs(both)) == both
        assert both["config"]["add_bias_linear"]
    config = both["config"] | {"add_bias_linear": False, "add_attention_bias": True}
    with pytest.raises(ValueError, match="cannot express --add-attention-bias True"):
        find_family("internlm3").to_theirs(both | {"config": config})
