"""Runs with adapters: a base that stays where it is, resumed, generated with and merged."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.conversion.conversion import convert, mcore_to_hf
from mcore_ckpt.conversion.peft_export import export_adapters
from mcore_ckpt.save_load.loading import describe_checkpoint
from mcore_ckpt.storage.paths import resolve_folder
from mcore_infer.loading import load_model
from mcore_models.peft.attaching import adapted_linears
from mcore_models.peft.lora import MAGNITUDE_NAME
from mcore_models.peft.quantized_base import QuantizedMatrix
from mcore_moe.experts.experts import Experts
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.batches.datasets import Datasets
from mcore_train.checkpoints.checkpointing import Checkpoints
from mcore_train.checkpoints.origin import checkpoint_fields
from mcore_train.checkpoints.resuming import build_run, load_run, save_run
from mcore_train.composition import compose
from mcore_train.layout_check.rows import Rows
from mcore_train.layout_check.trial import fingerprint, whole_weights
from mcore_train.loop import train
from mcore_train.options.parsing import parse
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import ConflictError, resolve

MODEL = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "ffn_hidden_size": 40,
    "vocab_size": 43,
    "make_vocab_size_divisible_by": 8,
}
TRAINING = {
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 4,
    "lr": 1e-2,
    "mock_data": True,
    "num_workers": 0,
}
DORA = {
    "peft": "dora",
    "lora_dim": 3,
    "lora_target_modules": ("q_proj", "v", "mlp", "attention.proj"),
}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16}
LORA = {"peft": "lora", "lora_dim": 3, "lora_target_modules": ("experts", "attention")}
ROWS = Rows(seq_length=8, vocab_size=43, global_batch_size=4, num_steps=16)


def build(world_size=1, **flags):
    plan = resolve(compose({**MODEL, **TRAINING, **flags}), world_size)
    ctx = ParallelContext.build(plan.config.parallelism)
    return assemble(plan, ctx, datasets=Datasets(train=ROWS))


def trained(**flags):
    """Load what the flags name, train to the end, save."""
    run = build(**flags)
    run = load_run(run)
    train(run, Reporter(None))
    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base of ours and as Hugging Face has it, and a run of adapters beside the latter."""
    folder = tmp_path_factory.mktemp("adapters")
    base = build(save=str(folder / "base"))
    save_run(base)
    mcore_to_hf(folder / "base", folder / "hf")
    trained(load=str(folder / "hf"), finetune=True, save=str(folder / "run"), **DORA)
    return folder


def test_a_run_saves_its_adapters_and_says_where_their_base_is(folders):
    index = describe_checkpoint(resolve_folder(folders / "run"))
    weights = [name for name in index.tensors if name.startswith("model.")]
    assert weights
    assert all(".adapter." in name for name in index.tensors if not name.startswith("rng."))
    assert index.extra["peft"]["base"] == str(folders / "hf")


def test_a_resumed_run_ends_as_one_that_never_stopped(folders):
    whole = build(load=str(folders / "run"), **DORA)
    whole = load_run(whole)
    assert whole.origin.checkpoint
    assert whole.progress.iteration == 4
    halves = {"load": str(folders / "hf"), "finetune": True, "train_iters": 2, **DORA}
    trained(**halves, save=str(folders / "halves"), lr_decay_iters=4)
    again = trained(load=str(folders / "halves"), save=str(folders / "halves"), **DORA)
    assert again.origin.adapter_base == str(folders / "hf")
    assert fingerprint(again) == fingerprint(whole)


def test_only_adapters_are_drawn_beside_a_base_that_is_loaded(folders, monkeypatch):
    drawn, normal = [], torch.Tensor.normal_

    def note_and_draw(x, *args, **options):
        drawn.append(x.numel())
        return normal(x, *args, **options)

    start = {"load": str(folders / "hf"), "finetune": True}
    plan = resolve(compose({**MODEL, **TRAINING, **start, **DORA}), 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", note_and_draw)
        weights = whole_weights(build_run(plan, ParallelContext.single()))
    adapters = [t.numel() for name, t in weights.items() if name.endswith("lora_A.weight")]
    assert sum(drawn) == sum(adapters) > 0
    base = load_run(build(**start))
    assert all(torch.equal(weights[name], each) for name, each in whole_weights(base).items())


def test_a_command_line_takes_adapters_and_base_from_the_checkpoint(folders):
    found = checkpoint_fields(str(folders / "run"))
    assert found["lora_dim"] == 3
    config = parse(["--load", str(folders / "run"), "--lora-rank", "3"])
    assert config.peft == replace(compose(MODEL | DORA).peft)
    assert config.loading.pretrained_checkpoint == str(folders / "hf")
    base = parse(["--pretrained-checkpoint", str(folders / "hf"), "--peft", "lora"])
    assert base.model.hidden_size == 24


@pytest.mark.parametrize("bits", [8, 4])
def test_a_base_in_few_bits_trains_nearly_the_same_adapters(folders, bits):
    """8 bits change what adapters learn a little, 4 bits more; the base stays where it is."""
    whole = build(load=str(folders / "run"), **DORA)
    whole = load_run(whole)
    begin = {"load": str(folders / "hf"), "finetune": True, "peft_base_bits": bits, **DORA}
    run = trained(**begin, save=str(folders / f"run_{bits}"))
    # Resumed with the other number of bits, and ended at once: adapters come back.
    again = trained(load=str(folders / f"run_{bits}"), peft_base_bits=12 - bits, **DORA)
    for found in (run, again):
        assert 1e-7 < distance(found, whole) < {8: 0.02, 4: 0.2}[bits]


def round_base(run, bits):
    """Round the weights of linears with adapters and of experts, which keep their own width."""
    weights = [linear.weight for linear, _ in adapted_linears(run.chunks[0])]
    for module in run.chunks[0].modules():
        if isinstance(module, Experts):
            weights += [module.fc1_weight, module.fc2_weight]
    for weight in weights:
        rounded = QuantizedMatrix(weight.detach().flatten(0, -2), bits).widened()
        weight.data.copy_(rounded.view_as(weight))


def distance(run, other):
    """Return how far the adapters of two runs are from each other, as a share of their size."""
    here, there = (
        torch.cat(
            [p.detach().flatten() for p in each.chunks[0].parameters() if p.requires_grad]
        )
        for each in (run, other)
    )
    return float((here - there).norm() / there.norm())


def tokens():
    return torch.arange(24).view(2, 12) % 43


def logits(model):
    with torch.no_grad():
        return model.logits(model(tokens())[0])[..., :43]


def test_adapters_generate_as_the_model_that_they_are_merged_into(folders):
    single = ParallelContext.single()
    beside = load_model(folders / "run", single)
    convert("mcore", folders / "run", "hf", folders / "merged")
    merged = load_model(folders / "merged", single)
    base = load_model(folders / "hf", single)
    torch.testing.assert_close(logits(beside.model), logits(merged.model))
    assert (logits(beside.model) - logits(base.model)).abs().max() > 1e-3
    config = json.loads((folders / "merged" / "config.json").read_text())
    assert config["model_type"] == "llama"


@pytest.mark.parametrize("is_untied", [False, True])
def test_tables_trained_whole_beside_adapters_are_those_of_peft(tmp_path, is_untied):
    import peft  # only here, for it loads half of transformers
    import transformers

    shape = {"untie_embeddings_and_output_weights": is_untied}
    base = build(save=str(tmp_path / "base"), **shape)
    save_run(base)
    mcore_to_hf(tmp_path / "base", tmp_path / "hf")
    flags = {"peft": "lora", "lora_dim": 3, "lora_target_modules": ("q", "mlp"), **shape}
    flags["modules_to_save"] = ("embed_tokens", "lm_head") if is_untied else ("embedding",)
    begin = {"load": str(tmp_path / "hf"), "finetune": True, "lr_decay_iters": 4, **flags}
    whole = trained(**begin, save=str(tmp_path / "run"))
    # The checkpoint holds adapters and tables, which the run continues.
    trained(**begin, train_iters=2, save=str(tmp_path / "halves"))
    halves = trained(load=str(tmp_path / "halves"), save=str(tmp_path / "halves"), **flags)
    assert fingerprint(halves) == fingerprint(whole)
    names = describe_checkpoint(resolve_folder(tmp_path / "run")).tensors
    tables = {name for name in names if name.startswith("model.") and ".adapter." not in name}
    wanted = {"model.embedding.weight"} | ({"model.head.weight"} if is_untied else set())
    assert tables == wanted
    before, after = whole_weights(base), whole_weights(whole)
    changed = {n for n, t in before.items() if not torch.equal(t, after[n])}
    assert changed == {name.removeprefix("model.") for name in wanted}
    # Ours, ours merged, PEFT's, and PEFT's folder read by us compute the same.
    export_adapters(tmp_path / "run", tmp_path / "peft")
    convert("mcore", tmp_path / "run", "hf", tmp_path / "merged")
    found = checkpoint_fields(str(tmp_path / "peft"))
    assert (found["modules_to_save"] == ["embedding", "head"]) is is_untied
    assert found["pretrained_checkpoint"] == str(tmp_path / "hf")
    single = ParallelContext.single()
    own = logits(load_model(tmp_path / "run", single).model)
    for folder in ("merged", "peft"):
        torch.testing.assert_close(logits(load_model(tmp_path / folder, single).model), own)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a name that the library reads
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens()).logits.transpose(0, 1), own)


def with_experts_on_ranks(folder):
    """Train adapters of experts under a layout; load them under another."""
    common = {"base": f"{folder}/dense", **EXPERTS}
    layouts = (
        {"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    )
    first, second = layouts
    base = build(2, save=common["base"], **EXPERTS, **second)
    save_run(base)
    base.ctx.destroy()
    run = build(2, load=common["base"], save=f"{folder}/run", **EXPERTS, **LORA, **first)
    run = load_run(run)
    train(run, Reporter(None))
    with Checkpoints(run, Reporter(None)) as checkpoints:
        checkpoints.finish()
    weights = whole_weights(run)
    run.ctx.destroy()
    again = build(2, load=f"{folder}/run", **EXPERTS, **LORA, **second)
    again = load_run(again)
    assert again.origin.checkpoint
    assert again.progress.iteration == 4
    loaded = whole_weights(again)
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    again.ctx.destroy()
    for layout in ({"use_distributed_optimizer": True}, second):
        runs = []
        for bits in (0, 8):
            beside = {**EXPERTS, **LORA, **layout}
            runs.append(build(2, load=common["base"], peft_base_bits=bits, **beside))
            runs[-1] = load_run(runs[-1])
            if not bits:
                round_base(runs[-1], 8)
            train(runs[-1], Reporter(None))
        assert distance(*runs) == 0
        for run in runs:
            run.ctx.destroy()


def test_adapters_of_experts_load_under_another_layout_and_merge(tmp_path):
    run_ranks(with_experts_on_ranks, 2, str(tmp_path))
    single = ParallelContext.single()
    convert("mcore", tmp_path / "run", "mcore", tmp_path / "merged")
    beside, merged = (
        load_model(tmp_path / "run", single),
        load_model(tmp_path / "merged", single),
    )
    torch.testing.assert_close(logits(beside.model), logits(merged.model))


SHARDED = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LATENT = {"multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 6, "v_head_dim": 6}
LATENT |= {"qk_pos_emb_head_dim": 4, "num_query_groups": 0, "kv_channels": 0}


def begun_beside_a_base(base, flags):
    """Load a base beside DoRA under each way of sharding, and train two steps."""
    ends = []
    for strategy in SHARDED:
        world = {"data_parallel_sharding_strategy": strategy, "train_iters": 2}
        run = build(2, load=base, finetune=True, **world, **flags)
        run = load_run(run)
        begun = whole_weights(run)
        train(run, Reporter(None))
        ends.append((begun, whole_weights(run)))
        run.ctx.destroy()
    return ends


@pytest.mark.parametrize(
    "model",
    [pytest.param({"bf16": True}, marks=pytest.mark.parity_long), LATENT],
    ids=["bf16", "latent attention"],
)
def test_dora_begins_beside_a_loaded_base_however_data_ranks_share_it(tmp_path, model):
    base = build(save=str(tmp_path), **model)
    save_run(base)
    weights = base.data_parallel.weight_shards()
    flags = {**DORA, "lora_target_modules": ("all-linear",), **model}
    (first, trained_first), *others = run_ranks(begun_beside_a_base, 2, str(tmp_path), flags)[0]
    magnitudes = [name for name in first if name.endswith(MAGNITUDE_NAME)]
    assert magnitudes
    for name in magnitudes:
        matrix = name.replace("adapter.", "").replace(MAGNITUDE_NAME, "weight")
        lengths = weights[matrix].pieces[0].data.float().norm(dim=1)
        torch.testing.assert_close(first[name], lengths.to(first[name].dtype))
    for begun, after in others:
        assert all(torch.equal(begun[name], first[name]) for name in first)
        if "bf16" not in model:  # there steps of Adam are signs, which rounding flips
            torch.testing.assert_close(after, trained_first)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_dim": 4}, "--lora-dim 4 has no effect without --peft"),
        (
            {**DORA, "lora_target_modules": ("qq",)},
            "--lora-target-modules qq matches no linear",
        ),
        ({**LORA, **EXPERTS, "peft": "dora"}, "--peft dora has no routed experts"),
        ({**DORA, "modules_to_save": ("lm_head",)}, "--modules-to-save lm_head: this model's"),
        (
            {**DORA, "modules_to_save": ("embedding",), "objective": "dpo"}
            | {"mock_data": False, "data_path": ("pairs",)},
            "give the base by --reference-model",
        ),
        (
            {**DORA, "save": "x", "save_hf": True},
            "which writes whole models: convert a",
        ),
        (
            {**DORA, "peft_base_bits": 8, "use_torch_fsdp2": True},
            "does not support fully sharded weights",
        ),
        (
            {
                **DORA,
                "lora_target_modules": ("blocks.0",),
                "pipeline_model_parallel_size": 2,
            },
            "no linear of pipeline stage 1",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused(flags, message):
    with pytest.raises(
        ValueError, match="--modules-to-save norm: use embedding, head, or both"
    ):
        compose({**MODEL, **TRAINING, **DORA, "modules_to_save": ("norm",)})
    config = compose({**MODEL, **TRAINING, **flags})
    world_size = config.parallelism.pipeline_model_parallel_size
    with pytest.raises(ConflictError, match=message.replace("*", r"\*")):
        resolve(config, world_size)


def test_other_adapters_than_the_checkpoints_and_lost_bases_are_refused(folders, tmp_path):
    with pytest.raises(ValueError, match=r"--lora-dim 3 in the checkpoint, 5 here"):
        load_run(build(load=str(folders / "run"), **{**DORA, "lora_dim": 5}))
    with pytest.raises(ValueError, match="holds an adapter: give --peft dora"):
        load_run(build(load=str(folders / "run")))
    with pytest.raises(ValueError, match="adapts as "):
        load_run(build(pretrained_checkpoint=str(folders / "run"), **DORA))
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_run(build(pretrained_checkpoint=str(tmp_path), **DORA))
    with pytest.raises(ValueError, match="--peft-base-bits 4 needs a base model in a folder"):
        load_run(build(peft_base_bits=4, **DORA))
