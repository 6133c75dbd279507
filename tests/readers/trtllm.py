"""Reads a TensorRT-LLM checkpoint back into a Hugging Face folder, from the format's table.

Shares no code with the exporter: names, orders and splits are written down here again. What it
cannot account for is an error: a tensor that nothing reads, replicas that differ, padding that
is not zero.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

STRANGE_GAINS = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
"""Classes whose Hugging Face twin stores gains minus one."""


class Ranks:
    """All rank files; each tensor is read exactly once."""

    def __init__(self, folder):
        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.inputs = {}
        self.layers = {}
        if self.config["quantization"]["quant_algo"] == "MIXED_PRECISION":
            said = json.loads((folder / "quant_cfg.json").read_text())
            for key in ("quant_algo", "kv_cache_quant_algo"):
                assert said[key] == self.config["quantization"][key]
            self.layers = said["quantized_layers"]
        mapping = self.config["mapping"]
        self.tp, self.pp = mapping["tp_size"], mapping["pp_size"]
        assert mapping["world_size"] == self.tp * self.pp
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        assert files == sorted(f"rank{n}.safetensors" for n in range(self.tp * self.pp))
        self.held = [
            [
                load_file(folder / f"rank{stage * self.tp + n}.safetensors")
                for n in range(self.tp)
            ]
            for stage in range(self.pp)
        ]

    def all(self, stage, name):
        return [rank.pop(name) for rank in self.held[stage]]

    def has(self, stage, name):
        return name in self.held[stage][0]

    def same(self, stage, name):
        first, *others = self.all(stage, name)
        assert all(torch.equal(first, other) for other in others), name
        return first

    def joined(self, stage, name, dim):
        return torch.cat(self.all(stage, name), dim)

    def wide(self, stage, name):
        """Return each rank's matrix of a linear, codes times their scales."""
        excluded = self.config["quantization"]["exclude_modules"] or []
        said = self.layers.get(name, self.config["quantization"])
        assert not self.layers or (name in self.layers) != (name in excluded), name
        how = said["quant_algo"]
        return [
            rank.pop(f"{name}.weight")
            if how in (None, "W8A16") or name in excluded
            else self._dequantized(rank, name, how, said["group_size"])
            for rank in self.held[stage]
        ]

    def _dequantized(self, rank, name, how, group):
        codes = rank.pop(f"{name}.weight")
        if how == "FP8_PER_CHANNEL_PER_TOKEN":
            assert codes.dtype == torch.float8_e4m3fn
            return codes.float() * rank.pop(f"{name}.per_channel_scale")[:, None]
        scale = rank.pop(f"{name}.weights_scaling_factor")
        assert scale.dtype == torch.float32
        if how in ("FP8", "W8A8_SQ_PER_CHANNEL"):
            inputs = rank.pop(f"{name}.activation_scaling_factor")
            assert inputs.shape == (1,)
            self.inputs.setdefault(name, set()).add(inputs.item())
        if how == "FP8":
            assert codes.dtype == torch.float8_e4m3fn
            assert scale.shape == (1,)
            return codes.float() * scale
        assert codes.dtype == torch.int8
        before = rank.pop(f"{name}.prequant_scaling_factor")
        if how == "W8A8_SQ_PER_CHANNEL":
            return codes.float() * scale[:, None] * before
        assert how == "W4A16_AWQ"
        low, high = (codes << 4) >> 4, codes >> 4  # of signed bytes, so that signs spread
        four = torch.stack((low, high), 1).reshape(2 * len(codes), -1)
        return four.float() * scale.repeat_interleave(group, 1) * before

    def finish(self):
        left = [sorted(rank) for stage in self.held for rank in stage]
        assert not any(left), left


def logical(folder):
    """Return the config and whole matrices under plain names: ``0.q``, ``0.fc``, ``head``."""
    ranks = Ranks(folder)
    config, last = ranks.config, ranks.pp - 1
    wide = {}
    name = "transformer.vocab_embedding.weight"
    wide["embedding"] = (
        ranks.joined(0, name, 0)[: config["vocab_size"]]
        if config["use_parallel_embedding"]
        else ranks.same(0, name)
    )
    if config["position_embedding_type"] == "learned_absolute":
        wide["positions"] = ranks.same(0, "transformer.position_embedding.weight")
    for kind in ("weight", "bias"):
        if ranks.has(last, f"transformer.ln_f.{kind}"):
            wide[f"ln_f.{kind}"] = ranks.same(last, f"transformer.ln_f.{kind}")
    head = ranks.joined(last, "lm_head.weight", 0)
    assert not head[config["vocab_size"] :].any()
    assert len(head) % ranks.tp == 0
    assert len(head) - config["vocab_size"] < ranks.tp
    wide["head"] = head[: config["vocab_size"]]
    per_stage = config["num_hidden_layers"] // ranks.pp
    for layer in range(config["num_hidden_layers"]):
        stage, local = divmod(layer, per_stage)
        _layer(ranks, stage, f"transformer.layers.{local}.", wide, f"{layer}.")
    ranks.finish()
    config["inputs"] = ranks.inputs
    return config, wide


def _layer(ranks, stage, there, wide, here):
    config = ranks.config
    for name in list(ranks.held[stage][0]):
        if name.startswith(there) and "layernorm" in name:
            wide[here + name.removeprefix(there)] = ranks.same(stage, name)
    d, nq, nkv = (
        config[k] for k in ("head_size", "num_attention_heads", "num_key_value_heads")
    )
    sizes = [nq // ranks.tp * d, max(1, nkv // ranks.tp) * d, max(1, nkv // ranks.tp) * d]
    repeats = max(1, ranks.tp // nkv)
    for kind in ("weight", "bias"):
        name = f"{there}attention.qkv"
        if not ranks.has(stage, f"{name}.{kind}"):
            continue
        fused = (
            ranks.wide(stage, name) if kind == "weight" else ranks.all(stage, f"{name}.bias")
        )
        parts = [one.split(sizes) for one in fused]
        for number, part in enumerate("qkv"):
            mine = [one[number] for one in parts]
            if part != "q":
                for n, one in enumerate(mine):
                    assert torch.equal(one, mine[n // repeats * repeats])
                mine = mine[::repeats]
            wide[f"{here}{part}.{kind}"] = torch.cat(mine)
    wide[f"{here}dense.weight"] = torch.cat(ranks.wide(stage, f"{there}attention.dense"), 1)
    if config["quantization"]["kv_cache_quant_algo"]:
        scale = ranks.same(stage, f"{there}attention.kv_cache_scaling_factor")
        assert scale.shape == (1,)
        ranks.inputs[f"{here}kv"] = {scale.item()}
    if ranks.has(stage, f"{there}attention.dense.bias"):
        wide[f"{here}dense.bias"] = ranks.same(stage, f"{there}attention.dense.bias")
    mlp = f"{there}mlp."
    if config["moe"]["num_experts"]:
        assert config["hidden_act"] == "swiglu"
        wide[f"{here}router"] = ranks.same(stage, f"{mlp}router.weight")
        both = [one.chunk(2, dim=1) for one in ranks.all(stage, f"{mlp}fc.weight")]
        wide[f"{here}up"] = torch.cat([up for up, _ in both], 1)
        wide[f"{here}gate"] = torch.cat([gate for _, gate in both], 1)
        wide[f"{here}down"] = ranks.joined(stage, f"{mlp}proj.weight", 2)
        return
    for name in ("fc", "gate"):
        if ranks.has(stage, f"{mlp}{name}.weight"):
            wide[f"{here}{name}.weight"] = torch.cat(ranks.wide(stage, f"{mlp}{name}"))
        if ranks.has(stage, f"{mlp}{name}.bias"):
            wide[f"{here}{name}.bias"] = ranks.joined(stage, f"{mlp}{name}.bias", 0)
    wide[f"{here}proj.weight"] = torch.cat(ranks.wide(stage, f"{mlp}proj"), 1)
    if ranks.has(stage, f"{mlp}proj.bias"):
        wide[f"{here}proj.bias"] = ranks.same(stage, f"{mlp}proj.bias")


def to_hugging_face(folder, output):
    """Write what a checkpoint holds as a folder that transformers opens."""
    config, wide = logical(folder)
    theirs = _config(config)
    names = _gpt2(wide) if config["position_embedding_type"] == "learned_absolute" else {}
    names = names or _llama_like(config, wide)
    assert not wide, sorted(wide)
    tensors = {name: tensor.contiguous() for name, tensor in names.items()}
    output.mkdir()
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    (output / "config.json").write_text(json.dumps(theirs))
    return output


def _config(config):
    name = config["architecture"]
    if config["position_embedding_type"] == "learned_absolute":
        assert config["hidden_act"] == "gelu_new"
        assert config["bias"]
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": config["vocab_size"],
            "n_embd": config["hidden_size"],
            "n_layer": config["num_hidden_layers"],
            "n_head": config["num_attention_heads"],
            "n_inner": config["intermediate_size"],
            "n_positions": config["max_position_embeddings"],
            "layer_norm_epsilon": config["norm_epsilon"],
            "tie_word_embeddings": False,
        }
    experts = config["moe"]["num_experts"]
    model_type = {
        "LlamaForCausalLM": "mixtral" if experts else "llama",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "GPTForCausalLM": "nemotron",
        "GemmaForCausalLM": "gemma",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3_text",
    }[name]
    scaling = dict(config["rotary_scaling"] or {})
    scaling.pop("type", None)
    rope = {"rope_type": "default", **scaling, "rope_theta": config["rotary_base"]}
    theirs = {
        "model_type": model_type,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_size"],
        "rms_norm_eps": config["norm_epsilon"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if model_type == "llama":
        theirs |= {"attention_bias": config["attn_bias"], "mlp_bias": config["mlp_bias"]}
    if model_type == "nemotron":
        assert config["hidden_act"] == "squared-relu"
        rope["partial_rotary_factor"] = config["rotary_pct"]
        theirs |= {"norm_eps": config["norm_epsilon"], "hidden_act": "relu2"}
        theirs["partial_rotary_factor"] = config["rotary_pct"]
    if experts:
        keys = ("num_experts", "num_local_experts")
        theirs |= dict.fromkeys(keys, experts)
        theirs["num_experts_per_tok"] = config["moe"]["top_k"]
        theirs["norm_topk_prob"] = config["moe"]["normalization_mode"] == 1
        if model_type == "qwen3_moe":
            theirs["moe_intermediate_size"] = config["moe_intermediate_size"]
    if "query_pre_attn_scalar" in config:
        names = ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping")
        theirs |= {name: config.get(name) for name in names}
        assert config["hidden_act"] == "gelu_pytorch_tanh"
    if name in STRANGE_GAINS:
        assert config["inter_layernorms"] == (model_type != "gemma")
    if model_type == "gemma3_text":
        every = config["_sliding_window_pattern"]
        theirs["layer_types"] = [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
            for layer in range(config["num_hidden_layers"])
        ]
        theirs["sliding_window"] = config["sliding_window"]
        local = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
        theirs["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return theirs


def _gpt2(wide):
    names = {
        "transformer.wte.weight": wide.pop("embedding"),
        "transformer.wpe.weight": wide.pop("positions"),
        "lm_head.weight": wide.pop("head"),
    }
    for kind in ("weight", "bias"):
        names[f"transformer.ln_f.{kind}"] = wide.pop(f"ln_f.{kind}")
    for layer in range(sum(name.endswith("q.weight") for name in wide)):
        for kind in ("weight", "bias"):

            def take(*parts, kind=kind, layer=layer):
                found = torch.cat([wide.pop(f"{layer}.{part}.{kind}") for part in parts])
                return found.t() if kind == "weight" and found.dim() == 2 else found

            there = f"transformer.h.{layer}."
            names[f"{there}ln_1.{kind}"] = take("input_layernorm")
            names[f"{there}ln_2.{kind}"] = take("post_layernorm")
            names[f"{there}attn.c_attn.{kind}"] = take("q", "k", "v")
            names[f"{there}attn.c_proj.{kind}"] = take("dense")
            names[f"{there}mlp.c_fc.{kind}"] = take("fc")
            names[f"{there}mlp.c_proj.{kind}"] = take("proj")
    return names


def _llama_like(config, wide):
    is_gemma = config["architecture"] in STRANGE_GAINS
    is_gpt = config["architecture"] == "GPTForCausalLM"
    less = 1.0 if is_gemma or is_gpt else 0.0
    norms = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        norms[name] = name
    norms |= {f"attention.{n}_layernorm": f"self_attn.{n}_norm" for n in "qk"}
    linears = {f"{n}": f"self_attn.{n}_proj" for n in "qkv"} | {"dense": "self_attn.o_proj"}
    linears |= (
        {"fc": "mlp.up_proj"} if is_gpt else {"fc": "mlp.gate_proj", "gate": "mlp.up_proj"}
    )
    linears["proj"] = "mlp.down_proj"
    names = {
        "model.embed_tokens.weight": wide.pop("embedding"),
        "lm_head.weight": wide.pop("head"),
        "model.norm.weight": wide.pop("ln_f.weight") - less,
    }
    if is_gpt:
        names["model.norm.bias"] = wide.pop("ln_f.bias")
    for layer in range(config["num_hidden_layers"]):
        there = f"model.layers.{layer}."
        if config["moe"]["num_experts"]:
            _experts(config, wide, layer, there, names)
        for mine, theirs in (norms | linears).items():
            for kind in ("weight", "bias"):
                held = wide.pop(f"{layer}.{mine}.{kind}", None)
                if held is not None:
                    shift = less if mine in norms and kind == "weight" else 0.0
                    names[f"{there}{theirs}.{kind}"] = held - shift
    return names


def _experts(config, wide, layer, there, names):
    mixtral = config["architecture"] == "LlamaForCausalLM"
    mlp = f"{there}block_sparse_moe." if mixtral else f"{there}mlp."
    names[f"{mlp}gate.weight"] = wide.pop(f"{layer}.router")
    words = {"gate": "w1", "down": "w2", "up": "w3"} if mixtral else {}
    for half in ("gate", "up", "down"):
        for expert, weight in enumerate(wide.pop(f"{layer}.{half}")):
            word = words.get(half, f"{half}_proj")
            names[f"{mlp}experts.{expert}.{word}.weight"] = weight
