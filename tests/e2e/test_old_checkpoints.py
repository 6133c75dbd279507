"""Megatron's published checkpoints, GPT-345M and BERT-345M, in small: read and evaluated.

Their files are made here by hand from random models of transformers, whose losses are the
measure. GPT is evaluated by our own command; BERT by transformers, from the folder that it is
converted to, and by our model, whose scores ``--check`` compares with theirs.
"""

import json
import math
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
import transformers

from mcore_ckpt.cli import main as ckpt
from mcore_infer.cli import main as infer

D, N, L, F = 16, 4, 2, 64
TEXT = "It was the best of times, it was the worst of times. " * 2
WINDOW = 48


@pytest.fixture
def words(tmp_path):
    """A folder with GPT-2's vocabulary, bytes alone, as it is published beside GPT-345M."""
    # Bytes that print stand for themselves, the others for the letters after them.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain}
    vocab |= {chr(256 + number): byte for number, byte in enumerate(others)}
    vocab["<|endoftext|>"] = 256
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def old_layers(names, state):
    """Name a stack as the first releases did; ``names`` gives each part its tensors."""
    layers = OrderedDict()
    for layer in range(L):
        for there, tensors in names(layer).items():
            for kind, name in zip(("weight", "bias"), tensors, strict=True):
                parts = [state[one] for one in ([name] if isinstance(name, str) else name)]
                layers[f"layers.{layer}.{there}.{kind}"] = torch.cat(parts).contiguous()
    return layers


def write_old(folder, model, vocab_size, **more):
    padded = model["language_model"]["embedding"]["word_embeddings"]["weight"].shape[0]
    arguments = Namespace(
        num_layers=L,
        hidden_size=D,
        num_attention_heads=N,
        ffn_hidden_size=F,
        max_position_embeddings=WINDOW,
        padded_vocab_size=padded,
        **more,
    )
    (folder / "mp_rank_00").mkdir(parents=True)
    torch.save(
        {"args": arguments, "model": model, "iteration": 0},
        folder / "mp_rank_00" / "model_optim_rng.pt",
        _use_new_zipfile_serialization=False,
    )


def padded(tensor, rows):
    return torch.cat((tensor, torch.full((rows - tensor.shape[0], *tensor.shape[1:]), 9.0)))


def random_model(kind, config):
    torch.manual_seed(11)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def test_gpt_345m_in_small_is_read_and_evaluated(tmp_path, words, capsys):
    config = transformers.GPT2Config(
        vocab_size=257, n_embd=D, n_layer=L, n_head=N, n_inner=F, n_positions=WINDOW
    )
    theirs = random_model(transformers.GPT2LMHeadModel, config)
    # Its linears are stored [in, out], those of Megatron's [out, in].
    state = {
        name.removeprefix("transformer."): t.t() if ".c_" in name and t.dim() == 2 else t
        for name, t in theirs.state_dict().items()
    }
    parts = {
        "input_layernorm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.dense": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.dense_h_to_4h": "mlp.c_fc",
        "mlp.dense_4h_to_h": "mlp.c_proj",
    }
    body = old_layers(
        lambda layer: {
            there: (f"h.{layer}.{name}.weight", f"h.{layer}.{name}.bias")
            for there, name in parts.items()
        },
        state,
    )
    body |= {f"final_layernorm.{kind}": state[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    embedding = {
        "word_embeddings": {"weight": padded(state["wte.weight"], 384)},
        "position_embeddings": {"weight": state["wpe.weight"]},
    }
    model = {"language_model": {"embedding": embedding, "transformer": body}}
    write_old(tmp_path / "old", model, 257)

    run = str(tmp_path / "run")
    told = ["--input", str(tmp_path / "old"), "--output", run, "--vocab-size", "257"]
    assert ckpt(["convert", "megatron-to-mcore", *told]) == 0
    (tmp_path / "text").write_text(TEXT)
    capsys.readouterr()
    line = ["--load", run, "--tokenizer", str(words), "--valid-data", str(tmp_path / "text")]
    # Windows that do not overlap, so that the measure is short.
    flags = ["--overlapping-eval", str(WINDOW), "--device", "cpu"]
    assert infer(["eval", *line, *flags]) == 0
    found = capsys.readouterr().out

    ids = [256, *TEXT.encode()]
    total = 0.0
    for begin in range(0, len(ids) - 1, WINDOW):
        targets = torch.tensor(ids[begin + 1 : begin + 1 + WINDOW])
        # The last window is moved to the left until it is full.
        first = min(begin, max(0, len(ids) - 1 - WINDOW))
        tokens = torch.tensor([ids[first : first + WINDOW]])
        with torch.no_grad():
            logits = theirs(tokens).logits[0, -len(targets) :]
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    loss = total / len(TEXT.encode())
    assert f"loss {loss:.4f} per token | perplexity {math.exp(loss):.2f} |" in found


def test_bert_345m_in_small_is_read_and_evaluated(tmp_path, capsys):
    config = transformers.MegatronBertConfig(
        vocab_size=37,
        hidden_size=D,
        num_hidden_layers=L,
        num_attention_heads=N,
        intermediate_size=F,
        max_position_embeddings=WINDOW,
        layer_norm_eps=1e-5,
    )
    theirs = random_model(transformers.MegatronBertForPreTraining, config)
    state = theirs.state_dict()

    def names(layer):
        at = f"bert.encoder.layer.{layer}."
        parts = {
            "input_layernorm": "attention.ln",
            "attention.dense": "attention.output.dense",
            "post_attention_layernorm": "ln",
            "mlp.dense_h_to_4h": "intermediate.dense",
            "mlp.dense_4h_to_h": "output.dense",
        }
        found = {t: (f"{at}{n}.weight", f"{at}{n}.bias") for t, n in parts.items()}
        three = ("query", "key", "value")
        found["attention.query_key_value"] = tuple(
            [f"{at}attention.self.{part}.{kind}" for part in three]
            for kind in ("weight", "bias")
        )
        return found

    def both(name):
        return {kind: state[f"{name}.{kind}"] for kind in ("weight", "bias")}

    body = old_layers(names, state)
    body |= {f"final_layernorm.{k}": t for k, t in both("bert.encoder.ln").items()}
    at = "bert.embeddings."
    embedding = {
        "word_embeddings": {"weight": padded(state[f"{at}word_embeddings.weight"], 128)},
        "position_embeddings": {"weight": state[f"{at}position_embeddings.weight"]},
        "tokentype_embeddings": {"weight": state[f"{at}token_type_embeddings.weight"]},
    }
    pooler = {f"dense.{k}": t for k, t in both("bert.pooler.dense").items()}
    transform = "cls.predictions.transform."
    head = {"bias": padded(state["cls.predictions.bias"], 128)}
    head |= {f"dense.{k}": t for k, t in both(f"{transform}dense").items()}
    head |= {f"layernorm.{k}": t for k, t in both(f"{transform}LayerNorm").items()}
    language = {"embedding": embedding, "transformer": body, "pooler": pooler}
    model = {"language_model": language, "lm_head": OrderedDict(head)}
    model["binary_head"] = both("cls.seq_relationship")
    write_old(tmp_path / "old", model, 37)

    told = ["--input", str(tmp_path / "old"), "--output", str(tmp_path / "hf")]
    assert ckpt(["convert", "megatron-to-hf", *told, "--vocab-size", "37"]) == 0
    again = transformers.MegatronBertForPreTraining.from_pretrained(tmp_path / "hf").eval()
    ids = torch.randint(0, 37, (3, WINDOW), generator=torch.Generator().manual_seed(2))
    kinds = (torch.arange(WINDOW) > 20).long().expand(3, -1)
    options = {"labels": ids.roll(1, 1), "next_sentence_label": torch.tensor([0, 1, 1])}
    with torch.no_grad():
        one = theirs(ids, token_type_ids=kinds, **options)
        other = again(ids, token_type_ids=kinds, **options)
    assert float(other.loss) == pytest.approx(float(one.loss), rel=1e-6)
    torch.testing.assert_close(
        other.prediction_logits, one.prediction_logits, rtol=1e-5, atol=1e-5
    )
    told = ["--input", str(tmp_path / "old"), "--output", str(tmp_path / "run"), "--check"]
    assert ckpt(["convert", "megatron-to-mcore", *told, "--vocab-size", "37"]) == 0
    assert "mcore against transformers: " in capsys.readouterr().out
