"""T5 in its published forms and Megatron's: transformers' numbers, layouts, its command."""

import json

import pytest
import torch
from parity.hf_twins import largest_gradient_error, ours_of
from warm_ranks import run_ranks

from mcore_ckpt.conversion.conversion import convert
from mcore_infer.config import SamplingConfig
from mcore_infer.kv_cache import StaticCache
from mcore_infer.t5_decoding import answer_texts
from mcore_models.encoder_config import T5Config
from mcore_models.encoder_shapes import t5_shapes
from mcore_models.families import T5_FAMILY
from mcore_models.protocol import LM_LOSS, MicroBatch
from mcore_models.t5 import T5
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards
from mcore_train.cli import main
from mcore_train.composition import T5TrainConfig, compose
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.layout_check.verification import verify_on_rank
from mcore_train.reporting.log import read_metrics
from mcore_train.resolution import resolve

transformers = pytest.importorskip("transformers")

LONG = pytest.mark.parity_long
TOLERANCE = 1e-6
"""transformers takes the norms and the softmax of a T5 in float32 whatever its dtype."""
SIZES = {
    "vocab_size": 53,
    "d_model": 24,
    "d_kv": 10,
    "num_heads": 3,
    "d_ff": 28,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize(
    "form",
    [
        {"feed_forward_proj": "relu"},
        {"feed_forward_proj": "gated-relu"},
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ],
    ids=["1.0", "gated by ReLU", "1.1"],
)
def test_logits_losses_and_gradients_are_those_of_transformers(tmp_path, form):
    torch.manual_seed(2)
    config = transformers.T5Config(**SIZES, **form)
    theirs = transformers.T5ForConditionalGeneration(config).double().eval()
    if not form.get("tie_word_embeddings", True):
        head = torch.nn.Parameter(torch.randn(53, 24, dtype=torch.float64))
        theirs.lm_head.weight = head
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.5).add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "weights")
    model = ours_of(tmp_path / "weights")
    shapes = {name: shard.shape for name, shard in named_shards(model).items()}
    assert shapes == t5_shapes(model.config, model.vocab_size)
    ids, labels = torch.randint(53, (4, 40)), torch.randint(53, (4, 30))
    padding = torch.ones(4, 40, dtype=torch.int64)
    padding[1, 26:] = 0
    mask = (torch.rand(4, 30) < 0.8).double()
    found = theirs(
        ids,
        attention_mask=padding,
        labels=torch.where(mask > 0, labels, -100),
        decoder_input_ids=torch.cat([torch.zeros(4, 1, dtype=torch.int64), labels[:, :-1]], 1),
    )
    found.loss.backward()
    entries = {"text_enc": ids, "labels": labels, "loss_mask": mask, "enc_mask": padding}
    entries["text_dec"] = torch.cat([torch.zeros(4, 1, dtype=torch.int64), labels[:, :-1]], 1)
    batch = MicroBatch(entries)
    hidden, _ = model.run_stage(batch, None)
    torch.testing.assert_close(
        model.logits(hidden).transpose(0, 1)[..., :53], found.logits, rtol=0, atol=TOLERANCE
    )
    loss = model.losses(hidden, batch, {LM_LOSS: mask / mask.sum()})[LM_LOSS]
    assert loss.item() == pytest.approx(found.loss.item(), rel=TOLERANCE)
    loss.backward()
    error, where = largest_gradient_error(model, theirs, tmp_path / "gradients")
    assert error < TOLERANCE, where


FLAGS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "seq_length": 32,
    "decoder_seq_length": 16,
    "mock_data": True,
    "train_iters": 10,
    "lr": 1e-3,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "eval_interval": 5,
    "use_distributed_optimizer": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}
PUBLISHED = {
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "scale_attention_scores": False,
    "scale_decoder_outputs": True,
    "feed_forward_proj": "relu",
}


CUT = {"context_parallel_size": 2, "sequence_parallel": True}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # noise is the others' matter
SHARDED = CUT | {"use_distributed_optimizer": False, "use_torch_fsdp2": True}
ONE_STAGE = {"pipeline_model_parallel_size": 1}
WHOLE = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
DATA_PARALLEL = {"use_distributed_optimizer": False} | ONE_STAGE | WHOLE


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(4, PUBLISHED | SHARDED | QUIET | ONE_STAGE, marks=LONG),
        (2, PUBLISHED | QUIET | ONE_STAGE | {"sequence_parallel": True}),
        (2, PUBLISHED | SHARDED | QUIET | ONE_STAGE | WHOLE),
        pytest.param(4, {"encoder_num_layers": 1, "decoder_num_layers": 3}, marks=LONG),
        pytest.param(2, DATA_PARALLEL | QUIET, marks=LONG),
        (2, PUBLISHED | QUIET | WHOLE),
        pytest.param(8, PUBLISHED | CUT, marks=LONG),
    ],
    ids=[
        "published tp2 sp cp2, fully sharded",
        "published tp2 sp",
        "published cp2, fully sharded",
        "Megatron's tp2 pp2, a stage of both halves",
        "dp2",
        "published pp2",
        "published tp2 sp pp2 cp2",
    ],
)
def test_every_axis_computes_what_one_rank_computes(world_size, changes):
    config = compose(FLAGS | changes, T5TrainConfig)
    small = build_small_run(resolve(config, world_size, family=T5_FAMILY), world_size)
    # By its own name, so that the ranks do not load this file, and transformers with it.
    certificate = run_ranks(verify_on_rank, world_size, small, check_shapes=False)[0]
    assert certificate.passed, [line for line in certificate.lines if not line.passed]
    checked = {line.what for line in certificate.lines}
    assert checked >= {"logits", "gradient", "weights after steps", "continued run"}


@pytest.mark.parametrize("form", [PUBLISHED, {}], ids=["published", "Megatron's"])
def test_tokens_in_pieces_are_scored_as_all_at_once(form):
    sizes = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 3}
    config = T5Config(**sizes, **form, max_position_embeddings=20, init_method_std=0.3)
    model = T5(config, ParallelContext.single(), vocab_size=41, dtype=torch.float64).eval()
    texts, written = torch.randint(41, (2, 9)), torch.randint(41, (2, 7))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    cache = StaticCache(7)
    with torch.no_grad():
        encoded = model.read(texts, mask)
        want = model((texts, written), mask)["decoder"]
        found = []
        for piece in written.split([3, 1, 1, 2], 1):
            found.append(model.write(piece, encoded, mask, cache))
            cache.advance(piece.shape[1])
    torch.testing.assert_close(torch.cat(found), want, rtol=1e-10, atol=1e-10)


def test_a_run_is_exported_to_transformers_and_continued_from_it(tmp_path):
    form = (
        "--position-embedding-type relative --normalization RMSNorm --disable-bias-linear "
        "--no-add-output-bias --no-scale-attention-scores --scale-decoder-outputs "
        "--feed-forward-proj gated-gelu"
    )
    rest = (
        "--seq-length 32 --decoder-seq-length 16 --mock-data --mock-vocab-size 140 "
        "--micro-batch-size 4 --lr 1e-3 --device cpu --num-workers 0 --log-interval 1"
    )
    run, again = tmp_path / "run", tmp_path / "again.jsonl"
    sizes = "--encoder-num-layers 2 --decoder-num-layers 1 --hidden-size 32"
    words = f"{sizes} --num-attention-heads 4 {form} {rest} --train-iters 4 --save {run}"
    assert main(["t5", *words.split(), "--save-interval", "2", "--save-hf"]) == 0
    losses = [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    continued = f"{rest} --train-iters 4 --load {run} --ckpt-step 2 --metrics-file {again}"
    assert main(["t5", *continued.split()]) == 0
    for found in (row for row in read_metrics(again) if "loss" in row):
        assert found["loss"] == losses[found["iteration"] - 1]
    convert("mcore", run, "hf", tmp_path / "hf")
    said = [
        json.loads((folder / "config.json").read_text())["decoder_start_token_id"]
        for folder in (run / "iter_0000004", tmp_path / "hf")
    ]
    assert said == [1, 1]
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    model = ours_of(run, torch.float32)
    ids, written = torch.randint(1, 140, (2, 9)), torch.randint(140, (2, 5))
    with torch.no_grad():
        got = model.logits(model((ids, written))["decoder"]).transpose(0, 1)[..., :140]
        want = theirs(ids, decoder_input_ids=written).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    ids[1, 6:] = 0
    # The mock data's decoder begins with 1, which the folder says.
    length = {"max_new_tokens": 6, "min_new_tokens": 6}
    found = theirs.generate(ids, attention_mask=(ids > 0).long(), do_sample=False, **length)
    texts = [ids[0].tolist(), ids[1, :6].tolist()]
    greedy = SamplingConfig(num_tokens=6, top_k=1)
    rows = [[], []]
    for token in answer_texts(model, texts, greedy, start=1):
        rows[token.row].append(token.id)
    assert rows == found[:, 1:].tolist()
    words = f"{rest} --train-iters 1 --load {tmp_path / 'hf'} --finetune".split()
    assert main(["t5", *words]) == 0
