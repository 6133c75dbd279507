import time

import pytest

from mcore_base.options import OptionsError, find_faults
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import compose, parts
from mcore_train.resolution import ConflictError, resolve

RUNS = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "vocab_size": 100,
}


def plan(world_size=1, tokenizer_vocab_size=0, **changes):
    return resolve(
        compose({**RUNS, **changes}), world_size, tokenizer_vocab_size=tokenizer_vocab_size
    )


def test_numbers_that_follow_from_config_and_world():
    found = plan(
        8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        micro_batch_size=2,
        global_batch_size=16,
    )
    assert found.data_parallel_size == 2
    assert found.num_microbatches == 4
    assert found.tokens_per_step == 16 * 32
    assert found.padded_vocab_size == 256
    assert [len(stage.layers) for stage in found.stages] == [2, 2]
    assert found.schedule.decay_samples == 160
    assert found.dtype == "float32"


def test_samples_instead_of_steps_are_rounded_down_to_whole_steps():
    assert plan(train_iters=0, train_samples=35, global_batch_size=8).train_iters == 4


def test_embedding_and_loss_may_have_stages_beyond_the_layers():
    layout = {"pipeline_model_parallel_layout": "E|t|t|t|t|L"}
    stages = plan(6, pipeline_model_parallel_size=6, **layout).stages
    assert [len(stage.layers) for stage in stages] == [0, 1, 1, 1, 1, 0]


def test_the_vocabulary_is_the_tokenizers_unless_flags_ask_for_more():
    assert plan(tokenizer_vocab_size=90, vocab_size=0).vocab_size == 90
    assert plan(tokenizer_vocab_size=90, vocab_size=120).vocab_size == 120


BESIDE = {
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "overlap_moe_expert_parallel_comm": True,
    "global_batch_size": 8,
}


@pytest.mark.parametrize(
    ("world_size", "changes", "told"),
    [
        (8, {"num_attention_heads": 12, "hidden_size": 96, "tensor_model_parallel_size": 8},
         "heads must divide evenly. Use 1, 2, 3, 4, 6 or 12"),
        (6, {"tensor_model_parallel_size": 4}, "does not divide the world of 6 ranks"),
        (1, {"sequence_parallel": True}, "--sequence-parallel has no effect"),
        (1, {"optimizer": "sgd", "adam_eps": 1e-6, "adam_beta1": 0.8},
         "--adam-beta1 0.8 and --adam-eps 1e-06 have no effect without --optimizer adam"),
        (1, {"sgd_momentum": 0.5}, "--sgd-momentum 0.5 has no effect without --optimizer sgd"),
        (1, {"moe_experts_dtype": "fp8", "moe_router_topk": 4, "fp8_format": "hybrid"},
         "-topk 4 and --moe-experts-dtype fp8 have no effect without --num-experts"),
        (1, {"kv_lora_rank": 64}, "no effect without --multi-latent-attention"),
        (1, {"hybrid_override_pattern": "*-*-", "mamba_state_dim": 64}, "without M in"),
        (2, {"num_distributed_optimizer_instances": 2},
         "--num-distributed-optimizer-instances 2 has no effect without"),
        (2, {"micro_batch_size": 2, "global_batch_size": 6}, "use 4 or 8"),
        (2, {"micro_batch_size": 4, "global_batch_size": 4}, "ranks = 8: use 8."),
        (1, {"max_position_embeddings": 16}, "--max-position-embeddings 16"),
        (2, {"context_parallel_size": 2, "seq_length": 30}, "--seq-length 30 cannot be split"),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 31},
         "--seq-length 31 cannot be split"),
        (3, {"pipeline_model_parallel_size": 3}, "--num-layers 4 cannot be split"),
        (5, {"pipeline_model_parallel_size": 5}, "--num-layers 4 cannot be split"),
        (2, {"expert_model_parallel_size": 2}, "has no effect without --num-experts"),
        (2, {"num_experts": 3, "expert_model_parallel_size": 2}, "--num-experts 3 cannot"),
        (1, {"num_experts": 4, "moe_layer_freq": "[1,0]"}, "--moe-layer-freq"),
        (1, {"lr": 0.0}, "Give --lr"),
        (1, {"lr": float("inf")}, "--lr inf is not finite"),
        (1, {"clip_grad": float("nan")}, "--clip-grad nan is not finite"),
        (1, {"train_iters": 0}, "--train-iters or --train-samples"),
        (1, {"mock_data": False}, "give --data-path"),
        (1, {"mock_data": False, "vocab_size": 0}, "Give --tokenizer-model"),
        (1, {"reset_attention_mask": True, "attention_backend": "flash4"},
         "flash4 exclude each other, which takes no packed documents: use auto"),
        (1, {"create_attention_mask_in_dataloader": True}, "training does not use"),
        (1, {"reset_attention_mask": True, "dataloader_inter_document_masking": True},
         "the other those of the stored documents: leave one out"),
        (2, {"context_parallel_size": 2, "cp_comm_type": "p2p", "window_size": (4, 0)},
         "--cp-comm-type p2p does not support windows (--window-size): use all_gather or a2a"),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1",
             "recompute_granularity": "full"}, "what --pipeline-schedule zb-h1"),
        (4, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1",
             "use_torch_fsdp2": True}, "use 1f1b or interleaved, or optim"),
        (2, {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "rowwise",
             "use_distributed_optimizer": True, "fp8_param_gather": True},
         "--fp8-param-gather needs --bf16"),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "dualpipev"},
         "needs 2 x --pipeline-model-parallel-size = 4 micro-batches or more"),
        (1, {"pipeline_schedule": "auto"}, "auto has no effect with"),
        (4, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "auto",
             "context_parallel_size": 2, "seq_length": 1}, "--seq-length 1 cannot be split"),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "auto",
             "pipeline_memory_cap": "h2000"}, "--pipeline-memory-cap h2000 is not known"),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "auto",
             "pipeline_memory_cap": "0.0001"}, "zb-v: takes 0.0 GiB"),
        (2, {"cuda_graph_impl": "full_iteration", "use_torch_fsdp2": True},
         "cannot record --data-parallel-sharding-strategy optim_grads_params"),
        (2, {"main_params_dtype": "bf16", "bf16": True, "use_torch_fsdp2": True},
         "add --main-grads-dtype bf16, with which"),
        (1, {"main_params_dtype": "bf16"}, "--main-params-dtype bf16 has no effect"),
        (1, {"main_grads_dtype": "bf16"}, "--main-grads-dtype bf16 has no effect"),
        (1, {"grad_reduce_in_bf16": True}, "--grad-reduce-in-bf16 has no effect"),
        (1, {"fp8_format": "hybrid", "first_last_layers_bf16": True, "num_layers": 2},
         "keep all 2 layers out of fp8"),
        (2, {"pipeline_model_parallel_size": 2, "cpu_offloading": True,
             "cpu_offloading_num_layers": 2}, "less than the 2 layers of the smallest"),
        (1, {"cpu_offloading": True, "cpu_offloading_num_layers": 1,
             "recompute_granularity": "full"}, "is kept: offload where copies hide"),
        (1, {"cuda_graph_impl": "full_iteration", "num_experts": 4},
         "can record experts only as grouped GEMMs: use --bf16"),
        (2, {"cuda_graph_impl": "full_iteration", "num_experts": 4,
             "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
         "or symmetric and --moe-expert-rows-limit 2"),
        (1, {"num_experts": 4, "moe_shared_expert_intermediate_size": 8,
             "moe_shared_expert_overlap": True}, "overlap has an effect only with"),
        (1, {"num_experts": 4, "moe_router_bias_update_rate": 0.1},
         "0.1 has no effect without --moe-router-enable-expert-bias"),
        (2, {"num_experts": 4, "moe_split_batch_overlap": True}, "batch-overlap has an effect"),
        (4, {"num_experts": 4, "expert_model_parallel_size": 4, "moe_expert_rows_limit": 2.0,
             "hierarchical_expert_parallel_size": 2}, "rows-limit requires a single step"),
        (1, {"num_experts": 4, "moe_experts_dtype": "fp8"}, "fp8 needs --fp8-format"),
        (1, {"num_experts": 4, "moe_wgrad_micro_batches": 2, "main_grads_dtype": "bf16"},
         "no main gradients in float32: leave"),
        (2, {"num_experts": 4, "moe_wgrad_micro_batches": 2, "global_batch_size": 2},
         "2 has no effect with one micro-batch a step"),
        (2, BESIDE | {"expert_model_parallel_size": 1}, "has no effect without experts that"),
        (4, BESIDE | {"use_torch_fsdp2": True}, "gathers its weights for one of them"),
        (2, BESIDE | {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
         "no order in which --cpu-offloading"),
        (2, BESIDE | {"global_batch_size": 2}, "pairs a step's micro-batches, and there is 1"),
        (1, {"num_experts": 4, "moe_experts_dtype": "fp8", "moe_latent_size": 24,
             "fp8_format": "hybrid", "bf16": True}, "multiples of 16, not (24, "),
        (1, {"qk_clip": True, "hybrid_override_pattern": "M-M-", "mamba_num_groups": 2},
         "no effect without attention"),
        (1, {"cuda_graph_impl": "full_iteration", "num_experts": 4,
             "moe_router_load_balancing_type": "sinkhorn"}, "no graph can record rounds"),
        (2, {"cuda_graph_impl": "full_iteration", "pipeline_model_parallel_size": 2},
         "cannot record pipeline stages"),
        (1, {"cuda_graph_impl": "full_iteration", "recompute_granularity": "selective",
                 "attention_dropout": 0.1},
         "cannot record recomputation"),
        (1, {"cuda_graph_impl": "full_iteration", "reset_attention_mask": True},
         "cannot record packed documents"),
        (3, {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Ett||ttL"},
         "no layer, embedding or loss under --pipeline-model-parallel-layout Ett||ttL"),
        (3, {"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 2,
             "decoder_last_pipeline_num_layers": 2}, "pipeline rank 1 of 3 has no layer"),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|ttmL"},
         "places 1 layers m, but --mtp-num-layers is 0"),
        (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
             "pipeline_model_parallel_layout": "Ett|ttm||L", "mtp_num_layers": 1},
         "m on another stage of a rank that holds the embedding"),
        (1, {"overlap_p2p_communication": False}, "--no-overlap-p2p-communication has no eff"),
        (1, {"batch_p2p_communication": False}, "--no-batch-p2p-communication has no effect"),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True,
             "recompute_granularity": "full", "distribute_saved_activations": True},
         "--distribute-saved-activations has no effect"),
        (1, {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
         "--recompute-modules moe_act has no effect without --num-experts"),
        (1, {"norm_placement": "post", "recompute_granularity": "selective",
             "recompute_modules": ("layernorm",)}, "saves no memory with --norm-placement"),
        (1, {"tensorboard": True, "auto_resume": True}, "--auto-resume has no effect without"),
        (1, {"tensorboard": True}, "needs a folder: give --save or --tensorboard-dir"),
        (1, {"lr_warmup_iters": 10}, "not shorter than the decay"),
    ],
)  # fmt: skip
def test_each_conflict_says_what_to_change(world_size, changes, told):
    with pytest.raises(OptionsError) as refusal:
        plan(world_size, **changes)
    assert told in " ".join(str(refusal.value).split())


def test_auto_is_the_fastest_schedule_that_fits_the_memory_and_the_other_options():
    wide = {"hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048}
    layout = {**wide, "pipeline_model_parallel_size": 2, "global_batch_size": 8}
    auto = {**layout, "pipeline_schedule": "auto"}
    free = plan(2, **auto)
    assert free.config.pipeline.v_shaped
    assert free == plan(2, **layout, pipeline_schedule=free.config.pipeline.pipeline_schedule)
    whole = plan(2, **auto, recompute_granularity="full").config.pipeline
    assert (whole.pipeline_schedule, whole.num_chunks) == ("interleaved", 2)
    length = {"train_iters": 0, "train_samples": 40, "rampup_batch_size": (2, 2, 8)}
    ramp = plan(2, **auto, **length).config.pipeline
    assert ramp.pipeline_schedule == "zb-v"  # dualpipev takes 4 micro-batches or more
    odd = length | {"rampup_batch_size": (2, 1, 8), "recompute_granularity": "full"}
    assert plan(2, **auto, **odd).config.pipeline.pipeline_schedule == "1f1b"
    # Adapters have no main weights and moments of the model.
    capped = auto | {"pipeline_memory_cap": "1.5"}
    with pytest.raises(ConflictError, match="takes"):
        plan(2, **capped)
    assert plan(2, **capped, peft="lora").config.pipeline.v_shaped


def test_auto_names_what_no_schedule_would_mend_instead_of_schedules():
    auto = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "auto"}
    for changes, told in (
        ({"main_grads_dtype": "bf16"}, "--main-grads-dtype bf16 has no effect without --bf16"),
        ({"train_iters": 0, "train_samples": 40, "rampup_batch_size": (2, 4, 8),
          "global_batch_size": 8}, "--rampup-batch-size"),
    ):  # fmt: skip
        with pytest.raises(OptionsError) as refusal:
            plan(2, **auto, **changes)
        assert len(refusal.value.lines) == 1
        assert refusal.value.lines[0].startswith(told)


def test_a_ramp_of_many_sizes_is_resolved_without_building_their_schedules():
    many = {
        "num_layers": 64,
        "pipeline_model_parallel_size": 16,
        "num_virtual_stages_per_pipeline_rank": 4,
        "global_batch_size": 2048,
        "train_iters": 0,
        "train_samples": 1_000_000,
    }
    started_s = time.process_time()
    found = plan(16, rampup_batch_size=(16, 16, 100_000), **many)
    assert time.process_time() - started_s < 5.0  # of which building would take a minute
    assert len(found.ramp.sizes()) == 128
    with pytest.raises(ConflictError, match="8 micro-batches in groups of 16"):
        plan(16, rampup_batch_size=(8, 8, 100_000), **many)


def test_a_ramp_counts_the_micro_batches_of_one_data_rank():
    length = {"train_iters": 0, "train_samples": 80}
    found = plan(2, rampup_batch_size=(4, 4, 8), global_batch_size=8, **length)
    assert [found.num_microbatches_at(consumed) for consumed in (0, 4, 8)] == [2, 2, 4]
    assert found.num_microbatches == 4


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    with pytest.raises(ConflictError, match="smaller than the tokenizer's 120"):
        plan(tokenizer_vocab_size=120)


def test_all_conflicts_are_told_at_once():
    with pytest.raises(OptionsError) as refusal:
        plan(1, lr=0.0, train_iters=0, sequence_parallel=True)
    assert len(refusal.value.lines) == 3
    assert str(refusal.value).startswith("3 things to change:\n  - ")


def test_what_two_checks_find_is_told_once():
    with pytest.raises(OptionsError) as refused:
        plan(num_virtual_stages_per_pipeline_rank=2)
    assert len(refused.value.lines) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bf16": False}, "--bf16 or --fp16"),
        (
            {"fp8_format": "hybrid", "fp8_recipe": "rowwise"},
            "does not support --fp8-recipe rowwise",
        ),
        ({"cuda_graph_impl": "full_iteration"}, "with --cuda-graph-impl"),
        ({"peft": "lora"}, "with --peft"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable: name an"),
        ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi: name an"),
        ({"context_parallel_size": 2}, "needs --cp-comm-type a2a"),
    ],
)
def test_what_transformer_engine_does_not_compute_is_named_and_computed_without(
    changes, said, caplog
):
    base = {"transformer_impl": "transformer_engine", "bf16": True}
    found = plan(2, **(base | changes))
    assert said in "".join(find_faults(*parts(found.config), notes=True))
    assert find_faults(*parts(plan(2, **base).config), notes=True) == []
    assemble(plan(1, **base), ParallelContext.single("cpu"))
    assert "transformer_engine needs a GPU; using this package's" in caplog.text
