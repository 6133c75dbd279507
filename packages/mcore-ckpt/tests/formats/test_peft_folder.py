"""Adapters of Hugging Face PEFT, there and back, held to the library itself."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mcore_ckpt.cli import main
from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.conversion.inspection import differences, rows
from mcore_ckpt.conversion.options import ConvertOptions, UpcycleOptions
from mcore_ckpt.conversion.peft_export import export_adapters
from mcore_ckpt.conversion.upcycling import upcycle
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save_load.loading import describe_checkpoint, load
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.index import ADAPTER
from mcore_ckpt.storage.paths import PEFT_CONFIG
from mcore_parallel.mesh import SINGLE
from mcore_parallel.sharding import Piece, Shard

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 29}
ROPE = {"max_position_embeddings": 32, "num_key_value_heads": 2, "intermediate_size": 24}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": (transformers.LlamaConfig(**SIZES, **ROPE), ["q_proj", "v_proj", "down_proj"]),
    "phi3": (
        transformers.Phi3Config(**SIZES, **ROPE, pad_token_id=0),
        ["qkv_proj", "gate_up_proj", "o_proj"],
    ),
    "gpt2": (
        transformers.GPT2Config(
            n_embd=16, n_head=4, n_layer=2, vocab_size=29, n_positions=32, **QUIET
        ),
        ["c_attn", "mlp.c_proj"],
    ),
}


def adapted(base, targets, **options):
    """Put random adapters beside a model, as the library does."""
    import peft  # only here, for it loads half of transformers

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Conv1D, whose matrices lie the other way
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **options)
        model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            torch.nn.init.normal_(parameter, mean=float("magnitude" in name), std=0.3)
    return model.eval()


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request, tmp_path_factory):
    """A model, its folder, and its adapters' folder and scores."""
    folder = tmp_path_factory.mktemp(request.param)
    config, targets = CONFIGS[request.param]
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config).eval()
    base.save_pretrained(folder / "base")
    model = adapted(
        transformers.AutoModelForCausalLM.from_pretrained(folder / "base"),
        targets,
        r=3,
        lora_alpha=5,
        use_dora=request.param == "llama",
        rank_pattern={targets[-1]: 2},
        use_rslora=request.param == "gpt2",
    )
    model.save_pretrained(folder / "adapter")
    return folder, scores(model)


def scores(model):
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10)).logits


def from_folder(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def held(folder):
    """Load the adapters of a folder as a run does."""
    index = describe_checkpoint(folder)
    tensors = {name: torch.zeros(entry.shape) for name, entry in index.tensors.items()}
    shards = {
        name: Shard(tuple(t.shape), t.dtype, (Piece((0,) * t.dim(), tuple(t.shape), t),))
        for name, t in tensors.items()
    }
    load(folder, shards)
    return tensors, index.extra


def test_a_folder_of_the_library_merges_to_what_it_computes(case):
    folder, wanted = case
    convert("hf", folder / "adapter", "hf", folder / "merged")
    torch.testing.assert_close(scores(from_folder(folder / "merged")), wanted)


def test_a_folder_of_adapters_is_known_by_inspect_and_upcycle(case, tmp_path):
    folder, _ = case
    listed = [row["name"] for row in rows(folder / "adapter")]
    assert sorted(load_file(folder / "adapter" / "adapter_model.safetensors")) == listed
    if "llama" in folder.name:
        convert("hf", folder / "adapter", "hf", tmp_path / "merged", ConvertOptions(check=True))
        assert not differences(folder / "adapter", tmp_path / "merged")
        experts = UpcycleOptions(num_experts=2)
        assert upcycle(folder / "adapter", tmp_path / "up", experts).name == "release"


def test_tensors_trained_as_a_whole_replace_the_base_with_rows_for_new_tokens(tmp_path):
    config = transformers.LlamaConfig(**SIZES, **ROPE)
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(33)
    saved = ["embed_tokens", "lm_head"]
    model = adapted(base, ["q_proj", "o_proj"], r=2, lora_alpha=3, modules_to_save=saved)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the longer tables are saved
        model.save_pretrained(tmp_path / "adapter")
    convert("hf", tmp_path / "adapter", "hf", tmp_path / "merged")
    merged = from_folder(tmp_path / "merged")
    assert merged.config.vocab_size == 33
    tokens = torch.arange(20).add(13).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="merge them with their base first"):
        held(tmp_path / "adapter")


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_trained_without_its_tied_head_is_refused(tmp_path, is_tied):
    config = transformers.LlamaConfig(**SIZES, **ROPE, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": is_tied}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the head is not tied
        model = adapted(from_folder(tmp_path / "base"), ["q_proj"], **options)
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                torch.nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / "adapter")
    if not is_tied:  # PEFT computes the head with the base's embedding
        with pytest.raises(ValueError, match="without the head that its base ties to it"):
            convert("hf", tmp_path / "adapter", "hf", tmp_path / "merged")
        return
    convert("hf", tmp_path / "adapter", "hf", tmp_path / "merged")
    torch.testing.assert_close(scores(from_folder(tmp_path / "merged")), scores(model))


def test_several_adapters_are_merged_by_their_factors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(**SIZES, **ROPE)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("base")
    for rank, name in enumerate(("one", "two"), 1):
        base = transformers.AutoModelForCausalLM.from_pretrained("base")
        adapted(base, ["q_proj", "down_proj"], r=rank).save_pretrained(name)
        convert("hf", name, "hf", f"merged_{name}")
    words = "merge one two --base base --method task_arithmetic --weights 0.5 2 --output all"
    assert main(words.split()) == 0
    base, one, two, found = (
        load_file(f"{folder}/model.safetensors")
        for folder in ("base", "merged_one", "merged_two", "all")
    )
    for name, tensor in found.items():
        changes = 0.5 * (one[name] - base[name]) + 2 * (two[name] - base[name])
        torch.testing.assert_close(tensor, base[name] + changes)


def test_our_adapters_go_to_the_library_and_come_back(case):
    import peft  # only here, for it loads half of transformers

    folder, wanted = case
    tensors, extra = held(folder / "adapter")
    assert all(".adapter." in name for name in tensors)
    shards = {
        name: Shard(tuple(t.shape), t.dtype, (Piece((0,) * t.dim(), tuple(t.shape), t),))
        for name, t in tensors.items()
    }
    save(folder / "run", 1, shards, world=SINGLE, extra=extra)
    export_adapters(folder / "run", folder / "again")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a name that the library reads
        model = peft.PeftModel.from_pretrained(from_folder(folder / "base"), folder / "again")
    torch.testing.assert_close(scores(model.eval()), wanted)
    convert("mcore", folder / "run", "hf", folder / "merged_run")
    torch.testing.assert_close(scores(from_folder(folder / "merged_run")), wanted)
    assert held(folder / "again")[1][ADAPTER]["base"] == str(folder / "base")


def test_targets_are_named_by_what_all_layers_share(tmp_path):
    base = transformers.LlamaForCausalLM(CONFIGS["llama"][0])
    base.save_pretrained(tmp_path / "base")
    base = from_folder(tmp_path / "base")
    model = adapted(base, ["q_proj", "layers.1.mlp.up_proj"], r=2)
    model.save_pretrained(tmp_path / "adapter")
    _, extra = held(tmp_path / "adapter")
    assert extra[ADAPTER] == {
        "peft": "lora",
        "lora_dim": 2,
        "lora_alpha": 8.0,
        "lora_dropout": 0.0,
        "lora_target_modules": ["attention.qkv.q", "blocks.1.mlp.fc1.up"],
        "base": str(tmp_path / "base"),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "with peft_type IA3: give LORA"),
        ({"bias": "all"}, r"has trained biases \(bias\)"),
        ({"target_parameters": ["mlp.up_proj"]}, "has adapters of stacked experts"),
        ({"init_lora_weights": "pissa"}, "which changed the base too"),
        (
            {"base_model_name_or_path": "meta/llama"},
            "of meta/llama, which is not a folder",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, change, message):
    base = transformers.LlamaForCausalLM(CONFIGS["llama"][0])
    base.save_pretrained(tmp_path / "base")
    model = adapted(from_folder(tmp_path / "base"), ["q_proj"])
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        held(tmp_path / "adapter")


def test_tensors_that_are_no_adapters_are_refused(tmp_path):
    base = transformers.LlamaForCausalLM(CONFIGS["llama"][0])
    base.save_pretrained(tmp_path / "base")
    adapted(from_folder(tmp_path / "base"), ["q_proj"]).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    first = min(tensors)
    strange = {first.replace("q_proj", "z_proj"): tensors[first]}
    cases = [
        (
            tensors | {"base_model.model.lm_head.other": torch.zeros(2)},
            "neither a matrix or magnitude",
        ),
        ({first: tensors[first]}, "is damaged: the adapter of"),
        (
            strange | {n.replace("_A", "_B"): t.clone() for n, t in strange.items()},
            "has an adapter of",
        ),
        ({}, "holds no adapters"),
    ]
    for changed, message in cases:
        save_file(changed, file)
        with pytest.raises((ValueError, CheckpointError), match=message):
            held(tmp_path / "adapter")
