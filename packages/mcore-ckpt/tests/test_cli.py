"""The command as users type it, through a real shell once, else as a shell would start it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import exit_code, fork
from safetensors.torch import save_file

from mcore_base.terminal import parse_size, size_text
from mcore_ckpt.cli import explain_redirection, main, parse_direction
from mcore_ckpt.save_load.saving import save
from mcore_parallel.mesh import SINGLE
from mcore_parallel.sharding import Piece, Shard


def redirected(text, folder, *files):
    """Do what a shell does to ``text > file ...``, without a Python that starts anew.

    The shell opens each file; the last is the command's standard output.
    """
    for name in files:
        (folder / name).write_bytes(b"")

    def work():
        os.chdir(folder)
        for name, stream in ((files[-1], 1), ("told", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        with open(1, "w") as sys.stdout, open(2, "w") as sys.stderr:
            return main(text.split())

    code = exit_code(fork(work))
    told = (folder / "told").read_text()
    (folder / "told").unlink()
    return code, told


def make_hf(folder):
    """Write a Llama folder by hand: importing transformers takes seconds."""
    D, F, V = 12, 10, 17
    shapes = {"model.embed_tokens": (V, D), "model.norm": (D,), "lm_head": (V, D)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{p}_proj": (D, D) for p in "qo"}
        shapes |= {f"{layer}.self_attn.{p}_proj": (D // 2, D) for p in "kv"}
        shapes |= {f"{layer}.mlp.{p}_proj": (F, D) for p in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (D, F)
        shapes[f"{layer}.input_layernorm"] = shapes[f"{layer}.post_attention_layernorm"] = (D,)
    config = {
        "model_type": "llama",
        "hidden_size": D,
        "num_hidden_layers": 2,
        "vocab_size": V,
        "intermediate_size": F,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")


def test_megatrons_command_for_conversion_runs_by_its_name(tmp_path, capsys):
    make_hf(tmp_path / "in")
    path = Path(__file__).parents[3] / "examples/tools/checkpoint/convert.py"
    spec = importlib.util.spec_from_file_location("convert", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = f"--model-type GPT --loader llama_mistral --saver mcore --load-dir {tmp_path}/in"
    words += f" --save-dir {tmp_path}/run --target-tensor-parallel-size 4 --no-checking"
    assert module.main(words.split()) == 0
    captured = capsys.readouterr()
    assert "each used once, read back and equal" in captured.out
    needless = "--model-type --target-tensor-parallel-size --no-checking"
    assert f"not needed, files and layouts decide it: {needless}" in captured.err
    words = f"--loader core --saver hf --load-dir {tmp_path}/no --save-dir {tmp_path}/hf"
    assert module.main(words.split()) != 0
    assert f"{tmp_path}/no" in capsys.readouterr().err


def make_step(folder, value=1.0):
    data = torch.full((4, 3), value)
    whole = Shard((4, 3), torch.float32, (Piece((0, 0), (4, 3), data),))
    return save(folder, 3, {"model.blocks.0.w": whole, "model.blocks.1.w": whole}, world=SINGLE)


def test_an_unquoted_arrow_converts_all_the_same_and_leaves_no_file(tmp_path):
    make_hf(tmp_path / "in")
    code, told = redirected("convert hf- --input in --output run", tmp_path, "mcore")
    assert code == 0, told
    assert "the shell read '>mcore' in 'hf->mcore' as a redirection" in told
    assert "each used once, read back and equal" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "run"]
    assert (tmp_path / "run" / "release" / "index.json").is_file()
    # The same from the other side, to an output with the eaten name.
    code, told = redirected("convert mcore- --input run --output hf", tmp_path, "hf")
    assert code == 0, told
    assert "Write mcore-to-hf" in told
    assert (tmp_path / "hf" / "config.json").is_file()


def test_an_output_called_as_the_eaten_name_becomes_a_folder(tmp_path):
    make_hf(tmp_path / "in")
    code, told = redirected("convert hf- --input in --output mcore", tmp_path, "mcore")
    assert code == 0, told
    assert (tmp_path / "mcore" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_an_unquoted_arrow_to_any_format_is_understood_by_the_file_it_made(tmp_path):
    make_hf(tmp_path / "in")
    code, told = redirected("convert hf- --input in --output there", tmp_path, "megatron")
    assert code == 0, told
    assert "hf is converted to megatron nevertheless" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "there"]
    assert (tmp_path / "there" / "release" / "metadata.json").is_file()


def test_a_file_that_is_not_standard_output_is_never_removed(tmp_path):
    make_hf(tmp_path / "in")
    # Both redirections make a file; the program's output is the second.
    code, told = redirected("convert hf- --input in --output run", tmp_path, "mcore", "log")
    assert code == 0, told
    assert (tmp_path / "mcore").read_text() == ""
    assert (tmp_path / "log").read_text() == ""


def test_a_file_with_content_is_never_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mcore").write_text("precious")
    assert explain_redirection("hf") == "mcore"
    assert (tmp_path / "mcore").read_text() == "precious"
    assert "redirection" in capsys.readouterr().err


def test_a_conversion_that_fails_after_an_unquoted_arrow_leaves_no_file_either(tmp_path):
    code, told = redirected("convert hf- --input absent --output run", tmp_path, "mcore")
    assert code == 2
    assert "absent is not a Hugging Face folder" in told
    assert list(tmp_path.iterdir()) == []


def test_a_quoted_direction_prints_to_standard_output(tmp_path, capsys):
    make_hf(tmp_path / "in")
    words = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "a")]
    assert main(["convert", "hf->mcore", *words]) == 0
    assert f"{tmp_path}/a: llama, 21 tensors, " in capsys.readouterr().out


def test_directions_have_three_spellings_and_their_cut_forms():
    assert parse_direction("hf->mcore") == ("hf", "mcore", False)
    assert parse_direction("hf-to-mcore") == ("hf", "mcore", False)
    assert parse_direction("mcore->hf") == ("mcore", "hf", False)
    assert parse_direction("dcp2megatron") == ("dcp", "megatron", False)
    assert parse_direction("mcore-") == ("mcore", "", True)
    with pytest.raises(ValueError, match="direction 'hf' is not known: use FROM-to-TO"):
        parse_direction("hf")


def test_sizes_have_units():
    assert parse_size("5GB") == 5_000_000_000
    assert parse_size("1.5mb") == 1_500_000
    assert parse_size("12") == 12
    for wrong in ("five", "-1GB", "3XB", "0"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(wrong)
    sizes = (0, 999, 1000, 23_456, 999_600, 5_432_100_000, 3_000_000_000_000_000)
    assert [size_text(size) for size in sizes] == [
        *("0 bytes", "999 bytes", "1 kB", "23.5 kB", "1 MB", "5.43 GB", "3e+03 TB")
    ]


def test_help_loads_no_torch():
    code = (
        "import sys; from mcore_ckpt.cli import main\n"
        "for words in ([], ['--help'], ['convert', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hf-to-mcore" in done.stdout
    assert "--max-shard-size" in done.stdout


def test_exit_codes_tell_bad_input_from_failure(tmp_path, capsys):
    assert main(["convrt"]) == 2
    assert main(["inspect", str(tmp_path)]) == 2
    step = make_step(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    file = step / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert main(["verify", str(tmp_path)]) == 1
    assert "the checksum of model.blocks.1.w differs" in capsys.readouterr().err


def test_weights_of_any_format_are_held_to_the_fingerprint_that_convert_printed(
    tmp_path, capsys
):
    make_hf(tmp_path / "hf")
    for target in ("mcore", "megatron", "dcp"):
        words = ["--input", str(tmp_path / "hf"), "--output", str(tmp_path / target)]
        assert main(["convert", f"hf-to-{target}", *words]) == 0
        printed = capsys.readouterr().out.split("fingerprint ")[1].strip()
        for folder in ("hf", target):
            assert main(["verify", str(tmp_path / folder), "--fingerprint", printed]) == 0
            assert (
                "fingerprint (which covers no config.json or tokenizer)"
                in capsys.readouterr().out
            )
    assert main(["verify", str(tmp_path / "hf"), "--fingerprint", "abc"]) == 2
    assert "give the 32 digits" in capsys.readouterr().err
    file = tmp_path / "hf" / "model.safetensors"
    content = bytearray(file.read_bytes())
    for place in (-1, -1000, len(content) // 2):
        content[place] ^= 1
        file.write_bytes(content)
        assert main(["verify", str(tmp_path / "hf"), "--fingerprint", printed]) == 1
        assert f"not {printed}: its weights differ from" in capsys.readouterr().err
        content[place] ^= 1


def test_inspect_puts_the_layers_in_one_line(tmp_path, capsys):
    make_step(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "2 tensors" in text
    assert "model.blocks.*.w  x2" in text
    assert main(["inspect", str(tmp_path), "--as-json"]) == 0
    assert '"name": "model.blocks.1.w"' in capsys.readouterr().out


def test_inspect_compares_two_checkpoints(tmp_path, capsys):
    one, two = Path(tmp_path / "one"), Path(tmp_path / "two")
    make_step(one)
    make_step(two)
    assert main(["inspect", str(one), "--compare", str(two)]) == 0
    make_step(tmp_path / "three", value=2.0)
    assert main(["inspect", str(one), "--compare", str(tmp_path / "three")]) == 1
    assert "model.blocks.0.w: values differ" in capsys.readouterr().out


def test_progress_is_drawn_on_a_terminal_and_nowhere_else(tmp_path, monkeypatch, capsys):
    make_hf(tmp_path / "hf")
    run, hf = str(tmp_path / "run"), str(tmp_path / "again")
    commands = {
        "convert hf-to-mcore": ["--input", str(tmp_path / "hf"), "--output", run],
        "convert mcore-to-hf": ["--input", run, "--output", hf],
        "verify": [run],
        "inspect": [run, "--compare", str(tmp_path / "hf")],
        "reshard": [run, "--output", str(tmp_path / "whole")],
        "average": [run, run, "--output", str(tmp_path / "mean")],
    }
    # What ends each way through the bytes, and its line.
    ways = {
        "convert hf-to-mcore": ["", "reading back "],
        "convert mcore-to-hf": ["", "reading back ", "summing "],
        "verify": ["reading "],
        "inspect": ["comparing "],
        "reshard": [""],
        "average": [""],
    }
    for words, more in commands.items():
        master, slave = os.openpty()
        with open(slave, "w") as terminal, open(master, "rb", buffering=0) as screen:
            os.set_blocking(master, False)
            monkeypatch.setattr(sys, "stderr", terminal)
            assert main([*words.split(), *more]) == 0
            monkeypatch.undo()
            drawn = b"".join(iter(screen.readall, None)).decode()
        ends = re.findall(r"\r100 % of [1-9][0-9.]* [kM]B  (.*)", drawn)
        assert len(ends) == len(ways[words]), (words, drawn)
        for end, doing in zip(ends, ways[words], strict=True):
            assert end.startswith(doing), (words, drawn)
    assert main(["verify", run]) == 0
    assert re.search(r"tensors, [1-9][0-9.]* [kM]B, every", capsys.readouterr().out)
    assert capsys.readouterr().err == ""
