"""What a refactoring must not change: the certificates of small runs in twelve layouts.

``python tests/frozen/record.py`` from the repository root records them again into
``frozen.json``. Do that only in a commit whose purpose is to change these numbers. Losses and
saved bytes of runs are golden values: ``tests/functional_tests``.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from warm_ranks import run_ranks

from mcore_train.composition import FAMILY_COMMANDS, compose
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.layout_check.verification import verify_on_rank
from mcore_train.resolution import resolve

FILE = Path(__file__).with_name("frozen.json")

SIZES = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 101,
    "mock_data": True,
    "seq_length": 512,
    "train_iters": 10,
    "lr": 1e-3,
    "micro_batch_size": 2,
    "global_batch_size": 8,
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss"}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt tp2 dp2 sp zero1": (
        "gpt",
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "bf16": True,
        },
    ),
    "gpt tp2": ("gpt", 2, {"num_layers": 1, "tensor_model_parallel_size": 2}),
    "gpt pp2 vpp2 dropout": (
        "gpt",
        2,
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "hidden_dropout": 0.1,
        },
    ),
    "gpt pp2 zero bubble, mla, mtp": (
        "gpt",
        2,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zb-h1",
            "multi_latent_attention": True,
            "mtp_num_layers": 1,
            "bf16": True,
        },
    ),
    "gpt cp2 ring, groups": (
        "gpt",
        2,
        {"context_parallel_size": 2, "cp_comm_type": "p2p", "num_query_groups": 4},
    ),
    "gpt tp2 cp2 a2a": (
        "gpt",
        4,
        {
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 2,
            "cp_comm_type": "a2a",
            "sequence_parallel": True,
        },
    ),
    "gpt fsdp, recompute": (
        "gpt",
        2,
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "recompute_granularity": "full",
            "qk_clip": True,
            "bf16": True,
        },
    ),
    "gpt zero1, fp8 gathers": (
        "gpt",
        2,
        {
            "num_layers": 1,
            "use_distributed_optimizer": True,
            "bf16": True,
            "fp8_format": "hybrid",
            "fp8_param_gather": True,
        },
    ),
    "moe ep2 zero1": (
        "gpt",
        2,
        {
            **EXPERTS,
            "expert_model_parallel_size": 2,
            "moe_grouped_gemm": True,
            "moe_shared_expert_intermediate_size": 32,
            "use_distributed_optimizer": True,
            "bf16": True,
        },
    ),
    "mamba tp2 hybrid": (
        "mamba",
        2,
        {
            "hybrid_override_pattern": "M*M-",
            "position_embedding_type": "none",
            "mamba_num_groups": 2,
            "tensor_model_parallel_size": 2,
        },
    ),
    "bert tp2": ("bert", 2, {"num_layers": 2, "tensor_model_parallel_size": 2}),
    "t5 pp2": (
        "t5",
        2,
        {
            "num_layers": 1,
            "encoder_num_layers": 2,
            "decoder_num_layers": 2,
            "pipeline_model_parallel_size": 2,
        },
    ),
}
"""A family's command, ranks and options by a name."""


def certify(name: str) -> dict[str, Any]:
    """Verify one of ``LAYOUTS``; return the certificate without its numbers of seconds."""
    command, world_size, options = LAYOUTS[name]
    row = FAMILY_COMMANDS[command]
    plan = resolve(compose(SIZES | options, row.run), world_size, family=row.family)
    small = build_small_run(plan, 8)
    certificate = run_ranks(verify_on_rank, small.world_size, small, True)[0]
    lines = [(line.what, line.tensor, line.passed) for line in certificate.lines]
    return {
        "layout": certificate.layout,
        "dtype": certificate.dtype,
        "passed": certificate.passed,
        "lines": len(lines),
        "digest": hashlib.sha256(repr(lines).encode()).hexdigest()[:16],
        "errors": [line.error.hex() for line in certificate.lines],
    }


def main() -> None:
    """Record everything; the errors of certificates go into a file that the caller names."""
    certificates = {name: certify(name) for name in LAYOUTS}
    errors = {name: table.pop("errors") for name, table in certificates.items()}
    if sys.argv[1:]:
        table = {"certificates": certificates, "errors": errors}
        Path(sys.argv[1]).write_text(json.dumps(table, indent=1))
    else:
        FILE.write_text(json.dumps(certificates, indent=1) + "\n")


if __name__ == "__main__":
    main()
