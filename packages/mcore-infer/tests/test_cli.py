import subprocess
import sys

import pytest

from mcore_infer import SamplingConfig, cli, generate_text
from mcore_infer.cli import main


def test_generate_prints_prompt_and_text(run_folder, loaded, capsys):
    words = ["generate", "--load", str(run_folder), "--prompt", "In the", "--device", "cpu"]
    assert main([*words, "--num-tokens", "6", "--top-k", "1"]) == 0
    sampling = SamplingConfig(num_tokens=6, top_k=1)
    (text,) = generate_text(loaded.model, loaded.tokenizer, ["In the"], sampling)
    assert capsys.readouterr().out == f"In the{text}\n"


def test_generate_writes_on_after_several_prompts(run_folder, loaded, capsys):
    words = ["generate", "--load", str(run_folder), "--prompt", "In", "And so"]
    assert main([*words, "--num-tokens", "4", "--temperature", "0.8", "--seed", "5"]) == 0
    sampling = SamplingConfig(num_tokens=4, temperature=0.8)
    texts = generate_text(loaded.model, loaded.tokenizer, ["In", "And so"], sampling, 5)
    assert capsys.readouterr().out == f"In{texts[0]}\n\nAnd so{texts[1]}\n\n"


def test_evaluate_prints_bits_per_byte(run_folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("In the beginning was the word.")
    words = ["evaluate", "--load", str(run_folder), "--input", str(tmp_path / "text.txt")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    assert "30 tokens | 30 bytes" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "--load", "RUN", "--temperature", "0"], "--top-k 1"),
        (["generate", "--load", "RUN", "--top-k", "5", "--top-p", "0.5"], "together"),
        (["generate", "--load", "RUN", "--prompt", "a" * 50], "maximum context length"),
        (["generate", "--load", "RUN", "--tokenizer", "NOWHERE"], "NOWHERE"),
        (["generate", "--load", "NOWHERE"], "NOWHERE is no folder"),
        (["generate", "--load", "RUN", "--ckpt-step", "3"], "Complete steps there: 7"),
        (["evaluate", "--load", "RUN", "--input", "NOWHERE"], "NOWHERE"),
        (["generate", "--load", "RUN", "--temprature", "1"], "--temperature"),
        (["evaluate", "--load", "RUN", "--input", "RUN"], "is a folder: give text files"),
        (["write"], "The commands are generate, evaluate"),
    ],
)
def test_bad_input_ends_with_two_and_one_clear_line(run_folder, words, message, capsys):
    assert main([str(run_folder) if w == "RUN" else w for w in words]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors
    assert "Traceback" not in errors


def test_damage_ends_with_one(loaded, tmp_path, capsys):
    for file in loaded.folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tensors,) = tmp_path.glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-8])
    assert main(["generate", "--load", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("mcore-infer: error: ")


def test_a_fault_of_the_program_shows_where_it_is(monkeypatch):
    def broken():
        raise RuntimeError("a fault")

    monkeypatch.setitem(cli.COMMANDS, "generate", ("", broken))
    with pytest.raises(RuntimeError, match="a fault"):
        main(["generate"])


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"]])
def test_help_comes_without_torch(words):
    code = (
        "import sys\nfrom mcore_infer.cli import main\n"
        f"assert main({words!r}) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
