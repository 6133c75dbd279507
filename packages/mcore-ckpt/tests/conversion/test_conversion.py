"""Hugging Face to ours and back: every family bitwise, every doubt an error with a name."""

import json
import math
import re
import shutil

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file

from mcore_ckpt.conversion import conversion
from mcore_ckpt.conversion.conversion import convert, hf_to_mcore, mcore_to_hf
from mcore_ckpt.conversion.inspection import check, differences
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.families import family_for, find_family
from mcore_ckpt.families.common.fields import CARRIED, GENERATION_FIELDS
from mcore_ckpt.save_load.loading import load, read_tensor
from mcore_ckpt.storage.files import narrow_to_box
from mcore_ckpt.storage.index import read_index
from mcore_parallel.sharding import Piece, Shard

ODD = {"hidden_size": 18, "num_hidden_layers": 3, "vocab_size": 37, "intermediate_size": 22}
# transformers' grouped matrix products want rows of whole 16 bytes.
ODD_MOE = ODD | {"hidden_size": 20, "intermediate_size": 12}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
ODD_T5 = {"d_model": 18, "d_kv": 5, "num_heads": 3, "d_ff": 22, "num_layers": 3} | {
    "vocab_size": 37
}
HEADS_OF = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"} | {
    "Bert": "BertForPreTraining",
    "MegatronBert": "MegatronBertForPreTraining",
    "Gemma3Text": "Gemma3ForCausalLM",
}
MODELS = {
    "llama": ("Llama", {**ODD, **HEADS, "rms_norm_eps": 1e-5}),
    "llama tied, llama3 scaling": (
        "Llama",
        {**ODD, **HEADS, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama with biases": ("Llama", {**ODD, **HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama linear scaling": (
        "Llama",
        {
            **ODD,
            "num_attention_heads": 3,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "mistral": ("Mistral", {**ODD, **HEADS, "sliding_window": 5}),
    "mistral without window": ("Mistral", {**ODD, **HEADS, "sliding_window": None}),
    "qwen2": ("Qwen2", {**ODD, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen2 tied": (
        "Qwen2",
        {
            **ODD,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {**ODD, **HEADS}),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 18,
            "n_layer": 3,
            "n_head": 3,
            "n_inner": 26,
            "n_positions": 19,
            "vocab_size": 37,
        },
    ),
    "mixtral": (
        "Mixtral",
        {**ODD_MOE, **HEADS, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **ODD_MOE,
            **HEADS,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 8,
            "mlp_only_layers": [1],
        },
    ),
    "phi3": (
        "Phi3",
        {
            **ODD,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 7,
            "pad_token_id": 0,
        },
    ),
    "nemotron": ("Nemotron", {**ODD, **HEADS, "head_dim": 8}),
    "olmo2": (
        "Olmo2",
        {**ODD, "num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0},
    ),
    "gemma2": ("Gemma2", {**ODD, **HEADS, "query_pre_attn_scalar": 5, "sliding_window": 4}),
    "gemma3_text": (
        "Gemma3Text",
        {**ODD, **HEADS, "query_pre_attn_scalar": 5, "sliding_window": 4},
    ),
    # Even: transformers views the rotated part of a head as complex numbers where it lies.
    "deepseek_v2": (
        "DeepseekV2",
        {**ODD_MOE, **LATENT, "q_lora_rank": None, "qk_nope_head_dim": 6},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **ODD_MOE,
            **LATENT,
            "q_lora_rank": 7,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": YARN,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "hidden_size": 18,
            "num_hidden_layers": 3,
            "vocab_size": 37,
            "expand": 2,
            "num_heads": 6,
            "head_dim": 6,
            "state_size": 5,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "hidden_size": 16,
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
            ],
            "vocab_size": 37,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "intermediate_size": 20,
            "mamba_num_heads": 6,
            "mamba_head_dim": 4,
            "ssm_state_size": 5,
            "n_groups": 2,
            "chunk_size": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 12,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "t5": ("T5", {**ODD_T5, "num_decoder_layers": 2}),
    "t5 1.1": (
        "T5",
        {**ODD_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bert": ("Bert", {**ODD, "num_attention_heads": 3, "max_position_embeddings": 19}),
    "megatron-bert": (
        "MegatronBert",
        {**ODD, "num_attention_heads": 3, "max_position_embeddings": 19},
    ),
}


def make(folder, name, dtype=torch.float32, **options):
    architecture, values = MODELS[name]
    config = getattr(transformers, f"{architecture}Config")(**values)
    head = HEADS_OF.get(architecture, f"{architecture}ForCausalLM")
    torch.manual_seed(5)
    model = getattr(transformers, head)(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too, so that none can be taken for another.
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    return model


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal_bitwise(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def assert_loads_as_converted(hf, step):
    """Load a part of each tensor from the folder itself, cut along rows and columns."""
    shards, wanted = {}, {}
    for name in read_index(step).tensors:
        whole = read_tensor(step, name)
        offsets = tuple(min(1, size - 1) for size in whole.shape)
        lengths = tuple(size - first for size, first in zip(whole.shape, offsets, strict=True))
        part = torch.zeros(lengths, dtype=whole.dtype)
        shards[name] = Shard(tuple(whole.shape), whole.dtype, (Piece(offsets, lengths, part),))
        wanted[name] = narrow_to_box(whole, (offsets, lengths))
    extra = load(hf, shards)
    assert extra["model"] == read_index(step).extra["model"]
    for name, shard in shards.items():
        assert torch.equal(shard.pieces[0].data, wanted[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_a_family_survives_the_way_there_and_back_and_gives_the_same_logits(tmp_path, name):
    before = make(tmp_path / "hf", name).eval()
    there = hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    assert_loads_as_converted(tmp_path / "hf", tmp_path / "run" / "release")
    back = mcore_to_hf(tmp_path / "run", tmp_path / "again")
    assert there.is_proven
    assert back.family == name.split()[0].rstrip(",")
    assert_equal_bitwise(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again"))
    after, info = type(before).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.randint(37, (2, 17), generator=torch.Generator().manual_seed(1))
    values = {"input_ids": tokens}
    if name.startswith("t5"):
        values["decoder_input_ids"] = tokens.flip(1)
    with torch.no_grad():
        wanted, found = before(**values), after.eval()(**values)
    logits = "prediction_logits" if "bert" in name else "logits"
    assert torch.equal(getattr(wanted, logits), getattr(found, logits))


def config_of(name):
    """What is in config.json of a model."""
    architecture, values = MODELS[name]
    head = HEADS_OF.get(architecture, f"{architecture}ForCausalLM")
    config = getattr(transformers, f"{architecture}Config")(**values, architectures=[head])
    return json.loads(config.to_json_string())


def test_a_description_read_from_what_it_wrote_is_the_same():
    for name in MODELS:
        config = config_of(name)
        family = find_family(config["model_type"])
        description = family.to_ours(config)
        again = family.to_ours(family.to_theirs(description))
        assert again == description, name


def old_spellings(config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    return config


def test_old_and_new_spellings_of_config_json_mean_the_same(tmp_path):
    make(tmp_path / "hf", "llama tied, llama3 scaling")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "rope_parameters" in config
    llama = find_family("llama")
    new = llama.to_ours(config)
    assert llama.to_ours(old_spellings(config)) == new
    assert new["config"]["rotary_base"] == 500000.0
    assert new["config"]["rope_scaling_original_max_position_embeddings"] == 64
    assert not new["config"]["untie_embeddings_and_output_weights"]


# No numbers; 0 positions are no limit of ours, and predictors count where a folder has them.
NO_MATTER = {*CARRIED, "dtype", "architectures", "transformers_version"} | {
    *("max_position_embeddings", "num_nextn_predict_layers")
}
DERIVED = ("head_dim", "num_key_value_heads", "n_inner")
# Without them the weights would be of another shape, or other ones.
SAID_BY_WEIGHTS = {"num_key_value_heads", "feed_forward_proj"}


@pytest.mark.parametrize("name", MODELS)
def test_a_field_that_is_absent_means_what_transformers_takes_for_it(name):
    kind = getattr(transformers, f"{MODELS[name][0]}Config")
    whole = config_of(name)
    whole.pop("time_step_limit", None)  # JSON has no infinity.
    family = find_family(whole["model_type"])
    num_read = 0
    for field in whole.keys() - {"model_type", *NO_MATTER, *SAID_BY_WEIGHTS}:
        config = {n: value for n, value in whole.items() if n != field}
        try:
            theirs = family.to_theirs(family.to_ours(config))
            before = kind(**config).to_dict()
        except (ValueError, StrictDataclassError):
            continue  # It must be there.
        after = kind(**theirs).to_dict()
        for one, value in before.items():
            is_derived = one in DERIVED and value is None
            if one not in NO_MATTER and not is_derived:
                assert after.get(one) == value, (field, one)
        num_read += 1
    assert num_read > 5


def test_a_cap_that_null_switches_off_stays_off():
    gemma2 = find_family("gemma2")
    config = transformers.Gemma2Config(attn_logit_softcapping=None).to_dict()
    theirs = gemma2.to_theirs(gemma2.to_ours(config))
    assert theirs["attn_logit_softcapping"] is None
    assert theirs["final_logit_softcapping"] == 30.0


def test_what_transformers_notes_for_itself_is_no_unknown_field():
    config = transformers.LlamaConfig(**ODD, **HEADS).to_dict()
    notes = {"_attn_implementation_autoset": True, "_attn_implementation": "sdpa"}
    llama = find_family("llama")
    assert llama.to_ours(config | notes | {"torchscript": True}) == llama.to_ours(config)


def test_words_of_generate_in_an_old_config_json_are_carried(tmp_path):
    words = {"max_length": 4096, "temperature": 0.9, "do_sample": True, "top_p": 0.6}
    make(tmp_path / "hf", "llama")
    edit(tmp_path / "hf", **words)
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: config.get(name) for name in words} == words
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again") is not None


def test_the_words_of_generate_are_those_of_transformers():
    assert set(GENERATION_FIELDS) <= vars(transformers.GenerationConfig()).keys()


def test_sharded_folders_come_in_and_go_out(tmp_path):
    make(tmp_path / "hf", "llama", max_shard_size="8KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    mcore_to_hf(tmp_path / "run", tmp_path / "again", ConvertOptions(max_shard_size="6000"))
    files = list((tmp_path / "again").glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 6000 + 2000 for file in files)
    assert_equal_bitwise(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again"))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")


def test_weights_are_cast_when_asked_and_the_config_says_so(tmp_path):
    make(tmp_path / "hf", "llama")
    hf_to_mcore(tmp_path / "hf", tmp_path / "run", ConvertOptions(dtype="bf16"))
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    wanted = {n: t.bfloat16() for n, t in tensors_of(tmp_path / "hf").items()}
    assert_equal_bitwise(wanted, tensors_of(tmp_path / "again"))
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="--dtype int3 is not known: use fp32"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "other", ConvertOptions(dtype="int3"))


def test_weights_that_fp16_cannot_hold_are_not_made_infinite(tmp_path):
    make(tmp_path / "hf", "llama", dtype=torch.bfloat16)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = -1e5
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"model.norm.weight has numbers beyond 65504"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run", ConvertOptions(dtype="fp16"))
    assert not (tmp_path / "run").exists()
    hf_to_mcore(tmp_path / "hf", tmp_path / "run", ConvertOptions(dtype="fp32"))


def test_tokenizer_generation_config_and_token_ids_are_carried_both_ways(tmp_path):
    make(tmp_path / "hf", "llama")
    texts = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "merges.txt": "x y"}
    texts |= {"LICENSE": "l", "modules.json": "[]", "1_Pooling/config.json": "{}"}
    texts |= {"additional_chat_templates/tool.jinja": "t", "sentencepiece.bpe.model": "s"}
    for name, text in texts.items():
        (tmp_path / "hf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hf" / name).write_text(text)
    left = ("1_Pooling/notes.txt", "README.md", "consolidated.safetensors", "training_args.bin")
    for name in left:
        (tmp_path / "hf" / name).write_text("neither weights nor known")
    edit(tmp_path / "hf", bos_token_id=3, eos_token_id=[4, 5])
    assert hf_to_mcore(tmp_path / "hf", tmp_path / "run").not_carried == left
    check(tmp_path / "run")
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    for name, text in texts.items():
        assert (tmp_path / "again" / name).read_text() == text
    generation = (tmp_path / "hf" / "generation_config.json").read_text()
    assert (tmp_path / "again" / "generation_config.json").read_text() == generation
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, [4, 5])


def test_a_run_folder_with_release_names_logical_tensors_of_the_true_vocabulary(tmp_path):
    model = make(tmp_path / "hf", "llama")
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    step = tmp_path / "run" / "release"
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "release"
    embedding = read_tensor(step, "model.embedding.weight")
    assert torch.equal(embedding, model.model.embed_tokens.weight)
    assert embedding.shape == (37, 18)
    gate = read_tensor(step, "model.blocks.2.mlp.fc1.gate.weight")
    assert torch.equal(gate, model.model.layers[2].mlp.gate_proj.weight)
    key = read_tensor(step, "model.blocks.1.attention.qkv.k.weight")
    assert torch.equal(key, model.model.layers[1].self_attn.k_proj.weight)
    assert read_index(step).extra["model"]["vocab_size"] == 37


def test_gpt2_parts_of_a_fused_matrix_land_where_they_belong(tmp_path):
    # Unequal constants a part: a contiguous cut of the wrong axis cannot pass.
    model = make(tmp_path / "hf", "gpt2")
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    fused = model.transformer.h[1].attn.c_attn
    for number, part in enumerate(("q", "k", "v")):
        columns = slice(18 * number, 18 * (number + 1))
        weight = read_tensor(
            tmp_path / "run" / "release", f"model.blocks.1.attention.qkv.{part}.weight"
        )
        bias = read_tensor(
            tmp_path / "run" / "release", f"model.blocks.1.attention.qkv.{part}.bias"
        )
        assert torch.equal(weight, fused.weight[:, columns].t())
        assert torch.equal(bias, fused.bias[columns])


def edit(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu6"}, "hidden_act='relu6'"),
        ({"mlp_bias": True}, "attention_bias=False and mlp_bias=True"),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1.0}}, "rope_type='ntk'"),
        ({"logit_softcap": 30.0}, "logit_softcap=30.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "codegen"}, "'codegen' is not known: use llama"),
        ({"model_type": ""}, "'' is not known"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"architectures": 5}, "must name one class"),
        ({"rope_parameters": [1]}, "rope_parameters=.* must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0: it must be a number ab"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4': it must be a number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5': it must be a number from 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': it must be true or false"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8': it must be an object"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "compressed-tensors, and modelopt",
        ),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, change, message):
    make(tmp_path / "hf", "llama")
    edit(tmp_path / "hf", **change)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_and_an_unused_tensor_are_named_together(tmp_path):
    make(tmp_path / "hf", "llama")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.layers.1.mlp.gate_prj.weight"] = tensors.pop(
        "model.layers.1.mlp.gate_proj.weight"
    )
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ValueError, match="do not match this model") as caught:
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    text = str(caught.value)
    assert "missing: model.layers.1.mlp.gate_proj.weight (nearest there: " in text
    assert "not used by any rule: model.layers.1.mlp.gate_prj.weight" in text


def test_more_layers_than_the_config_says_are_an_error(tmp_path):
    make(tmp_path / "hf", "llama")
    edit(tmp_path / "hf", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"not used by any rule: model.layers.2"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")


def test_a_tied_head_may_stand_twice_but_must_be_equal(tmp_path):
    make(tmp_path / "hf", "llama tied, llama3 scaling")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    assert "model.head.weight" not in read_index(tmp_path / "run" / "release").tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "other")


def rename_tensors(folder, change):
    file = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file)


def test_published_gpt2_folders_lack_the_prefix_of_their_names(tmp_path):
    make(tmp_path / "hf", "gpt2")
    before = tensors_of(tmp_path / "hf")
    rename_tensors(tmp_path / "hf", lambda name: name.removeprefix("transformer."))
    assert "wte.weight" in tensors_of(tmp_path / "hf")
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    assert_equal_bitwise(before, tensors_of(tmp_path / "again"))


def test_published_bert_folders_call_norms_otherwise_and_hold_more_than_their_class(tmp_path):
    make(tmp_path / "hf", "bert")
    before = tensors_of(tmp_path / "hf")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new_name, old_name in old.items():
        rename_tensors(tmp_path / "hf", lambda n, a=new_name, b=old_name: n.replace(a, b))
    edit(tmp_path / "hf", architectures=["BertForMaskedLM"])
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    assert_equal_bitwise(before, tensors_of(tmp_path / "again"))
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"]


def test_one_tensor_by_an_old_and_a_new_name_is_refused(tmp_path):
    make(tmp_path / "hf", "bert")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    norm = "bert.embeddings.LayerNorm"
    save_file({**tensors, f"{norm}.gamma": tensors[f"{norm}.weight"] + 1}, file)
    with pytest.raises(ValueError, match=r"LayerNorm.gamma and .*LayerNorm.weight"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")


def test_cached_angles_of_old_folders_are_dropped(tmp_path):
    make(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "model.safetensors"
    angles = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(5) for i in range(3)
    }
    save_file(load_file(file) | angles, file)
    assert hf_to_mcore(tmp_path / "hf", tmp_path / "run").num_tensors == 3 * 9 + 3


def test_pickled_weights_are_read_as_data(tmp_path):
    make(tmp_path / "hf", "llama")
    print_ = hf_to_mcore(tmp_path / "hf", tmp_path / "run").fingerprint
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    torch.save(weights, tmp_path / "hf" / "pytorch_model.bin")
    assert hf_to_mcore(tmp_path / "hf", tmp_path / "one").fingerprint == print_

    (tmp_path / "hf" / "pytorch_model.bin").unlink()
    names = sorted(weights)
    files = {
        name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)
    }
    for file in set(files.values()):
        part = {name: weights[name] for name in names if files[name] == file}
        torch.save(part, tmp_path / "hf" / file)
    index = tmp_path / "hf" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    report = hf_to_mcore(tmp_path / "hf", tmp_path / "two")
    assert (report.fingerprint, report.not_carried) == (print_, ())

    torch.save({**weights, "odd": shutil.rmtree}, tmp_path / "hf" / files[names[0]])
    with pytest.raises(CheckpointError, match="rmtree"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "three")


def test_mamba2_as_its_authors_released_it_is_read(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 48, "num_heads": 4}
    sizes |= {"head_dim": 8, "state_size": 6, "n_groups": 1, "tie_word_embeddings": True}
    torch.manual_seed(4)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes))
    model.save_pretrained(tmp_path / "hf")
    print_ = hf_to_mcore(tmp_path / "hf", tmp_path / "run").fingerprint
    folder = tmp_path / "released"
    folder.mkdir()
    inner = {"layer": "Mamba2", "headdim": 8, "d_state": 6}
    config = {"d_model": 16, "n_layer": 2, "vocab_size": 45, "ssm_cfg": inner}
    config |= {"pad_vocab_size_multiple": 16, "tie_embeddings": True, "residual_in_fp32": True}
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm": True}))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    report = hf_to_mcore(folder, tmp_path / "ours", ConvertOptions(check=True))
    assert report.fingerprint == print_
    (folder / "config.json").write_text(json.dumps(config | {"ssm_cfg": {}}))
    with pytest.raises(ValueError, match="ssm_cfg of other layers than Mamba2"):
        hf_to_mcore(folder, tmp_path / "other")


LLAMA4 = {
    "llama4_text": (
        "Llama4Text",
        {**ODD_MOE, **HEADS, "intermediate_size_mlp": 16, "num_local_experts": 2}
        | {"interleave_moe_layer_step": 2, "pad_token_id": 0},
    )
}
CLASSES = {
    "LlamaModel": "llama",
    "GPT2Model": "gpt2",
    "Mamba2Model": "mamba2",
    "NemotronHModel": "nemotron_h",
    "Llama4TextModel": "llama4_text",
    "LlamaForSequenceClassification": "llama",
    "Qwen2ForTokenClassification": "qwen2",
    "BertForSequenceClassification": "bert",
    "BertForTokenClassification": "bert",
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_under_another_head_runs_and_comes_back_with_it(tmp_path, name):
    kind, values = (MODELS | LLAMA4)[CLASSES[name]]
    config = getattr(transformers, f"{kind}Config")(**values, num_labels=3)
    torch.manual_seed(5)
    getattr(transformers, name)(config).save_pretrained(tmp_path / "hf")
    there = hf_to_mcore(tmp_path / "hf", tmp_path / "run", ConvertOptions(check=True))
    assert there.logits_differ_by is not None
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    assert_equal_bitwise(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again"))
    before, after = (
        json.loads((tmp_path / folder / "config.json").read_text())
        for folder in ("hf", "again")
    )
    assert after["architectures"] == before["architectures"] == [name]
    assert after.get("id2label") == before.get("id2label")
    assert after["tie_word_embeddings"] == before["tie_word_embeddings"]


def test_the_context_before_longrope_comes_back_where_nothing_is_stretched(tmp_path):
    make(tmp_path / "hf", "phi3")
    file = tmp_path / "hf" / "config.json"
    stated = json.loads(file.read_text()) | {"original_max_position_embeddings": 17}
    file.write_text(json.dumps(stated))
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["original_max_position_embeddings"] == 17


def test_unknown_fields_go_along_by_a_flag(tmp_path):
    make(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"odd_field": [1, 2]}))
    with pytest.raises(ValueError, match=r"odd_field=\[1, 2\].*--keep-unknown-config-fields"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    keep = ConvertOptions(keep_unknown_config_fields=True)
    convert("hf", tmp_path / "hf", "mcore", tmp_path / "run", keep)
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["odd_field"] == [1, 2]
    with pytest.raises(ValueError, match="no effect on an input in the format"):
        convert("mcore", tmp_path / "run", "hf", tmp_path / "no", keep)


def config_after(tmp_path, model, model_type="", **fields):
    """Convert a folder with more fields to ours and back; read config.json strictly."""
    make(tmp_path / "hf", model)
    edit(tmp_path / "hf", **fields)
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    mcore_to_hf(tmp_path / "run", tmp_path / "again", ConvertOptions(model_type=model_type))

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    text = (tmp_path / "again" / "config.json").read_text()
    return json.loads(text, parse_constant=refuse)


def test_fields_that_engines_read_come_back_and_go_to_no_other_family(tmp_path):
    config = config_after(tmp_path / "a", "nemotron_h", max_position_embeddings=77)
    assert config["max_position_embeddings"] == 77
    assert (config["num_hidden_layers"], config["hybrid_override_pattern"]) == (5, "ME*-M")
    assert config_after(tmp_path / "b", "gpt2", n_ctx=55)["n_ctx"] == 55
    context = {"original_max_position_embeddings": 33}
    config = config_after(tmp_path / "c", "phi3", "mistral", **context)
    assert config["model_type"] == "mistral"
    assert "original_max_position_embeddings" not in config


def test_infinity_is_written_as_json_and_read_as_transformers_writes_it(tmp_path):
    config = config_after(tmp_path, "mamba2", time_step_limit=[0.25, math.inf])
    assert config["time_step_limit"] == [0.25, {"__float__": "Infinity"}]
    again = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert list(again.time_step_limit) == [0.25, math.inf]
    hf_to_mcore(tmp_path / "again", tmp_path / "run_again")
    assert not differences(tmp_path / "run", tmp_path / "run_again")


def test_weights_that_are_there_twice_are_refused(tmp_path):
    make(tmp_path / "hf", "llama", max_shard_size="8KB")
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ValueError, match=r"twice: model.safetensors, which transformers opens"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")


def test_an_index_that_names_an_absent_file_is_an_error(tmp_path):
    make(tmp_path / "hf", "llama", max_shard_size="8KB")
    sorted((tmp_path / "hf").glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(RuntimeError, match=r"model-00002-of-\d+.safetensors is missing"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")


def test_a_truncated_weight_file_is_an_error(tmp_path):
    make(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RuntimeError, match=r"of \d+ bytes: .* not fully covered. Copy or"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")


def test_an_output_in_the_way_is_refused_and_left_as_it_was(tmp_path):
    make(tmp_path / "hf", "llama")
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    with pytest.raises(RuntimeError, match="already holds a complete checkpoint"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    before = sorted(tmp_path.glob("hf/*"))
    with pytest.raises(ValueError, match="exists and is not empty"):
        mcore_to_hf(tmp_path / "run", tmp_path / "hf")
    assert sorted(tmp_path.glob("hf/*")) == before
    assert not list(tmp_path.glob("*partial*"))


def test_the_proof_sees_a_byte_that_went_wrong(tmp_path, monkeypatch):
    make(tmp_path / "hf", "llama")
    from mcore_ckpt.mapping.views import RenamedRows

    def wrong(self, name, begin, stop):
        return right(self, name, begin, stop) + (name == "blocks.2.mlp.fc1.up.weight")

    right = RenamedRows.rows
    monkeypatch.setattr(RenamedRows, "rows", wrong)
    with pytest.raises(RuntimeError, match=r"proof failed: model.layers.2.mlp.up_proj.weight"):
        hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run" / "release" / "index.json").exists()


def test_a_family_is_found_for_a_model_that_was_trained_here():
    for name in MODELS:
        config = config_of(name)
        description = find_family(config["model_type"]).to_ours(config)
        found = family_for(description)
        # A Mistral without window is a Llama; a Phi-3 is a Mistral whose matrices are fused.
        alike = {"mistral without window": "llama", "phi3": "mistral"}
        assert found == alike.get(name, config["model_type"]), name
    description = {"family": "gpt", "vocab_size": 37, "config": {"squared_relu": True}}
    description["config"] |= {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    description["config"] |= {"swiglu": False, "qk_l2_norm": True}
    with pytest.raises(ValueError, match="no Hugging Face family can express this model"):
        family_for(description)


def test_a_check_runs_our_model_against_transformers_and_keeps_nothing_that_differs(
    tmp_path, capsys, monkeypatch
):
    from mcore_ckpt.cli import main

    def run(direction, source, target):
        words = ["--input", str(tmp_path / source), "--output", str(tmp_path / target)]
        code = main(["convert", direction, *words, "--check"])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    make(tmp_path / "hf", "llama")
    ways = (
        ("hf->megatron", "hf", "m"),
        ("megatron->mcore", "m", "run"),
        ("mcore->hf", "run", "h"),
    )
    for way in ways:
        code, shown = run(*way)
        assert code == 0, shown
        worst = re.search(r"mcore against transformers: logits differ by (\S+) of", shown)
        assert 0 <= float(worst[1]) < 1e-5
        assert "fingerprint " in shown
    make(tmp_path / "other", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.neg_()
    model.save_pretrained(tmp_path / "other")
    monkeypatch.setattr(conversion, "_as_hf", lambda *_: tmp_path / "other")
    checked = ConvertOptions(check=True)
    for form in ("mcore", "hf"):
        with pytest.raises(RuntimeError, match="mcore against transformers: logits differ by"):
            convert("hf", tmp_path / "hf", form, tmp_path / "kept", checked)
        assert not (tmp_path / "kept").exists()
    monkeypatch.undo()
    for name in ("bert", "t5", "mamba2"):
        make(tmp_path / name, name)
        code, shown = run("hf->mcore", name, f"checked {name}")
        assert code == 0, shown
        assert "mcore against transformers: logits differ by" in shown


def test_experts_in_mxfp4_are_read_as_the_numbers_they_stand_for(tmp_path):
    values = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 37,
    }
    values |= {"num_local_experts": 3, "num_experts_per_tok": 2, "eos_token_id": 0}
    values |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**values)).bfloat16()
    model.save_pretrained(tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    codes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes += [-float(value) for value in codes]
    for part, rows, width in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
        name = f"model.layers.0.mlp.experts.{part}"
        low, high = torch.randint(16, (2, 3, rows, width // 32, 16))
        scales = torch.randint(120, 130, (3, rows, width // 32))
        tensors[f"{name}_blocks"] = (low + 16 * high).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
        wanted = torch.empty(3, width, rows)
        for place in range(width):
            half = (low if place % 2 == 0 else high)[..., place // 32, place % 32 // 2]
            number = torch.tensor(codes)[half] * 2.0 ** (scales[..., place // 32] - 127)
            wanted[:, place] = number
        tensors[name] = wanted.bfloat16()
    plain = {n: t for n, t in tensors.items() if not n.endswith(("_blocks", "_scales"))}
    shutil.copytree(tmp_path / "packed", tmp_path / "wide")
    save_file(plain, tmp_path / "wide" / "model.safetensors")
    packed = {n: t for n, t in tensors.items() if f"{n}_blocks" not in tensors}
    save_file(packed, tmp_path / "packed" / "model.safetensors")
    edit(tmp_path / "packed", quantization_config={"quant_method": "mxfp4"})
    for name in ("packed", "wide"):
        hf_to_mcore(tmp_path / name, tmp_path / f"run_{name}")
    assert not differences(tmp_path / "run_packed", tmp_path / "run_wide")


def test_a_check_takes_experts_of_any_width_and_says_whose_a_failure_is(tmp_path, monkeypatch):
    odd = {"intermediate_size": 6, "num_local_experts": 3, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**{**ODD, **HEADS, **odd})
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "hf")
    checked = ConvertOptions(check=True)
    report = convert("hf", tmp_path / "hf", "mcore", tmp_path / "run", checked)
    assert report.logits_differ_by < 1e-5

    def fails(*_, **__):
        raise KeyError("a fault\nof many lines")

    message = r"^--check: transformers cannot run .*hf: KeyError: .*The output was removed"
    for part in (transformers.AutoModelForCausalLM, transformers.AutoConfig):
        with monkeypatch.context() as patch:
            patch.setattr(part, "from_pretrained", fails)
            with pytest.raises(CheckpointError, match=message):
                convert("hf", tmp_path / "hf", "mcore", tmp_path / "no", checked)
        assert not (tmp_path / "no").exists()


def test_a_check_of_a_16_bit_minimax_ignores_its_rounded_decays(tmp_path):
    sizes = {"block_size": 32, "intermediate_size": 6, "num_local_experts": 3}
    kinds = ["linear_attention"] * ODD["num_hidden_layers"]
    config = transformers.MiniMaxConfig(**{**ODD, **HEADS, **sizes, "layer_types": kinds})
    model = transformers.MiniMaxForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.bfloat16().save_pretrained(tmp_path / "hf")
    checked = ConvertOptions(check=True)
    report = convert("hf", tmp_path / "hf", "mcore", tmp_path / "run", checked)
    assert report.logits_differ_by < 1e-5
