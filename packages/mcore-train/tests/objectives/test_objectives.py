"""Objectives under every kind of layout, against their formulas on one rank in float64."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from warm_ranks import run_command, run_ranks

from mcore_data.datasets.preferences import prepare_preferences
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer.config import SamplingConfig
from mcore_models.protocol import LABELS, LM_LOSS, LOSS_MASK, TOKENS
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_parameters, shards_of
from mcore_parallel.testing.ranks import gather_logical
from mcore_train.assembly import assemble
from mcore_train.batches.micro_batches import train_batches
from mcore_train.checkpoints.resuming import load_run, rewind, save_run
from mcore_train.composition import compose
from mcore_train.layout_check.trial import fingerprint, whole_weights
from mcore_train.loop import train
from mcore_train.objectives import dpo, grpo
from mcore_train.objectives.objective import SupervisedFineTuning
from mcore_train.objectives.reference import check_reference
from mcore_train.objectives.reference_cache import write_entries
from mcore_train.objectives.rollouts import (
    ADVANTAGES,
    OLD_LOG_PROBS,
    REWARDS,
    EngineTexts,
    rollout_steps,
)
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import build_plan
from mcore_train.step import backward, train_step

BASE = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "ffn_hidden_size": 40,
    "make_vocab_size_divisible_by": 8,
    "tokenizer_type": "ByteTokenizer",
    "seq_length": 48,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-2,
    "num_workers": 0,
}
TEACHER = {**BASE, "num_layers": 4, "hidden_size": 32, "kv_channels": 8, "seed": 77}
ROOT = Path(__file__).parents[4]
OBJECTIVES = ["dpo", "distill", "distill_top_k", "grpo"]
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {"use_distributed_optimizer": True},
}
PAIRS = [
    {
        "prompt": "ab" * (1 + i % 3),
        "chosen": "yes" * (1 + i % 2),
        "rejected": "no, " * (i % 3 + 1),
    }
    for i in range(12)
]


REWARD = """
def low(prompt, completion, record):
    return sum(map(ord, completion)) / 1000 + len(prompt) + record.get("wish", 0)
"""


GRPO_FLAGS = {"objective": "grpo", "prompts": "p.jsonl", "reward": "m:f", "mock_data": False}
GRPO_SAMPLES = {**GRPO_FLAGS, "train_iters": 0, "train_samples": 24}


def start(flags, world_size=1):
    plan = build_plan(compose(flags), world_size)
    return assemble(plan, ParallelContext.build(plan.config.parallelism), dtype=torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reference, a deeper and wider teacher, and stored pairs."""
    folder = tmp_path_factory.mktemp("objectives")
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    prepare_preferences(folder / "pairs.jsonl", folder / "pairs", ByteTokenizer())
    (folder / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "abc", "wish": 2}\n')
    (folder / "rewards.py").write_text(REWARD)
    for name, flags in (("reference", {**BASE, "seed": 5}), ("teacher", TEACHER)):
        save_run(start({**flags, "mock_data": True, "save": str(folder / name)}))
    return folder


def objective_flags(name, folder):
    flags = {**BASE, "objective": name.removesuffix("_top_k")}
    if name == "dpo":
        stored = {"data_path": (str(folder / "pairs"),), "split": "1,0,0"}
        return flags | stored | {"reference_model": str(folder / "reference")}
    if name == "grpo":
        flags |= {"prompts": str(folder / "prompts.jsonl"), "global_batch_size": 8}
        flags |= {"reward": f"{folder / 'rewards.py'}:low", "grpo_group_size": 4}
        flags |= {"grpo_max_tokens": 6, "grpo_iterations": 2, "seq_length": 16}
        return flags | {"reference_model": str(folder / "reference")}
    if name == "own":
        own = f"{ROOT / 'examples/own_objective.py'}:FocalLoss"
        return flags | {"objective": own, "mock_data": True}
    flags |= {"mock_data": True, "distill_temperature": 2.0, "distill_weight": 0.7}
    flags |= {"distill_top_k": 5} if name.endswith("top_k") else {}
    return flags | {"reference_model": str(folder / "teacher")}


def measured(flags):
    """Return the losses, gradient norm and weights of two steps, on this world."""
    run = start(flags, dist.get_world_size() if dist.is_initialized() else 1)
    batches = train_batches(run)
    result = train_step(run, next(batches), 1e-2, 0.0)
    losses = torch.stack([*result.losses.values()])
    losses = all_reduce(all_reduce(losses, run.ctx.dp_cp), run.ctx.pp)
    train_step(run, next(batches), 1e-2, 0.0)
    return dict(zip(result.losses, losses, strict=True)), result.grad_norm, whole_weights(run)


def plain_model(flags, seed=None):
    """Build the same weights without a layout or gradient buffers."""
    plan = build_plan(compose(flags), 1)
    options = {"vocab_size": plan.vocab_size, "dtype": torch.float64}
    seed = seed or plan.config.run.seed
    return plan.family.build(plan.config.model, ParallelContext.single(), seed=seed, **options)


def plain_logits(model, ids):
    return model.logits(model(ids[None])[0])[:, 0, : model.vocab_size]


def plain_dpo(model, batches):
    """Compute the loss and rewards of a step pair by pair, each conversation alone."""
    reference = plain_model({**BASE, "mock_data": True}, seed=5)
    margins, rewards = [], []
    for batch in batches:
        for row in range(len(batch[TOKENS])):
            pair = []
            for begin, end in pairwise(batch.documents.rows[row].borders):
                part = slice(begin, end)
                mask = batch[LOSS_MASK][row, part] > 0
                if not mask.any():
                    continue
                labels = batch[LABELS][row, part]
                picked = [
                    F.log_softmax(plain_logits(each, batch[TOKENS][row, part]), -1)
                    .gather(-1, labels[:, None])[mask]
                    .sum()
                    for each in (model, reference)
                ]
                pair.append(0.1 * (picked[0] - picked[1].detach()))
            for chosen, rejected in zip(pair[::2], pair[1::2], strict=True):
                margins.append(chosen - rejected)
                rewards.append((chosen.item(), rejected.item()))
    margins = torch.stack(margins)
    loss = -F.logsigmoid(margins).mean()
    chosen, rejected = torch.tensor(rewards, dtype=torch.float64).mean(0)
    return {
        dpo.DPO.loss_name: loss,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).double().mean(),
    }


def plain_grpo(model, batches):
    """Compute the loss text by text: before the first update the ratio is 1."""
    reference = plain_model({**BASE, "mock_data": True}, seed=5)
    losses, kls, rewards = [], [], []
    for batch in batches:
        for row in range(len(batch[TOKENS])):
            end = int(batch[LOSS_MASK][row].nonzero().max()) + 1
            mask = batch[LOSS_MASK][row, :end] > 0
            ids, labels = batch[TOKENS][row, :end], batch[LABELS][row, :end]
            logs, reference_logs = (
                F.log_softmax(plain_logits(each, ids), -1).gather(-1, labels[:, None])[mask, 0]
                for each in (model, reference)
            )
            change = reference_logs.detach() - logs
            kl = change.exp() - change - 1
            ratio = (logs - logs.detach()).exp()
            advantage = batch[ADVANTAGES][row, :end][mask]
            losses.append((-ratio * advantage + 0.04 * kl).mean())
            kls.append(kl.mean())
            rewards.append(batch[REWARDS][row, :end][mask].double().mean())
    assert len(set(map(float, rewards))) > 2
    names = grpo.GRPO.loss_name, "kl", "reward"
    return dict(
        zip(names, (torch.stack(x).mean() for x in (losses, kls, rewards)), strict=True)
    )


def plain_focal(model, batches):
    """Compute the loss of examples/own_objective.py on whole logits."""
    losses = []
    for batch in batches:
        for ids, labels in zip(batch[TOKENS], batch[LABELS], strict=True):
            losses.append(F.cross_entropy(plain_logits(model, ids), labels, reduction="none"))
    loss = torch.cat(losses)
    return {"focal loss": ((1 - (-loss).exp()) ** 2 * loss).mean(), LM_LOSS: loss.mean()}


def plain_distillation(model, batches, top_k):
    """Compute the divergence by torch's kl_div, and the cross-entropy of the data."""
    teacher = plain_model({**TEACHER, "mock_data": True})
    divergences, losses = [], []
    for batch in batches:
        for row in range(len(batch[TOKENS])):
            ids, labels = batch[TOKENS][row], batch[LABELS][row]
            logits = plain_logits(model, ids)
            q = F.log_softmax(logits / 2.0, -1)
            p = F.log_softmax(plain_logits(teacher, ids).detach() / 2.0, -1)
            if top_k:
                p, best = p.topk(top_k, -1)
                q = q.gather(-1, best)
                p, q = (torch.cat([x, torch.log1p(-x.exp().sum(-1, True))], -1) for x in (p, q))
            divergences.append(4.0 * F.kl_div(q, p, reduction="none", log_target=True).sum(-1))
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
    divergence, loss = torch.cat(divergences).mean(), torch.cat(losses).mean()
    return {
        "sum": 0.7 * divergence + 0.3 * loss,
        "distillation loss": divergence,
        LM_LOSS: loss,
    }


@pytest.mark.parametrize("name", [*OBJECTIVES, "own"])
def test_losses_and_gradients_are_those_of_the_formula(name, folder):
    flags = objective_flags(name, folder)
    run, model = start(flags), plain_model(flags)
    batches = next(train_batches(run))
    losses = backward(run, batches)
    if name.startswith("distill"):
        expected = plain_distillation(model, batches, flags.get("distill_top_k", 0))
    else:
        plain = {"dpo": plain_dpo, "grpo": plain_grpo, "own": plain_focal}
        expected = plain[name](model, batches)
    root = next(iter(expected.values()))
    expected.pop("sum", None)
    for key, value in expected.items():
        torch.testing.assert_close(losses.named[key], value.detach())
    root.backward()
    found = gather_logical(run.data_parallel.grad_shards(), run.ctx.world)
    gradients = [(each, each.parameter.grad) for each in named_parameters(model)]
    expected = {name: s.pieces[0].data for name, s in shards_of(gradients).items()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.view_as(found[key]), msg=key)


def test_pretraining_and_fine_tuning_have_the_smoothed_loss_and_the_z_loss():
    flags = {**BASE, "mock_data": True, "label_smoothing": 0.2, "z_loss_coeff": 0.3}
    run, model = start(flags), plain_model(flags)
    batches = next(train_batches(run))
    expected = []
    for batch in batches:
        scores, labels = plain_logits(model, batch[TOKENS][0]), batch[LABELS][0]
        smoothed = F.cross_entropy(scores, labels, label_smoothing=0.2)
        expected.append(smoothed + 0.3 * scores.logsumexp(-1).square().mean())
    tuned = SupervisedFineTuning(run.plan.config, run.ctx, run.chunks[-1])
    for each in (run, replace(run, objective=tuned)):
        found = backward(each, batches).named[LM_LOSS]
        torch.testing.assert_close(found, torch.stack(expected).mean().detach())


QUICK = {("dpo", "cp2"), ("distill", "tp2"), ("distill_top_k", "pp2"), ("grpo", "dp2")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.parity_long)
    for case in product([*OBJECTIVES, "own"], LAYOUTS)
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_an_objective_trains_under_a_layout_as_on_one_rank(name, layout, folder):
    flags = objective_flags(name, folder)
    losses, norm, weights = measured(flags)
    for found in run_ranks(measured, 2, flags | LAYOUTS[layout]):
        assert found[0].keys() == losses.keys()
        torch.testing.assert_close(found[0], losses)
        torch.testing.assert_close(found[1], norm)
        torch.testing.assert_close(found[2], weights)


def stored(flags, cache):
    """Write what the frozen model computes, on this world."""
    write_entries(start(flags, dist.get_world_size()), cache)


@pytest.mark.parametrize(
    "name", ["dpo", pytest.param("distill_top_k", marks=pytest.mark.parity_long)]
)
def test_stored_results_of_the_frozen_model_train_as_the_model_does(name, folder, tmp_path):
    flags = objective_flags(name, folder)
    losses, norm, _ = measured(flags)
    run_ranks(stored, 2, flags | LAYOUTS["cp2"], tmp_path / "cache")
    cached = flags | {"reference_cache": str(tmp_path / "cache"), "reference_model": ""}
    assert start(cached).frozen is None
    found = measured(cached)
    # Stored in float32; Adam's first steps divide a gradient by its size, so not the weights.
    torch.testing.assert_close(found[:2], (losses, norm), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="seed: 1234 in the folder, 5 here"):
        start(cached | {"seed": 5})


def test_with_adapters_the_reference_is_the_model_without_them(folder, tmp_path):
    flags = objective_flags("dpo", folder) | {"reference_model": "", "peft": "lora"}
    flags |= {"pretrained_checkpoint": str(folder / "reference"), "lora_dim": 4}
    run = load_run(start(flags | {"save": str(tmp_path)}))
    saved = save_run(run)
    assert run.frozen.chunks is run.chunks
    batches = train_batches(run)
    for _ in range(2):
        batch = next(batches)
        train_step(run, batch, 1e-2, 0.0)
    named = objective_flags("dpo", folder)
    apart = next(train_batches(start(named)))
    again = next(train_batches(run))
    assert len(apart) == len(again)

    def largest_margin():
        for with_own, without in zip(apart, run.annotate(apart), strict=True):
            torch.testing.assert_close(
                with_own[dpo.REFERENCE_LOG_PROBS], without[dpo.REFERENCE_LOG_PROBS]
            )
        with torch.no_grad():
            output, _ = run.chunks[0].run_stage(apart[0], None)
            return (
                run.objective.unreduced_losses(output, apart[0])["rewards/margins"].abs().max()
            )

    assert largest_margin() > 1e-6  # the adapters themselves have learnt
    rewind(run, saved)  # as --spike-policy rewind does
    assert largest_margin() < 1e-12


def test_rewards_that_are_no_numbers_are_left_out_with_their_prompts(folder):
    records = ({"prompt": "ab"}, {"prompt": "abc", "wish": math.nan}, {"prompt": "a"})
    file = folder / "spoiled.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    flags = objective_flags("grpo", folder) | {"prompts": str(file), "global_batch_size": 4}
    flags |= {"grpo_iterations": 1, "reference_model": "", "grpo_kl_beta": 0.0}
    states = []
    for options in ({"spike_policy": "skip"}, {"iterations_to_skip": (1,)}):
        run = start(flags | options)
        with Reporter(Console(quiet=True), with_lines=False) as reporter:
            train(run, reporter)
        assert run.progress.consumed_train_samples == 12
        assert run.progress.schedule_samples == 8
        states.append(fingerprint(run, with_streams=True))
        assert next(train_batches(run))[0][TOKENS][0, :2].tolist() == [*b"ab"]
    assert states[0] == states[1]


def test_in_the_batch_invariant_mode_the_engine_has_the_trainers_bits(folder, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    mode = {"batch_invariant_mode": True, "ffn_hidden_size": 64}
    save_run(start({**BASE, **mode, "mock_data": True, "save": str(tmp_path)}))
    run = start(objective_flags("grpo", folder) | mode | {"reference_model": str(tmp_path)})
    engine_log_probs = []
    texts = EngineTexts(run)

    def write(prompts, seed):
        texts.sync.push()
        sampling = SamplingConfig(num_tokens=6)
        numbers = [texts.engine.add(p, sampling, seed=seed + i) for i, p in enumerate(prompts)]
        results = dict(event for event in texts.engine.run() if isinstance(event, tuple))
        for number in numbers:
            assert results[number].weights_versions == (texts.sync.version,)
            engine_log_probs.extend(results[number].log_probs)
        return [list(results[number].ids) for number in numbers]

    steps = rollout_steps(run, write)
    for step in range(3):
        engine_log_probs = [] if step == 2 else engine_log_probs  # of the second round
        batches = next(steps)
        old = torch.cat([batch[OLD_LOG_PROBS][batch[LOSS_MASK] > 0] for batch in batches])
        assert old.tolist() == engine_log_probs
        losses = train_step(run, batches, 1e-2, 0.0).losses
        assert losses["clip_ratio"] == 0 or step == 1
        assert losses["kl"] == 0 or step > 0
    torch.set_num_threads(threads)


def test_the_commands_store_and_read_what_a_reference_computes(folder, tmp_path):
    words = ["--tokenizer-type", "ByteTokenizer", "--data-path", str(folder / "pairs")]
    words += [
        "--load",
        str(folder / "reference"),
        "--finetune",
        "--split",
        "1,0,0",
        "--lr",
        "1e-3",
    ]
    words += ["--seq-length", "48", "--train-iters", "2", "--num-workers", "0"]
    cache = ["--objective", "dpo", "--reference-cache", str(tmp_path / "stored")]
    model = ["--reference-model", str(folder / "reference")]
    done = run_command("mcore_train", "reference", *cache, *model, *words)
    assert done.returncode == 0, done.stderr
    done = run_command("mcore_train", "gpt", *cache, *words)
    assert done.returncode == 0, done.stderr
    first = next(line for line in done.stdout.splitlines() if "dpo loss" in line)
    assert f"dpo loss: {math.log(2):.6E}" in first  # the run begins from the reference


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"objective": "ppo"}, "--objective ppo: unknown objective; use pretrain, sft, dpo"),
        ({"objective": "distill"}, "needs a teacher: give its folder by --reference-model"),
        ({"objective": "no_such:Thing"}, "--objective no_such:Thing cannot be imported"),
        (
            {"objective": f"{ROOT}/examples/own_objective.py:GAMMA"},
            "is not a class derived",
        ),
        ({"objective": "grpo", "mock_data": False}, "--prompts FILE.jsonl and --reward"),
        ({"objective": "dpo", "mtp_num_layers": 1}, "leave --mtp-num-layers out"),
        ({"reference_model": "x"}, "has no effect without --objective dpo, grpo or distill"),
        ({"objective": "dpo", "z_loss_coeff": 1e-4}, "which --objective dpo does not train"),
        (
            {"objective": "own:Loss", "label_smoothing": 0.1},
            "--objective own:Loss does not train",
        ),
        (
            {"objective": "dpo", "batch_invariant_mode": True},
            "does not cover packed documents: leave",
        ),
        (
            {**GRPO_SAMPLES, "rampup_batch_size": (4, 4, 8)},
            "one number of texts for all steps",
        ),
        ({**GRPO_FLAGS, "spike_policy": "rewind"}, "use skip or stop with --objective grpo"),
    ],
)
def test_what_an_objective_cannot_do_is_refused_before_ranks_meet(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        start({**BASE, "mock_data": flags.get("objective") != "dpo", **flags})


def test_a_frozen_model_that_does_not_fit_is_refused_with_every_reason(folder, tmp_path):
    other = {**TEACHER, "tokenizer_type": "NullTokenizer", "vocab_size": 30, "mock_data": True}
    save_run(start({**other, "num_layers": 3, "save": str(tmp_path / "other")}))
    flags = {**BASE, "objective": "distill", "mock_data": True}
    flags |= {"reference_model": str(tmp_path / "other"), "pipeline_model_parallel_size": 2}
    plan = build_plan(compose(flags), 2)
    with pytest.raises(ValueError, match="a vocabulary of 31 tokens") as found:
        check_reference(plan)
    assert "3" in str(found.value).splitlines()[1]
