import io

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from warm_ranks import run_ranks

from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.loop import train
from mcore_train.reporting.layer_statistics import LayerStatistics, layer_of
from mcore_train.reporting.log import Reporter, read_metrics
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-2,
    "clip_grad": 0.0,
    "mock_data": True,
    "vocab_size": 48,
    "num_workers": 0,
    "waterfall_interval": 0,
    "layer_statistics_interval": 2,
    "make_vocab_size_divisible_by": 8,
}
EXPERTS = {"num_experts": 4, "moe_layer_freq": "[0,1]", "moe_ffn_hidden_size": 8}
LAYOUTS = [
    {},
    {"use_distributed_optimizer": True},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
]


def build(world_size=1, **changes):
    config = compose({**TINY, **EXPERTS, **changes})
    plan = resolve(config, world_size)
    return assemble(plan, ParallelContext.build(config.parallelism))


def statistics(run, path):
    console = Console(file=io.StringIO()) if run.ctx.global_rank == 0 else None
    with Reporter(console, metrics_file=path, with_lines=False) as reporter:
        train(run, reporter)
    if run.ctx.world.size > 1:
        dist.barrier()
    (row,) = (row for row in read_metrics(path) if row["kind"] == "layers")
    apart = ("kind", "attempt", "continues_from", "time")
    return {name: value for name, value in row.items() if name not in apart}


def test_statistics_are_those_of_the_model(tmp_path):
    run = build()
    seen, outputs = {}, []
    block = run.chunks[0].get_submodule("blocks.1")
    block.register_forward_hook(lambda *call: outputs.append(call[2]))

    def weights():
        return {n: p.detach().clone() for n, p in run.chunks[0].named_parameters()}

    step = run.optimizer.step

    def noting_step(*arguments):
        if run.optimizer.num_steps == 1:
            gradients = {n: p.grad_slot.main for n, p in run.chunks[0].named_parameters()}
            seen["gradients"] = {n: g.clone() for n, g in gradients.items()}
            seen["before"] = weights()
        step(*arguments)
        if run.optimizer.num_steps == 2:
            seen["after"] = weights()

    run.optimizer.step = noting_step
    found = statistics(run, tmp_path / "metrics.jsonl")
    assert found["iteration"] == 2
    layers = {layer_of(name) for name in seen["before"]}
    assert layers == {"layer_0", "layer_1", "rest"}
    for layer in layers:
        names = [name for name in seen["before"] if layer_of(name) == layer]

        def norm(tensors, names=names):
            return sum(tensors[n].double().square().sum() for n in names).sqrt().item()

        assert found[f"weight_norm/{layer}"] == pytest.approx(norm(seen["before"]), rel=1e-5)
        assert found[f"gradient_norm/{layer}"] == pytest.approx(
            norm(seen["gradients"]), rel=1e-5
        )
        update = {n: seen["after"][n] - seen["before"][n] for n in names}
        assert found[f"update_norm/{layer}"] == pytest.approx(norm(update), rel=1e-4)
        zeros = sum((seen["gradients"][n] == 0).sum().item() for n in names)
        sizes = sum(seen["gradients"][n].numel() for n in names)
        assert found[f"zero_gradient_share/{layer}"] == pytest.approx(zeros / sizes)
    x = torch.stack([output[0] for output in outputs[2:4]]).detach()  # of the second step
    assert found["activation_rms/layer_1"] == pytest.approx(x.square().mean().sqrt().item())
    assert found["zero_activation_share/layer_1"] == 0
    assert 0 < found["largest_attention_logit/layer_0"] <= found["largest_attention_logit"]
    assert all(
        layer.tracker is None for layer in run.chunks[0].modules() if hasattr(layer, "tracker")
    )


def test_statistics_are_equal_in_every_layout(tmp_path):
    oracle = statistics(build(), tmp_path / "one.jsonl")
    assert oracle["gradient_norm"] > 0
    for found in run_ranks(statistics_in_layouts, 2, tmp_path)[0]:
        assert set(found) == set(oracle)
        # Of a weight that tensor ranks share in unequal parts a mean share is counted.
        assert found == pytest.approx(oracle, rel=1e-3)


def statistics_in_layouts(folder):
    found = []
    for number, changes in enumerate(LAYOUTS):
        run = build(2, **changes)
        found.append(statistics(run, folder / f"{number}.jsonl"))
    return found


def test_layers_have_names():
    names = ["blocks.3.mlp.up.weight", "encoder.blocks.2.norm", "mtp.0.block.moe", "embedding"]
    assert [layer_of(name) for name in names] == ["layer_3", "encoder_2", "mtp_0", "rest"]


def test_a_step_without_an_update_is_no_measurement():
    run = build()
    measured = LayerStatistics(run)
    measured.before(2)
    hooks = [len(block._forward_hooks) for block in run.chunks[0].blocks.values()]
    measured.after(2)  # the scaled gradients overflowed: before_update was not called
    assert hooks == [1, 1]
    assert not any(block._forward_hooks for block in run.chunks[0].blocks.values())
    assert not measured.has_recorded
