"""Options that only some layouts can get wrong, each under such a layout, against one rank."""

from functools import cache

import pytest
from parity.any_layout import BIASED, INSTANCES, SINKHORN, all_failures, build_plan

from mcore_parallel.mesh import ParallelContext
from mcore_train.layout_check.rows import build_rows
from mcore_train.layout_check.trial import run_trial

TP2 = {"tensor_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SAVED_PIECES = {"recompute_granularity": "full", "distribute_saved_activations": True}
A2A = {"cp_comm_type": "a2a"}
SIX_HEADS = {"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 8}
# Buckets of one tensor, 128 elements or more: a border of two shards is at 64.
CUT_VECTORS = {"use_distributed_optimizer": True, "ddp_bucket_size": 1, "hidden_size": 80}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 8}
OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.4,
    "cpu_offloading": True,
    "cpu_offloading_num_layers": 1,
}
SPLIT = {"expert_model_parallel_size": 2}
FURTHER = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 0,
    "kv_channels": 0,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "rotary_interleaved": True,
    "rope_type": "yarn",
    "mscale_all_dim": 1.0,
}
CLIP = {"qk_clip": True, "qk_clip_threshold": 0.01, "qk_clip_alpha": 0.4}
MUP = {"use_mup": True, "mup_base_hidden_size": 8, "mup_base_head_dim": 4}
MUON = {"optimizer": "muon", "muon_nesterov": True, "muon_extra_scale_factor": 0.2}
SOAP = {"optimizer": "soap", "soap_precondition_frequency": 2}
RATES = {
    "decoupled_lr": 3e-2,
    "layer_lr_decay": 0.7,
    "parameter_groups": ("norm lr_factor=0.5 decay_factor=1 beta1=0.5", "*.fc2.* lr=4e-2"),
}
PACKED = {"reset_position_ids": True, "reset_attention_mask": True}
LORA = {"peft": "lora", "lora_dim": 3, "lora_alpha": 5.0}
DORA = LORA | {"peft": "dora"}
BOTH_TABLES = {"modules_to_save": ("embedding", "head")}
BOTH_TABLES |= {"untie_embeddings_and_output_weights": True}
SOME = {"lora_target_modules": ("q", "v", "attention.proj", "up"), "num_query_groups": 1}
ALL_EXPERTS = {"lora_target_modules": ("experts", "attention"), "num_experts": 4}
ALL_EXPERTS |= {"moe_ffn_hidden_size": 8, "moe_aux_loss_coeff": 0.05}
SEQUENCE = {"sequence_parallel": True}
CASES = {
    "head_norms_tp2": (2, TP2 | {"qk_layernorm": True}),
    "documents_pp2": (2, PP2 | {"reset_position_ids": True}),
    "documents_apart_pp2": (
        2,
        PP2 | {"reset_position_ids": True, "reset_attention_mask": True},
    ),
    "window_cp2": (2, CP2 | {"window_size": (5, 0)}),
    "tied_pp2_zero": (2, PP2 | {"use_distributed_optimizer": True}),
    "saved_pieces_tp2_cp2": (4, TP2 | CP2 | SAVED_PIECES),
    "further_tokens_cp2": (2, CP2 | FURTHER),
    "further_tokens_pp2_zero": (
        2,
        PP2
        | FURTHER
        | {"use_distributed_optimizer": True, "untie_embeddings_and_output_weights": True},
    ),
    "further_tokens_apart_vpp2": (
        2,
        PP2
        | FURTHER
        | {
            "num_virtual_stages_per_pipeline_rank": 2,
            "num_layers": 4,
            "pipeline_model_parallel_layout": "Ett|ttmm||L",
            "untie_embeddings_and_output_weights": True,
        },
    ),
    "further_tokens_apart_pp4_zero": (
        4,
        FURTHER
        | {
            "pipeline_model_parallel_size": 4,
            "num_layers": 4,
            "pipeline_model_parallel_layout": "Ett|tt|mm|L",
            "use_distributed_optimizer": True,
            "recompute_granularity": "full",
        },
    ),
    "latent_experts_further_tokens_tp2": (
        2,
        TP2 | {"sequence_parallel": True} | LATENT | EXPERTS | FURTHER,
    ),
    "sinkhorn_cp2": (2, CP2 | SINKHORN),
    "expert_bias_cp2": (2, CP2 | BIASED | {"moe_z_loss_coeff": 1e-2}),
    "six_heads_of_three_groups_a2a_cp2": (2, CP2 | A2A | SIX_HEADS),
    "window_and_ring_cp2": (2, CP2 | {"window_size": (5, 0), "window_attn_skip_freq": "2"}),
    "cut_vectors_dp2": (2, CUT_VECTORS),
    "offloaded_pp2_zero": (
        2,
        PP2 | OFFLOADED | {"num_layers": 4, "use_distributed_optimizer": True},
    ),
    "offloaded_experts_zero3_dp2": (2, EXPERTS | OFFLOADED | {"use_torch_fsdp2": True}),
    "mup_tp2_zero": (2, TP2 | MUP | {"use_distributed_optimizer": True}),
    "muon_qk_clip_tp2": (2, TP2 | MUON | CLIP | {"muon_tp_mode": "duplicated"}),
    "muon_experts_ep2_zero_offloaded": (
        2,
        EXPERTS | SPLIT | MUON | OFFLOADED | {"use_distributed_optimizer": True},
    ),
    "normuon_joined_pp2_instances_dp2": (
        4,
        PP2
        | MUON
        | INSTANCES
        | {"muon_moment2_method": "normuon", "muon_split_qkv": False, "num_layers": 4},
    ),
    "adamuon_cp2_zero": (
        2,
        CP2 | MUON | {"muon_moment2_method": "adamuon", "use_distributed_optimizer": True},
    ),
    "soap_tp2_sequence_zero": (
        2,
        TP2 | SOAP | {"sequence_parallel": True, "use_distributed_optimizer": True},
    ),
    "soap_latent_zero3_dp2": (2, SOAP | LATENT | {"use_torch_fsdp2": True}),
    "lion_pp2_zero": (2, PP2 | {"optimizer": "lion", "use_distributed_optimizer": True}),
    "rows_in_pieces_cp2": (2, CP2 | PACKED | {"seq_length_schedule": "0:6 16:16"}),
    "rates_of_groups_pp2_zero": (2, PP2 | RATES | {"use_distributed_optimizer": True}),
    "rates_of_groups_muon_tp2": (2, TP2 | MUON | RATES | MUP),
    "qk_clip_tp2_documents": (2, TP2 | CLIP | {"num_query_groups": 1} | PACKED),
    "qk_clip_cp2_zero": (
        2,
        CP2 | CLIP | {"add_qkv_bias": True, "use_distributed_optimizer": True},
    ),
    "qk_clip_latent_zero3_dp2": (2, CLIP | LATENT | {"use_torch_fsdp2": True}),
    "lora_tp2": (2, LORA | TP2 | SOME | {"use_distributed_optimizer": True}),
    "dora_sequence_tp2": (2, DORA | TP2 | SEQUENCE | {"add_bias_linear": True}),
    "dora_tp2": (2, DORA | TP2 | SOME | {"recompute_granularity": "full"}),
    "lora_latent_sequence_tp2": (2, LORA | TP2 | SEQUENCE | LATENT),
    "lora_experts_tp2": (2, LORA | TP2 | ALL_EXPERTS),
    "lora_experts_ep2": (2, LORA | ALL_EXPERTS | SPLIT | {"use_distributed_optimizer": True}),
    "lora_pp2": (2, LORA | PP2 | {"pipeline_schedule": "zb-h1"}),
    "lora_tables_tied_pp2": (2, LORA | PP2 | {"modules_to_save": ("embedding",)}),
    "lora_tables_pp2": (2, LORA | PP2 | BOTH_TABLES),
    "lora_tables_sequence_tp2": (2, LORA | TP2 | SEQUENCE | BOTH_TABLES),
    "lora_tables_zero_dp2": (2, LORA | BOTH_TABLES | {"use_distributed_optimizer": True}),
    "dora_cp2": (2, DORA | CP2 | {"overlap_grad_reduce": True}),
    "experts_instances_dp4": (4, EXPERTS | INSTANCES),
    "experts_hybrid_zero3_dp4": (
        4,
        EXPERTS | {"use_torch_fsdp2": True, "num_distributed_optimizer_instances": 2},
    ),
    "split_experts_instances_dp4": (4, EXPERTS | SPLIT | INSTANCES),
}


LONG = {
    "window_and_ring_cp2",
    "further_tokens_pp2_zero",
    "further_tokens_apart_pp4_zero",
    "offloaded_experts_zero3_dp2",
    "mup_tp2_zero",
    "muon_qk_clip_tp2",
    "muon_experts_ep2_zero_offloaded",
    "normuon_joined_pp2_instances_dp2",
    "adamuon_cp2_zero",
    "soap_latent_zero3_dp2",
    "lion_pp2_zero",
    "qk_clip_latent_zero3_dp2",
    "dora_sequence_tp2",
    "lora_latent_sequence_tp2",
    *("lora_tables_pp2", "lora_tables_sequence_tp2", "lora_tables_zero_dp2"),
    "lora_experts_tp2",
    "lora_pp2",
    "dora_cp2",
    "experts_hybrid_zero3_dp4",
}
"""Rows whose options others have, under a like layout: in the long suite."""


@cache
def failures(world_size, is_long):
    """What is off in all cases of one world size, by name."""
    chosen = {name: case for name, case in CASES.items() if (name in LONG) == is_long}
    cases = {name: draw for name, (ranks, draw) in chosen.items() if ranks == world_size}
    sizes = {"micro_batch_size": 1, "global_batch_size": max(2, world_size)}
    draws = [{"num_layers": 2} | draw | sizes for draw in cases.values()]
    return dict(zip(cases, all_failures(draws, world_size), strict=True))


def marked(name):
    return pytest.param(name, marks=pytest.mark.parity_long) if name in LONG else name


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_an_option_under_a_layout_computes_what_one_rank_computes(name):
    world_size, _ = CASES[name]
    assert failures(world_size, name in LONG)[name] == []


def test_noise_of_routers_continues_where_a_run_stopped(tmp_path):
    noisy = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_input_jitter_eps": 0.1}
    plan = build_plan(noisy | {"micro_batch_size": 1, "global_batch_size": 2}, 1)
    single = ParallelContext.single()
    trial = run_trial(plan, single, build_rows(plan), folder=tmp_path, saved_step=1)
    quiet = build_plan(noisy | {"moe_input_jitter_eps": 0.0, "global_batch_size": 2}, 1)
    assert trial.resumed == trial.final
    assert trial.losses != run_trial(quiet, single, build_rows(quiet)).losses
