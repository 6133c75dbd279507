"""The command ``mcore-models``."""

import json
import subprocess
import sys

import pytest

from mcore_models.cli import main


def run(capsys, *words):
    code = main(words)
    return code, *capsys.readouterr()


def test_without_a_command_the_usage_is_shown(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert "mcore-models count --preset" in out


def test_list_shows_every_preset_with_its_size(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert "8,030,261,248" in out
    code, out, _ = run(capsys, "show", "gemma-2-9b", "--bf16", "--seq-length", "1024")
    assert code == 0
    assert "gemma-2-9b: Gemma team 2024" in out
    assert "layers 0, 2, 4, ... (21 of them)" in out
    assert "16 heads of 256, 8 key/value heads, window of 4,096, scores capped at 50" in out
    assert "rank_total_gib" in out
    parts = {
        "deepseek-v2-lite": (
            "latent attention  16 heads of 128 + 64 rotated",
            "15,706,484,224",
        ),
        "glm-4.5-air": ("multi-token prediction  1 further token  [2,375,059,584 each]",),
        "mamba2-130m": ("mamba  24 heads of 64, a state of 128, 1 group",),
        "bert-base": ("LayerNorm after each part", "lm head  [622,650]", "110,106,428"),
        "t5-small": ("decoder layers 0-5  [", "attention to the encoder  8 heads of 64"),
    }
    for name, wanted in parts.items():
        code, out, _ = run(capsys, "show", name)
        assert code == 0
        assert all(words in out for words in wanted), out
    code, _, err = run(capsys, "show")
    assert code == 2
    assert "mcore-models show needs the name of a preset" in err


def test_count_takes_a_preset_with_flags_over_it(capsys):
    words = "count --preset=llama-3-8b --num-layers 8 --seq-length 8192 --json"
    code, out, _ = run(capsys, *words.split())
    report = json.loads(out)
    assert code == 0
    assert report["parameters"] == 8_030_261_248 - 24 * 218_112_000
    assert report["seq_length_tokens"] == 8192
    assert report["rank_total_gib"] > report["rank_optimizer_gib"] > 0
    assert run(capsys, *words.replace("--preset", "--model").split())[1] == out
    hybrid = "count --model nemotron-h-8b --hybrid-override-pattern M-M* --json"
    short = 2 * 109_640_064 + 176_164_864 + 41_947_136 + 2 * 536_870_912 + 4_096
    assert json.loads(run(capsys, *hybrid.split())[1])["parameters"] == short
    last = hybrid.replace("M-M*", "MM --hybrid-override-pattern M-M*")
    assert json.loads(run(capsys, *last.split())[1])["parameters"] == short
    without_attention = json.loads(run(capsys, *hybrid.replace("M-M*", "M-M").split())[1])
    assert without_attention["parameters"] == short - 41_947_136


def test_count_takes_the_state_of_the_optimizer(capsys):
    words = "count --model llama-3-8b --bf16 --seq-length 4096 --json --optimizer"
    found = {}
    for name in ("adam", "sgd", "muon", "soap"):
        report = json.loads(run(capsys, *words.split(), name)[1])
        found[name] = report["rank_optimizer_gib"] * 2**30
    elements, ends = 8_030_261_248, 2 * 128256 * 4096 + 65 * 4096  # with norms, which AdamW has
    assert found["adam"] == 12 * elements
    assert found["sgd"] == 8 * elements
    assert found["muon"] == 8 * elements + 4 * ends
    # Two factors and two bases of each side up to 8192, in float32.
    sides = 32 * ((2 * 4096**2) * 2 + 2 * (1024**2 + 4096**2) + 3 * 4096**2)
    assert found["soap"] == 12 * elements + 8 * sides


def test_count_of_a_frozen_model_says_what_is_trained(capsys):
    words = "count --model llama-3-8b --bf16 --seq-length 4096 --json --global-batch-size 1"
    whole = json.loads(run(capsys, *words.split())[1])
    words += " --peft lora --peft-base-bits 4"
    report = json.loads(run(capsys, *words.split())[1])
    assert "trainable_parameters" not in whole
    assert report["parameters"] == whole["parameters"]
    assert report["trainable_parameters"] == 32 * 32 * (8 * 8192 + 16384)
    assert report["rank_optimizer_gib"] == 12 * report["trainable_parameters"] / 2**30
    # The peak on an H200, benchmarks/results/qlora-llama-3-8b-h200.json.
    assert report["rank_total_gib"] == pytest.approx(25.43, rel=0.06)
    words += " --optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    words += " --optimizer-offload-dir nvme --cpu-offloading --cpu-offloading-num-layers 16"
    away = json.loads(run(capsys, *words.split())[1])
    half = report["rank_optimizer_gib"] / 2
    passing = 3 * 48 / 2**10  # state of three pieces at a time
    assert away["rank_optimizer_gib"] == pytest.approx(half + passing)
    assert away["rank_disk_gib"] == pytest.approx(half)
    kept = report["rank_activations_gib"] - away["rank_activations_gib"]
    assert kept > 0
    assert away["rank_host_gib"] == pytest.approx(kept)


def test_count_takes_a_command_line_of_training_and_says_whether_it_fits(capsys, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[model]\nnum_layers = 16\n[precision]\nbf16 = true\n[run]\nseed = 2\n")
    line = "--preset llama-3-8b --seq-length 8192 --lr 1e-4 --mock-data --nproc 8 "
    line += "--tensor_model_parallel_size 2 --recompute-activations --gpu h100"
    whole = ["count", *line.split(), "--recipe", str(recipe), "--num-layers=32"]
    code, out, err = run(capsys, *whole)
    told = dict(row.rsplit(maxsplit=1) for row in out.splitlines())
    assert code == 0
    assert err == "mcore-models: ignored, as without effect: --seed, --lr, --mock-data.\n"
    assert told["parameters"] == "8,030,261,248"
    assert told["fits"] == "no"
    optimizer = float(told["rank_optimizer_gib"])
    assert optimizer == pytest.approx(12 * 8_030_261_248 / 2 / 2**30, rel=1e-3)
    sharded = [*whole, "--use-distributed-optimizer", "--json"]
    report = json.loads(run(capsys, *sharded)[1])
    assert report["rank_optimizer_gib"] * 4 == pytest.approx(optimizer, rel=1e-3)
    assert report["fits"] == "yes"
    near = str(report["rank_total_gib"] + 1)
    assert json.loads(run(capsys, *sharded, "--gpu", near)[1])["fits"] == "barely"


@pytest.mark.parametrize("family", ["", "gpt", "bert", "t5"])
def test_count_takes_flags_alone(capsys, family):
    sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 10"
    code, out, _ = run(capsys, "count", *family.split(), *sizes.split())
    assert code == 0
    assert "active_parameters" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("counts", "unknown command counts: did you mean count?"),
        ("count t5 --preset bert-base", "is a bert model, not t5: use mcore-models count bert"),
        ("count --preset nope", "unknown preset nope"),
        ("count --preset tiny --world-size 0", "--world-size and --micro-batch-size must be"),
        ("count --preset tiny --hybrid-override-pattern", "needs a value"),
        ("count --preset tiny --num-layer 3", "did you mean --num-layers?"),
        (
            "count --preset tiny --tensor-model-parallel-size 3",
            "--num-attention-heads 4 cannot be split",
        ),
        (
            "count --preset tiny --tensor-model-parallel-size 2",
            "does not divide the world of 1 ranks",
        ),
        (
            "count --num-layers 2 --hidden-size 8 --num-attention-heads 2",
            "--vocab-size is required",
        ),
        ("count --preset tiny --gpu h10", "--gpu h10: unknown GPU. Use a100"),
        ("count --preset tiny --seq-length 512", "longer than --max-position-embeddings 256"),
    ],
)
def test_bad_input_ends_with_code_2_and_says_what_to_change(capsys, words, message):
    code, _, err = run(capsys, *words.split())
    assert code == 2
    assert message in err


def test_the_command_loads_no_torch():
    probe = (
        "import sys; from mcore_models.cli import main; main(['list']); "
        "main(['count', '--preset', 'tiny']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
