import io
import re
import signal
import subprocess
import sys

import pytest

from mcore_ckpt import mcore_to_hf
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import SamplingConfig, cli, generate_text, load_model
from mcore_infer.cli import main
from mcore_parallel.mesh import ParallelContext


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


def test_generate_reads_a_hugging_face_folder_and_gives_samples(run_folder, tmp_path, capsys):
    mcore_to_hf(run_folder, tmp_path / "hf")
    words = ["--prompt", "In", "And", "--num-samples", "2", "--num-tokens", "4"]
    words += ["--inference-max-requests", "1", "--min-p", "0.01", "--seed", "5"]
    texts = []
    for folder in (tmp_path / "hf", run_folder):
        tokenizer = ["--tokenizer", str(tmp_path / "bytes")]
        ByteTokenizer().save(tmp_path / "bytes")
        assert main(["generate", "--load", str(folder), *tokenizer, *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    samples = texts[0].split("\n\n")[:4]
    assert [text[:2] for text in samples] == ["In", "In", "An", "An"]
    assert samples[0] != samples[1]


def test_every_end_that_a_hugging_face_folder_names_ends_texts(
    run_folder, loaded, tmp_path, monkeypatch, capsys
):
    mcore_to_hf(run_folder, tmp_path / "hf")
    ByteTokenizer().save(tmp_path / "bytes")
    (tmp_path / "chat.jinja").write_text("{{ messages[-1].content }}")
    sampling = SamplingConfig(num_tokens=6, top_k=1)
    (whole,) = generate_text(loaded.model, loaded.tokenizer, ["In"], sampling)
    end = ord(whole[3])
    ends = f'{{"eos_token_id": [256, {end}]}}'
    (tmp_path / "hf" / "generation_config.json").write_text(ends)
    words = ["--load", str(tmp_path / "hf"), "--tokenizer", str(tmp_path / "bytes")]
    words += ["--num-tokens", "6", "--top-k", "1"]
    template = ["--chat-template", str(tmp_path / "chat.jinja")]
    cut = whole[: whole.index(chr(end))]
    for options, text in (((), cut), (("--ignore-eod",), whole)):
        assert main(["generate", *words, "--prompt", "In", *options]) == 0
        assert capsys.readouterr().out == f"In{text}\n"
        monkeypatch.setattr("sys.stdin", io.StringIO("In\n"))
        assert main(["chat", *words, *template, *options]) == 0
        assert capsys.readouterr().out == f"> {text}\n> \n"


def test_generate_proposes_holds_and_searches(run_folder, tmp_path, capsys):
    def text(*options):
        words = ["--load", str(run_folder), "--prompt", "In the", "--num-tokens", "20"]
        assert main(["generate", *words, "--seed", "5", *options]) == 0
        return capsys.readouterr().out.removeprefix("In the").removesuffix("\n")

    plain = text()
    proposing = ("--num-speculative-tokens", "2", "--speculative-drafts")
    assert text(*proposing, "ngram") == plain
    assert text(*proposing, "model", "--draft-load", str(run_folder)) == plain
    assert re.fullmatch("[ab]{3}", text("--regex", "[ab]{3}"))
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    assert text("--json-schema", f"@{schema}") in ('"yes"', '"no"')
    beams = ("--beam-width", "2", "--num-tokens", "3")
    best = text(*beams)
    assert best == text(*beams, "--inference-max-requests", "1") != plain
    both = text(*beams, "--prompt", "In the", "In the")
    assert both == f"{best}\n\nIn the{best}\n"
    words = ["generate", "--load", str(run_folder), "--regex", "a", "--json-schema", "{}"]
    assert main(words) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_generate_writes_on_an_engine_where_there_is_recurrent_state(hybrid_folder, capsys):
    words = ["generate", "--load", str(hybrid_folder), "--prompt", "In", "And so"]
    assert main([*words, "--num-tokens", "4", "--seed", "5"]) == 0
    loaded = load_model(hybrid_folder, ParallelContext.single())
    sampling = SamplingConfig(num_tokens=4)
    texts = generate_text(loaded.model, loaded.tokenizer, ["In", "And so"], sampling, 5)
    assert capsys.readouterr().out == f"In{texts[0]}\n\nAnd so{texts[1]}\n\n"


class _InterruptingOut(io.StringIO):
    """Standard output that presses Ctrl-C when an answer begins."""

    def write(self, text):
        if text not in ("> ", "\n", ""):
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize("kind", ["run_folder", "hybrid_folder"])
def test_a_chat_answers_in_the_template_and_remembers(kind, request, tmp_path, monkeypatch,
                                                      capsys):  # fmt: skip
    folder = request.getfixturevalue(kind)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}")
    words = ["chat", "--load", str(folder), "--chat-template", str(template)]
    words += ["--num-tokens", "5", "--top-k", "1", "--system", "x"]
    lines = "ab\ncd\n/reset\nab\n" + "e" * 40 + "\n/exit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(words) == 0
    out, errors = capsys.readouterr()
    loaded = load_model(folder, ParallelContext.single())

    def answer(prompt):
        sampling = SamplingConfig(num_tokens=5, top_k=1)
        return generate_text(loaded.model, loaded.tokenizer, [prompt], sampling)[0]

    first = answer("s:x\nu:ab\n")
    second = answer(f"s:x\nu:ab\na:{first}\nu:cd\n")
    assert out == f"> {first}\n> {second}\n> > {first}\n> \n> "
    assert "maximum context length was exceeded" in errors


def test_ctrl_c_ends_an_answer_and_not_the_chat(run_folder, loaded, tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text("{{ messages[-1].content }}")
    out = _InterruptingOut()
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n/exit\n"))
    monkeypatch.setattr("sys.stdout", out)
    words = ["chat", "--load", str(run_folder), "--num-tokens", "20", "--seed", "3"]
    words += ["--chat-template", str(tmp_path / "chat.jinja"), "--ignore-eod"]
    assert main(words) == 0
    sampling = SamplingConfig(num_tokens=20, ignore_eod=True)
    (whole,) = generate_text(loaded.model, loaded.tokenizer, ["ab"], sampling, 3)
    answer = out.getvalue().split("> ")[1].removesuffix("\n")
    assert whole.startswith(answer)
    assert 0 < len(answer) < 5 < len(whole)


def test_eval_prints_bits_per_byte(run_folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("In the beginning was the word.")
    words = ["eval", "--load", str(run_folder), "--valid-data", str(tmp_path / "text.txt")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    assert "30 tokens | 30 bytes" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "--load", "RUN", "--temperature", "0"], "--top-k 1"),
        (["generate", "--load", "RUN", "--prompt", "a" * 50], "maximum context length"),
        (
            ["generate", "--load", "RUN", "--prompt", "abc", "--inference-max-seq-length", "3"],
            "--inference-max-seq-length 3",
        ),
        (
            ["generate", "--load", "RUN", "--inference-max-requests", "0"],
            "--inference-max-requests 0 must be 1",
        ),
        (["generate", "--load", "RUN", "--expert-tensor-parallel-size", "1"], "leave out"),
        (["generate", "--load", "RUN", "--num-samples", "0"], "--num-samples 0"),
        (["generate", "--load", "RUN", "--num-samples", "2", "--beam-width", "2"], "one text"),
        (["generate", "--load", "RUN", "--num-speculative-tokens", "32"], "propose fewer"),
        (["generate", "--load", "RUN", "--regex", "[0-9"], "unclosed character class"),
        (["eval", "--load", "RUN", "--valid-data", "/dev/null"], "has no text"),
        (
            ["eval", "--load", "RUN", "--valid-data", "/dev/null", "--micro-batch-size", "0"],
            "--micro-batch-size 0",
        ),
        (
            [
                "export",
                "--load",
                "RUN",
                "--output",
                "OUT",
                "--format",
                "trtllm",
                "--max-shard-size",
                "1MB",
            ],
            "--max-shard-size has no effect",
        ),
        (
            [
                "quantize",
                "--load",
                "RUN",
                "--output",
                "OUT",
                "--method",
                "int8",
                "--calibration-data",
                "/dev/null",
                "--micro-batch-size",
                "0",
            ],
            "must be 1 or more",
        ),
        (["generate", "--load", "RUN", "--tokenizer", "NOWHERE"], "NOWHERE"),
        (["generate", "--load", "NOWHERE"], "NOWHERE is not a folder"),
        (["generate", "--load", "ABOVE"], ", which holds it."),
        (["generate", "--load", "RUN", "--ckpt-step", "3"], "Complete steps there: 7"),
        (["eval", "--load", "RUN", "--valid-data", "NOWHERE"], "NOWHERE"),
        (["generate", "--load", "RUN", "--temprature", "1"], "--temperature"),
        (["eval", "--load", "RUN", "--valid-data", "RUN"], "is a folder: give a text file"),
        (["generate", "--load", "RUN", "--seed", str(10**20)], "from -2^62 to 2^62"),
        (["write"], "The commands are generate, chat, serve, eval"),
    ],
)
def test_bad_input_ends_with_two_and_one_clear_line(run_folder, words, message, capsys):
    folders = {"RUN": run_folder, "ABOVE": run_folder.parent}
    assert main([str(folders.get(word, word)) for word in words]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "words",
    [
        ["quantize", "--method", "int8", "--calibration-data", "/dev/null"],
        ["export", "--format", "hf-quant"],
    ],
)
def test_commands_that_write_a_folder_take_one_process(words, monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main([*words, "--load", "no", "--output", "out"]) == 2
    assert "runs in one process: start it without torchrun" in capsys.readouterr().err


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
