"""Objectives train a tiny Llama as trl does: the same losses, and the same weights at the end.

Needs trl, which no package requires: `nox -s trl` brings it. Everything is in float64, each
step has all samples, and AdamW has the same settings on both sides: a large epsilon, since
transformers rounds rotary tables to float32 and AdamW divides small gradients by their size.
"""

import json

import pytest
import torch
from parity.hf_twins import load_weights, ours_of

from mcore_data.datasets.chat import prepare_chats
from mcore_data.datasets.preferences import prepare_preferences
from mcore_data.preprocessing.tokenizer_training import train_tokenizer
from mcore_models.protocol import LM_LOSS
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards
from mcore_train.assembly import assemble
from mcore_train.batches.micro_batches import train_batches
from mcore_train.checkpoints.resuming import load_run
from mcore_train.layout_check.trial import whole_weights
from mcore_train.objectives import dpo
from mcore_train.options.parsing import parse
from mcore_train.resolution import build_plan
from mcore_train.step import train_step

trl = pytest.importorskip("trl", reason="needs trl: nox -s trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.parity_long, pytest.mark.filterwarnings("ignore")]

STEPS, LR, BETA, EPS = 3, 1e-2, 0.3, 1e-3
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}[A]"
    "{% generation %}{{ message.content }}#{% endgeneration %}"
    "{% else %}[U]{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)
CHATS = [
    [
        {"role": "user", "content": f"count to {n}"},
        {"role": "assistant", "content": " ".join(map(str, range(n)))},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "no" * n},
    ]
    for n in range(1, 5)
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": "x" * (1 + n % 3)}],
        "chosen": [{"role": "assistant", "content": "yes, " + "y" * n}],
        "rejected": [{"role": "assistant", "content": "no" * (1 + n % 2)}],
    }
    for n in range(5)
]


def llama(folder, tokenizer, *, seed, layers=2, width=16):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=tokenizer.eod,
    )
    model = transformers.LlamaForCausalLM(config).double()
    with torch.no_grad():  # away from the small weights that models begin with
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes, a student, a teacher, and both kinds of data."""
    folder = tmp_path_factory.mktemp("trl")
    (folder / "text.jsonl").write_text(json.dumps({"text": "0123456789 abc"}) + "\n")
    tokenizer = train_tokenizer([folder / "text.jsonl"], folder / "tokenizer", vocab_size=257)
    llama(folder / "student", tokenizer, seed=1)
    llama(folder / "teacher", tokenizer, seed=2, layers=3, width=24)
    chats = (json.dumps({"messages": chat}) for chat in CHATS)
    (folder / "chats.jsonl").write_text("\n".join(chats))
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    prepare_chats(folder / "chats.jsonl", folder / "chats", tokenizer, TEMPLATE)
    prepare_preferences(folder / "pairs.jsonl", folder / "pairs", tokenizer, TEMPLATE)
    return folder


def ours(folder, flags, num_steps=STEPS):
    """Train on all samples in each step; return the losses by name, and the weights."""
    words = ["--load", str(folder / "student"), "--finetune", "--seq-length", "512"]
    words += ["--micro-batch-size", "1", "--global-batch-size", "1", "--lr", str(LR)]
    words += ["--train-iters", str(num_steps), "--num-workers", "0", "--split", "1,0,0"]
    words += ["--tokenizer-model", str(folder / "tokenizer"), "--clip-grad", "0"]
    words += [
        "--adam-beta2",
        "0.999",
        "--adam-eps",
        str(EPS),
        "--lr-decay-style",
        "constant",
        "--weight-decay",
        "0",
    ]
    plan = build_plan(parse([*words, *flags]), 1)
    run = load_run(assemble(plan, ParallelContext.single(), dtype=torch.float64))
    batches, losses = train_batches(run), []
    for _ in range(num_steps):
        result = train_step(run, next(batches), LR, 0.0)
        losses.append({name: value.item() for name, value in result.losses.items()})
    return losses, whole_weights(run)


def trainer_options(folder):
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 8,
        "max_steps": STEPS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        "adam_epsilon": EPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def hf_tokenizer(folder):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer/tokenizer.json")
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(256)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def student(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "student", dtype=torch.float64
    )


def recorded(trainer_class):
    """Keep each step's loss unrounded."""

    class Recorded(trainer_class):
        exact: list

        def training_step(self, *arguments, **options):
            loss = super().training_step(*arguments, **options)
            self.exact.append(loss.item())
            return loss

    Recorded.exact = []
    return Recorded


def assert_same_weights(weights, model, folder):
    """Compare our weights with those of a model of transformers, read by our names.

    The tolerance is that of float32, in which transformers computes rotary tables.
    """
    model.save_pretrained(folder)
    want = ours_of(folder)
    load_weights(want, folder)
    for name, shard in named_shards(want).items():
        torch.testing.assert_close(
            weights[name], shard.pieces[0].data.view_as(weights[name]), rtol=1e-5, atol=1e-6
        )


def test_sft_trains_as_sft_trainer(folder, tmp_path):
    options = trl.SFTConfig(
        **trainer_options(tmp_path), assistant_only_loss=True, packing=False, max_length=512
    )
    trainer = recorded(trl.SFTTrainer)(
        model=student(folder),
        args=options,
        train_dataset=datasets.Dataset.from_list([{"messages": chat} for chat in CHATS]),
        processing_class=hf_tokenizer(folder),
    )
    trainer.train()
    losses, weights = ours(folder, ["--objective", "sft", "--data-path", str(folder / "chats")])
    found = [each[LM_LOSS] for each in losses]
    assert found == pytest.approx(trainer.exact, rel=1e-6)
    assert_same_weights(weights, trainer.model, tmp_path / "trained")


def test_dpo_trains_as_dpo_trainer(folder, tmp_path):
    options = trl.DPOConfig(**trainer_options(tmp_path), beta=BETA, max_length=512)
    trainer = recorded(trl.DPOTrainer)(
        model=student(folder),
        ref_model=student(folder),
        args=options,
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=hf_tokenizer(folder),
    )
    trainer.train()
    flags = [
        "--objective",
        "dpo",
        "--data-path",
        str(folder / "pairs"),
        "--dpo-beta",
        str(BETA),
    ]
    losses, weights = ours(folder, flags)
    assert [each[dpo.DPO.loss_name] for each in losses] == pytest.approx(
        trainer.exact, rel=1e-6
    )
    logged = [each for each in trainer.state.log_history if "rewards/margins" in each]
    for name in ("rewards/margins", "rewards/chosen", "rewards/rejected", "rewards/accuracies"):
        found = [each[name] for each in losses]
        assert found == pytest.approx([each[name] for each in logged], rel=1e-3, abs=1e-4)
    assert_same_weights(weights, trainer.model, tmp_path / "trained")


def test_distillation_trains_as_gkd_with_the_forward_divergence(folder, tmp_path):
    from trl.experimental.gkd import GKDTrainer

    flags = ["--objective", "distill", "--reference-model", str(folder / "teacher")]
    flags += ["--sft", "--data-path", str(folder / "chats"), "--distill-temperature", "2"]
    losses, weights = ours(folder, flags)
    model, tokenizer = student(folder), hf_tokenizer(folder)
    teacher = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "teacher", dtype=torch.float64
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    rows = [
        tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        for chat in CHATS
    ]
    theirs = []
    for _ in range(STEPS):
        students, teachers, masks = [], [], []
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            students.append(model(ids).logits[0, :-1])
            teachers.append(teacher(ids).logits[0, :-1].detach())
            masks.append(torch.tensor(row["assistant_masks"])[1:])
        labels = torch.where(torch.cat(masks) > 0, 0, -100)
        loss = GKDTrainer.generalized_jsd_loss(
            torch.cat(students), torch.cat(teachers), labels, beta=0.0, temperature=2.0
        )
        loss = loss * 2.0**2  # as Hinton et al. scale it; trl does not
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    assert [each["distillation loss"] for each in losses] == pytest.approx(theirs, rel=1e-6)
    assert_same_weights(weights, model, tmp_path / "trained")
