"""Scripts and configs of other trainers become recipes, with an answer for every flag."""

import json
import tomllib
from pathlib import Path

import pytest
from docs.blocks import ROOT

from mcore_base.command_line import OptionsError
from mcore_train.migrating.cli import migrate
from mcore_train.migrating.migration import migrate_file, recipe_text, report_text
from mcore_train.migrating.shell import read_script, shown, unknown_in
from mcore_train.options.megatron_flags import parser_flags
from mcore_train.options.parsing import parse

HERE = Path(__file__).parent
CASES = sorted((ROOT / "tests/functional_tests/test_cases").rglob("model_config.yaml"))


def written(tmp_path, name, text):
    """Write a file to migrate."""
    path = tmp_path / name
    path.write_text(text)
    return path


def words_of(text, **settings):
    """Return the words of the training command of a script's text."""
    return read_script(text, settings).words


def answers_of(migration):
    """Map the first word of each flag to its class."""
    return {answer.text.split()[0].rstrip(":"): answer.kind for answer in migration.answers}


@pytest.mark.parametrize(
    ("script", "world_size", "num_flags", "option"),
    [
        ("llama3_8b_fp8.sh", 16, 73, ("fp8_recipe", "delayed")),
        ("mixtral_8x7b.sh", 32, 59, ("num_virtual_stages_per_pipeline_rank", 2)),
        pytest.param(
            *("deepseek_v3.sh", 1024, 130, ("moe_layer_freq", "([0]*3+[1]*58)")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_launch_script_is_migrated_in_one_round(
    script, world_size, num_flags, option, tmp_path, capsys
):
    recipe = tmp_path / "recipe.toml"
    assert migrate(str(HERE / script), output=str(recipe)) == 0
    page = capsys.readouterr().out
    assert f"dry run of {world_size} ranks" in page
    listed = [line for line in page.split("\nrecipe: ")[0].splitlines() if line[:4] == "  --"]
    assert len(listed) >= num_flags
    tables = tomllib.loads(recipe.read_text())
    assert option in [pair for table in tables.values() for pair in table.items()]
    config = parse(["--recipe", str(recipe), "--save", str(tmp_path), "--vocab-size", "9"])
    assert config.model.num_layers in (32, 61)


def test_what_a_script_leaves_open_is_listed_and_can_be_set():
    script = HERE / "mixtral_8x7b.sh"
    migration = migrate_file(script, {})
    assert set(migration.open_flags) == {
        *("--tokenizer-model", "--data-path", "--save", "--load", "--tensorboard-dir"),
    }
    assert "save" not in migration.values
    assert "wandb_project" not in migration.values
    known = migrate_file(script, {"1": "run/", "2": "words", "3": "book", "WANDB_API_KEY": "x"})
    assert known.open_flags == ()
    assert known.values["save"] == "run/"
    assert known.values["load"] == "run"
    assert known.values["wandb_project"] == "mixtral"
    assert known.values["tensorboard"]  # by --tensorboard-dir, as in Megatron


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=(--a 1)\nA+=(--b 'x y')\ntorchrun p.py \"${A[@]}\"", ["--a", "1", "--b", "x y"]),
        ("X='--a 1 \\\n'\nX=\"--a 1 \\\n --b 2\"\npython p.py $X", ["--a", "1", "--b", "2"]),
        ("N=3; M=$((N * (2 + $N) / 2))\npython p.py --a $M", ["--a", "7"]),
        ("python p.py --a ${X:-${Y:-5}} --b ${X:+7}", ["--a", "5", "--b"]),
        ("X=a.b.c\npython p.py --a ${X%.*} --b ${X##*.}", ["--a", "a.b", "--b", "c"]),
        ("A=(u v)\npython p.py --a ${#A[@]} ${A[1]}", ["--a", "2", "v"]),
        ("if [ 2 -gt 1 ]; then X=y; else X=n; fi\npython p.py --a $X", ["--a", "y"]),
        ("X=a; [[ $X == b* ]] && X=n\npython p.py --a $X", ["--a", "a"]),
        (
            "X=; if [[ $X == y ]] || [[ -z $X ]]; then A=1; fi\npython p.py --a $A",
            ["--a", "1"],
        ),
        (
            "X=a; if [[ $X == b || $X == a && -n $X ]]; then X=y; fi\npython p.py $X --a",
            ["y", "--a"],
        ),
        ("N=2; if (( N > 1 && N != 3 )); then N=4; fi\npython p.py --a $N", ["--a", "4"]),
        ("N=1; (( N > 1 )) && N=4\npython p.py --a $N", ["--a", "1"]),
        ("N=1; [ $N -gt 1 ] 2>/dev/null && N=4\npython p.py --a $N", ["--a", "1"]),
        ("[ -f x ] || [[ a == a ]] && N=4\npython p.py --a ${N:-1}", ["--a", "1"]),
        ("python p.py --a 1 # --b 2\n", ["--a", "1"]),
        ("python p.py --a '#' --b \"$@\" > log 2>&1", ["--a", "#", "--b"]),
        ("cat <<E\npython p.py --x 1\nE\npython p.py --a 1 | tee log", ["--a", "1"]),
        ("C=\"python p.py --a '1 2'\"\neval $C", ["--a", "1 2"]),
        ("srun sh -c 'torchrun -m pkg.train --a 1 && echo'", ["--a", "1"]),
    ],
)
def test_shell_text_is_expanded_as_a_shell_does(text, words):
    assert words_of(text) == words


def test_nothing_of_a_script_is_run(tmp_path):
    mark = tmp_path / "mark"
    words = words_of(f"X=$(touch {mark})`touch {mark}`\ntouch {mark}\npython p.py --a $X")
    assert not mark.exists()
    assert unknown_in(words) == [f"$(touch {mark})", f"`touch {mark}`"]


def test_variables_of_the_environment_are_not_read(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    (_, value) = words_of("python p.py --a $SECRET")
    assert (shown(value), unknown_in([value])) == ("$SECRET", ["$SECRET"])


def test_parts_that_are_not_followed_are_listed():
    script = read_script(
        "source env.sh\nfor i in 1 2; do LR=$i; done\nf() { TP=2; }\n"
        "if [ -f x ]; then PP=4; fi\npython p.py --lr 1",
        {},
    )
    text = "\n".join(script.skipped)
    for part in ("env.sh is not read", "for is not followed: LR", "functions", "machine: PP"):
        assert part in text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A=(--a (1))\npython p.py ${A[@]}", 1),
        ('X=(1)\nbash -c "python p.py --a (1) --b 2"', 2),
        ('\nX="--a (1)"\neval "python p.py $X --b 2"', 3),
    ],
)
def test_a_bracket_outside_quotes_is_refused_as_a_shell_does(text, line):
    with pytest.raises(ValueError, match=rf"line {line}: '\(' outside quotes .* Quote the"):
        read_script(text, {})


def test_flags_behind_a_pipe_in_a_value_are_listed():
    script = read_script("eval 'python p.py --layout Et|tL --b 2'", {})
    assert script.words == ["--layout", "Et"]
    assert "--b follow a '|' outside quotes" in script.skipped[0]
    assert read_script("yes | python p.py --a 1 | tee log", {}).skipped == []


@pytest.mark.parametrize("text", ["A=(1 2\npython p.py --a 1", "echo 'x\n", "if true; then\nx"])
def test_a_script_that_never_ends_is_refused_with_its_line(text):
    with pytest.raises(ValueError, match=r"line \d: .* never ends"):
        read_script(text, {})


def test_a_script_without_a_training_is_refused():
    with pytest.raises(ValueError, match="no training command was found"):
        read_script("echo hello", {})


def test_every_option_of_megatrons_parser_gets_one_line_and_none_is_unknown(tmp_path):
    words = []
    for flag, row in parser_flags().items():
        words += [flag, *["1"] * (row.takes if isinstance(row.takes, int) else 1)]
    path = written(tmp_path, "all.sh", f"python pretrain_gpt.py {' '.join(words)}")
    migration = migrate_file(path, {})
    flags = list(parser_flags())
    listed = [answer.text.split()[0] for answer in migration.answers]
    assert len(flags) > 800
    assert [flag for flag in flags if flag not in listed] == []
    assert [a for a in migration.answers if a.reason.startswith("unknown option")] == []
    assert answers_of(migration)["--bert-no-binary-head"] == "refused"
    assert "--bert-no-binary-head: an option of mcore-train bert" in report_text(migration)
    assert report_text(migration).count("\n  ") >= len(flags)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if index % 7 == 0 else pytest.mark.slow)
        for index, path in enumerate(CASES)
    ],
    ids=lambda path: "/".join(path.parts[-3:-1]),
)
def test_a_functional_test_is_migrated_with_all_its_flags(path):
    migration = migrate_file(path, {})
    refused = [a for a in migration.answers if a.kind in ("refused", "unresolved")]
    assert refused == []
    assert len(migration.answers) >= len(migration.values) / 2


def test_a_functional_test_of_megatrons_has_variables_and_switches(tmp_path):
    text = (
        "ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}\nTEST_TYPE: regular\nMODEL_ARGS:\n"
        "  --num-layers: 2\n  --hidden-size: 64\n  --num-attention-heads: 4\n"
        "  --disable-bias-linear: true\n  --no-ckpt-fully-parallel-save: false\n"
        "  --save: ${CHECKPOINT_SAVE_PATH}\n  --data-path: ${DATA_PATH}/text_document\n"
        "  --moe-layer-freq: ([0]*1+[1]*1)\n  --num-experts: 2\n  --nonsense: 3\n"
    )
    migration = migrate_file(written(tmp_path, "model_config.yaml", text), {"DATA_PATH": "d"})
    kinds = answers_of(migration)
    assert kinds["--save"] == "unresolved"
    assert kinds["--nonsense"] == "refused"
    assert kinds["--disable-bias-linear"] == "renamed"
    assert migration.values["data_path"] == ("d/text_document",)
    assert migration.values["moe_layer_freq"] == "([0]*1+[1]*1)"


def test_a_script_that_relies_on_megatrons_defaults_has_them_in_its_recipe(tmp_path):
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
    path = written(tmp_path, "a.sh", f"python pretrain_gpt.py {shape} --no-bias-gelu-fusion")
    migration = migrate_file(path, {})
    recipe = written(tmp_path, "a.toml", recipe_text(migration, "gpt", "a.sh"))
    words = ["--max-position-embeddings", "8", "--lr", "1", "--vocab-size", "9"]
    model = parse(["--recipe", str(recipe), *words]).model
    assert (model.normalization, model.hidden_dropout, model.add_bias_linear) == (
        *("LayerNorm", 0.1),
        True,
    )
    assert not model.openai_gelu  # the script turned the fused kernel's GELU off
    assert answers_of(migration)["--normalization"] == "changed default"
    assert "  --eval-iters: 100 in Megatron, 10 here" in report_text(migration)


def test_options_without_effect_are_left_out_with_the_reason(tmp_path):
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --tiktoken-pattern v2"
    migration = migrate_file(written(tmp_path, "a.sh", f"python p.py {shape}"), {})
    assert "tiktoken_pattern" not in migration.values
    (row,) = (a for a in migration.answers if a.text.startswith("--tiktoken-pattern"))
    assert row.kind == "note"
    assert "--tokenizer-type" in row.reason


def test_flags_that_contradict_are_all_in_one_report(tmp_path):
    shape = "--num-layers 3 --hidden-size 64 --num-attention-heads 5 --lr x --fp4-format e2m1"
    path = written(tmp_path, "a.sh", f"python p.py {shape} --made-up 1")
    report = report_text(migrate_file(path, {}))
    assert "--fp4-format e2m1: use --fp8-format" in report
    assert "--lr x: --lr 'x' must be a number" in report
    assert "--made-up 1: unknown option --made-up" in report


NEMO = """
trainer: {devices: 8, num_nodes: 2, precision: bf16-mixed, max_steps: 100, accelerator: gpu}
model:
  micro_batch_size: 1
  global_batch_size: 64
  tensor_model_parallel_size: 2
  sequence_parallel: true
  encoder_seq_length: 4096
  max_position_embeddings: 4096
  num_layers: 4
  hidden_size: 256
  num_attention_heads: 8
  activation: fast-swiglu
  normalization: rmsnorm
  bias: false
  position_embedding_type: rope
  hidden_dropout: 0.0
  attention_dropout: 0.0
  share_embeddings_and_output_weights: false
  tokenizer: {library: huggingface, type: null, model: "${oc.env:TOKENIZER}"}
  optim:
    name: distributed_fused_adam
    lr: 1e-4
    betas: [0.9, 0.95]
    sched: {name: CosineAnnealing, warmup_steps: 10, min_lr: 1.0e-5}
  data: {data_prefix: [1.0, book], splits_string: "9,1,0"}
"""
BRIDGE = """
model: {num_layers: 4, hidden_size: 256, num_attention_heads: 8, num_query_groups: 2,
  seq_length: 512, add_bias_linear: false, gated_linear_unit: true, activation_func: silu,
  normalization: RMSNorm, hidden_dropout: 0.0, attention_dropout: 0.0,
  position_embedding_type: rope, share_embeddings_and_output_weights: false,
  _target_: some.Provider}
train: {train_iters: 20, global_batch_size: 16, micro_batch_size: 2, eval_interval: 10}
optimizer: {optimizer: adam, lr: 3.0e-4, min_lr: 3.0e-5, use_distributed_optimizer: true}
scheduler: {lr_decay_style: cosine, lr_warmup_iters: 2}
ddp: {overlap_grad_reduce: true, grad_reduce_in_fp32: true}
dataset: {blend: [[a, b], [0.3, 0.7]], sequence_length: 512}
mixed_precision: bf16_with_fp8_current_scaling_mixed
"""
TITAN = """
[job]
dump_folder = "out"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 20
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
max_norm = 1.0
dataset = "c4"
mixed_precision_param = "bfloat16"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
enable_async_tensor_parallel = false
[activation_checkpoint]
mode = "selective"
[checkpoint]
enable = true
folder = "checkpoint"
interval = 500
async_mode = "async"
"""
DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "none"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "mystery": 1,
}
PUBLISHED = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("name", "text", "model", "values", "kinds"),
    [
        (
            "nemo.yaml",
            NEMO,
            "",
            {"train_iters": 100, "bf16": True, "swiglu": True, "adam_beta2": 0.95,
             "untie_embeddings_and_output_weights": True, "data_path": ("1.0", "book")},
            {"model.tokenizer.model": "unresolved", "trainer.devices": "note"},
        ),
        (
            "bridge.yaml",
            BRIDGE,
            "",
            {"fp8_recipe": "tensorwise", "data_path": ("0.3", "a", "0.7", "b"), "lr": 3e-4},
            {"model._target_": "note", "model.num_layers": "renamed"},
        ),
        (
            "titan.toml",
            TITAN,
            "",
            {"model": "llama-3-8b", "min_lr": 3e-5, "async_save": True,
             "data_parallel_sharding_strategy": "optim_grads_params"},
            {"training.dataset": "refused", "job.dump_folder": "note"},
        ),
        (
            "ds.json",
            json.dumps(DEEPSPEED),
            "tiny",
            {"data_parallel_sharding_strategy": "optim_grads_params", "adam_beta1": 0.9,
             "lr_decay_style": "constant", "lr_warmup_iters": 10},
            {"gradient_accumulation_steps": "unresolved", "mystery": "refused"},
        ),
        (
            "config.json",
            json.dumps(PUBLISHED),
            "",
            {"num_layers": 2, "num_query_groups": 2, "vocab_size": 320},
            {"num_hidden_layers": "renamed", "hidden_size": "same", "architectures": "note"},
        ),
    ],
)  # fmt: skip
def test_configs_of_other_trainers_become_recipes_that_a_run_takes(
    name, text, model, values, kinds, tmp_path, capsys
):
    path = written(tmp_path, name, text)
    migration = migrate_file(path, {})
    assert values.items() <= migration.values.items()
    assert kinds.items() <= answers_of(migration).items()
    code = migrate(str(path), model=model, dry_run=False)
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1", "is Python, which is not run"),
        ("a.json", "{}", "neither a config.json"),
        ("a.json", "{", "no valid JSON"),
        ("a.toml", "x = 1", "no section"),
        ("a.toml", "x =", "no valid TOML"),
        ("a.yaml", "x: 1", "its form is not known"),
    ],
)
def test_a_file_of_an_unknown_form_is_refused(name, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        migrate_file(written(tmp_path, name, text), {})


def test_a_conflict_that_is_the_users_to_decide_is_printed_with_exit_code_2(tmp_path, capsys):
    shape = "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --lr 1e-3 --seq-length 8"
    layout = "--tensor-model-parallel-size 8 --train-iters 2 --global-batch-size 1 --bf16"
    path = written(
        tmp_path, "a.sh", f"torchrun p.py {shape} {layout} --max-position-embeddings 8"
    )
    assert migrate(str(path)) == 2
    assert "a run of 8 ranks refuses the recipe:\n  --num-attention-heads 4" in (
        capsys.readouterr().out
    )


def test_the_report_ends_with_commands_and_needs_no_file_of_the_cluster(tmp_path, capsys):
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --bf16"
    batch = "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3"
    files = "--nccl-communicator-config-path /far/nccl.yaml --data-path $DATA --train-iters 2"
    layout = "--tensor-model-parallel-size 2"
    path = written(tmp_path, "a.sh", f"torchrun p.py {shape} {batch} {files} {layout}")
    recipe = str(tmp_path / "recipe.toml")
    assert migrate(str(path), output=recipe, dry_run=False) == 0
    check, start = capsys.readouterr().out.splitlines()[-2:]
    run = f"gpt --recipe {recipe} --data-path DATA_PATH"
    assert check == f"  mcore-train {run} --dry-run --world-size 2"
    assert start == f"  torchrun -m mcore_train {run}"
    assert "/far/nccl.yaml" in Path(recipe).read_text()


def test_a_setting_without_a_value_is_refused():
    with pytest.raises((ValueError, OptionsError), match="give NAME=VALUE"):
        migrate(str(HERE / "mixtral_8x7b.sh"), set=("X",))
