"""Latent attention, experts and further tokens together, through the whole program."""

import json

import torch

from mcore_infer import SamplingConfig, generate, load_model
from mcore_infer.generation import next_logits
from mcore_parallel.mesh import ParallelContext
from mcore_train.cli import main

MODEL = """--num-layers 3 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48
--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8
--qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --rotary-interleaved --rope-type yarn
--rotary-scaling-factor 4 --original-max-position-embeddings 32 --mscale-all-dim 1
--num-experts 8 --moe-layer-freq [0]+[1]*2 --moe-router-topk 2 --moe-ffn-hidden-size 16
--moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-4 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
--moe-shared-expert-intermediate-size 16 --untie-embeddings-and-output-weights
--mtp-num-layers 1 --norm-epsilon 1e-6"""


def test_a_run_trains_is_exported_and_writes_from_its_latent_cache(tmp_path, capsys):
    run = "--mock-data --mock-vocab-size 40 --seq-length 16 --micro-batch-size 2 --lr 1e-2"
    save = f"--train-iters 2 --log-interval 1 --save {tmp_path} --save-hf"
    assert main(["gpt", *f"{MODEL} {run} {save}".split()]) == 0
    assert "mtp_1 loss" in capsys.readouterr().out
    config = json.loads((tmp_path / "iter_0000002" / "config.json").read_text())
    assert (config["model_type"], config["num_nextn_predict_layers"]) == ("deepseek_v3", 1)
    loaded = load_model(tmp_path, ParallelContext.single())
    (found,) = generate(loaded.model, [[1, 2, 3]], SamplingConfig(num_tokens=4, top_k=1))
    ids = [1, 2, 3]
    for _ in range(4):  # without a cache
        ids.append(next_logits(loaded.model, torch.tensor([ids]))[0].argmax().item())
    assert list(found.ids) == ids[3:]
