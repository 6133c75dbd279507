"""What a user can get wrong, by the command: one clear sentence, and nothing left behind."""

import errno
import json
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from forks import exit_code, fork
from safetensors.torch import load_file, save_file

from mcore_base.atomic_files import write_durably
from mcore_ckpt.cli import main
from mcore_ckpt.conversion.conversion import convert
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.index import INDEX
from mcore_ckpt.storage.outputs import fresh_step
from mcore_ckpt.storage.paths import RELEASE, TRACKER
from mcore_parallel.mesh import SINGLE

D, F, V = 12, 10, 17
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": D,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "intermediate_size": F,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens": (V, D),
    "model.norm": (D,),
    "lm_head": (V, D),
    **{f"{LAYER}self_attn.{p}_proj": (D, D) for p in "qo"},
    **{f"{LAYER}self_attn.{p}_proj": (D // 2, D) for p in "kv"},
    **{f"{LAYER}mlp.{p}_proj": (F, D) for p in ("gate", "up")},
    f"{LAYER}mlp.down_proj": (D, F),
    f"{LAYER}input_layernorm": (D,),
    f"{LAYER}post_attention_layernorm": (D,),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A Llama folder with a tokenizer, and the same as each other format."""
    home = tmp_path_factory.mktemp("sound")
    (home / "hf").mkdir()
    (home / "hf" / "config.json").write_text(json.dumps(CONFIG))
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}
    save_file(weights, home / "hf" / "model.safetensors")
    vocab = {f"word{i}": i for i in range(15)}
    added = [{"id": 15, "content": "<s>"}, {"id": 16, "content": "</s>"}]
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": added}
    (home / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer))
    for form in ("mcore", "megatron", "dcp"):
        convert("hf", home / "hf", form, home / form)
    return home


@pytest.fixture
def home(sound, tmp_path, monkeypatch):
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(words, capsys):
    """Run the command; return its code and what it told."""
    try:
        code = main(words.split())
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr()
    return code, told.err + told.out


def configure(**values):
    def change(home):
        Path(home, "hf", "config.json").write_text(json.dumps({**CONFIG, **values}))

    return change


def weigh(change_weights):
    def change(home):
        file = Path(home, "hf", "model.safetensors")
        save_file(change_weights(load_file(file)), file)

    return change


def write(path, content):
    def change(home):
        Path(home, path).write_bytes(content)

    return change


def delete(path):
    def change(home):
        Path(home, path).unlink()

    return change


def for_an_engine(home):
    Path(home, "hf/model.safetensors").rename(Path(home, "hf/rank0.safetensors"))


def shards_without_one(home):
    delete("hf/model.safetensors")(home)
    places = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    write("hf/model.safetensors.index.json", json.dumps(places).encode())(home)


def without_ups(tensors):
    return {name: t for name, t in tensors.items() if "up_proj" not in name}


def narrow_queries(tensors):
    name = f"{LAYER}self_attn.q_proj.weight"
    return tensors | {name: tensors[name][:, :5].contiguous()}


IN = "convert hf-to-mcore --input hf --output out"
WRONG = {
    "an unknown family": (configure(model_type="codegen"), IN, 2, "'codegen' is not known"),
    "two architectures": (
        configure(architectures=["LlamaForCausalLM", "MistralForCausalLM"]),
        IN,
        2,
        "must name one class of that type",
    ),
    "another family's architecture": (
        configure(architectures=["MistralForCausalLM"]),
        IN,
        2,
        "model_type 'llama' and architectures ['MistralForCausalLM']",
    ),
    "a field that is missing": (configure(hidden_size=None), IN, 2, "lacks hidden_size"),
    "a field of another kind": (configure(hidden_size="big"), IN, 2, "hidden_size='big'"),
    "no heads": (configure(num_attention_heads=0), IN, 2, "a whole number from 1"),
    "heads of another model": (
        configure(num_attention_heads=4, head_dim=6),
        IN,
        2,
        "blocks.0.attention.qkv.q.weight: [12, 12] in the file, [24, 12] by config.json",
    ),
    "key-value heads of another model": (
        configure(num_key_value_heads=2),
        IN,
        2,
        "blocks.0.attention.qkv.k.weight: [6, 12] in the file, [12, 12] by config.json",
    ),
    "a vocabulary of another model": (
        configure(vocab_size=99),
        IN,
        2,
        "embedding.weight: [17, 12] in the file, [99, 12] by config.json",
    ),
    "more layers than tensors": (
        configure(num_hidden_layers=10**12),
        IN,
        2,
        "config.json has num_hidden_layers=1000000000000, but the checkpoint has 12 tensors",
    ),
    "more experts than tensors": (
        configure(model_type="mixtral", architectures=[], num_local_experts=10**12),
        f"{IN} --keep-unknown-config-fields",
        2,
        "num_local_experts=1000000000000, but the checkpoint has 12 tensors, enough for 12",
    ),
    "a tokenizer that is damaged": (
        write("hf/tokenizer.json", b"{"),
        IN,
        1,
        "tokenizer.json is damaged: Expecting",
    ),
    "a tokenizer without ids": (
        write("hf/tokenizer.json", b'{"added_tokens": [{"content": "a"}]}'),
        IN,
        1,
        "tokenizer.json is damaged: KeyError('id')",
    ),
    "a matrix that is too narrow": (weigh(narrow_queries), IN, 2, "[12, 5] in the file"),
    "a config that is no object": (
        write("hf/config.json", b"[]"),
        IN,
        1,
        "is not a JSON object",
    ),
    "a config that is cut": (write("hf/config.json", b"{"), IN, 1, "config.json is damaged"),
    "a weight that is missing": (weigh(without_ups), IN, 2, f"missing: {LAYER}mlp.up_proj"),
    "a tied head that differs": (
        configure(tie_word_embeddings=True),
        IN,
        2,
        "lm_head.weight differs from",
    ),
    "a shard that is missing": (shards_without_one, IN, 1, "of-00002.safetensors is missing"),
    "an empty weight file": (write("hf/model.safetensors", b""), IN, 1, "header too small"),
    "an engine's weights": (for_an_engine, IN, 2, "hf is a checkpoint for TensorRT-LLM"),
    "no weights": (
        delete("hf/model.safetensors"),
        IN,
        2,
        "hf has no weights: it must have model.safetensors",
    ),
    "an absent input": (
        None,
        IN.replace("hf --", "absent --"),
        2,
        "absent is not a Hugging Face",
    ),
    "a file as input": (
        None,
        IN.replace("--input hf", "--input hf/config.json"),
        2,
        "hf/config.json is not a Hugging Face folder",
    ),
    "an output that exists": (
        None,
        IN.replace("--output out", "--output mcore"),
        1,
        "already holds a complete",
    ),
    "an output in the way": (
        None,
        "convert mcore-to-hf --input mcore --output hf",
        2,
        "hf exists and is not empty",
    ),
    "an output in the input": (
        None,
        IN.replace("--output out", "--output hf/out"),
        2,
        "--output hf/out is inside hf, which is read",
    ),
    "an output that is the input": (
        None,
        IN.replace("--output out", "--output hf"),
        2,
        "is read and must stay unchanged",
    ),
    "an output below a file": (
        write("note", b""),
        IN.replace("--output out", "--output note/out"),
        2,
        "note is a file",
    ),
    "fewer rows than tokens": (None, f"{IN} --vocab-size 16", 2, "has 17: give 17 or more"),
    "a negative vocabulary": (None, f"{IN} --vocab-size -1", 2, "must be 0 or more"),
    "an unknown dtype": (None, f"{IN} --dtype int3", 2, "--dtype int3 is not known: use fp32"),
    "an unknown size": (None, f"{IN} --max-shard-size five", 2, "five is not a size"),
    "an unknown direction": (
        None,
        IN.replace("hf-to-mcore", "hf-to-onnx"),
        2,
        "use FROM-to-TO",
    ),
    "an unknown flag": (None, f"{IN} --dytpe bf16", 2, "did you mean --dtype?"),
    "a family that cannot express it": (
        None,
        "convert mcore-to-hf --input mcore --output out --model-type gpt2",
        2,
        "gpt2 cannot express this model",
    ),
    "an unknown family to write": (
        None,
        "convert mcore-to-hf --input mcore --output out --model-type gtp2",
        2,
        "'gtp2' is not known",
    ),
    "another format's folder": (
        None,
        "convert megatron-to-hf --input hf --output out",
        2,
        "holds neither .metadata nor mp_rank_00",
    ),
    "another format where ours is wanted": (
        None,
        "convert mcore-to-dcp --input hf --output out",
        2,
        "hf is a checkpoint in the format hf, but mcore is required",
    ),
    "another format to verify": (
        None,
        "verify hf",
        2,
        "convert it with mcore-ckpt convert hf-to-mcore",
    ),
    "another format to average": (
        None,
        "average mcore hf --output out",
        2,
        "hf is a checkpoint in the format hf",
    ),
    "a method without its base": (
        None,
        "merge hf hf --method ties --output out",
        2,
        "--method ties needs --base",
    ),
    "an arc between three models": (
        None,
        "merge hf hf hf --method slerp --output out",
        2,
        "give 2 checkpoints, not 3",
    ),
    "factors for other models": (
        None,
        "merge hf hf --weights 1 --output out",
        2,
        "--weights has 1 numbers for 2 checkpoints",
    ),
    "a file without its index": (
        delete("mcore/release/index.json"),
        "convert mcore-to-hf --input mcore --output out",
        2,
        "release holds no complete checkpoint",
    ),
    "an index without its file": (
        delete("mcore/release/rank_00000.safetensors"),
        "convert mcore-to-hf --input mcore --output out",
        1,
        "rank_00000.safetensors is missing, but the index lists it",
    ),
    "an index that is cut": (
        write(f"mcore/release/{INDEX}", b'{"format": "mcore"'),
        "inspect mcore",
        1,
        "index.json is damaged",
    ),
    "a pointer to nothing": (
        write(f"mcore/{TRACKER}", b"12"),
        "inspect mcore",
        2,
        "iter_0000012 holds no complete checkpoint",
    ),
    "a pointer that is no step": (
        write(f"mcore/{TRACKER}", b"banana"),
        "verify mcore",
        2,
        "it must hold a step or 'release'",
    ),
    "nothing to look at": (None, "inspect absent", 2, "absent is not a folder"),
    "nothing to compare with": (
        None,
        "inspect mcore --compare absent",
        2,
        "absent is not a folder",
    ),
    "one to average": (None, "average mcore --output out", 2, "give two checkpoints or more"),
    "a step resharded onto itself": (
        None,
        "reshard mcore --output mcore",
        1,
        "never overwritten",
    ),
    "a step resharded into itself": (
        None,
        "reshard mcore --output mcore/release/more",
        2,
        "is inside mcore/release, which is read",
    ),
    "an average in one of its own": (
        None,
        "average mcore mcore --output mcore/release",
        2,
        "is inside mcore/release, which is read",
    ),
    "a file to reshard to": (
        None,
        "reshard mcore --output hf/config.json",
        2,
        "hf/config.json is a file",
    ),
    "an output that the system keeps for itself": (
        None,
        IN.replace("--output out", "--output /proc/x"),
        2,
        "--output /proc/x cannot be made in /proc",
    ),
    "a link to nothing as output": (
        lambda home: Path(home, "link").symlink_to("nowhere"),
        IN.replace("--output out", "--output link"),
        2,
        "link is a broken link",
    ),
    "an output that is empty": (
        None,
        IN.replace("--output out", "--output="),
        2,
        "--output is empty: give a folder.",
    ),
    "Megatron's run folder for an average": (
        None,
        "average mcore mcore --output megatron",
        2,
        "holds a checkpoint in the format megatron (megatron/release)",
    ),
    "Megatron's run folder to reshard to": (
        None,
        "reshard mcore --output megatron",
        2,
        "holds a checkpoint in the format megatron",
    ),
    "Megatron's run folder to convert to": (
        None,
        IN.replace("--output out", "--output megatron"),
        2,
        "holds a checkpoint in the format megatron",
    ),
    "torch's directory for a run folder": (
        None,
        IN.replace("--output out", "--output dcp"),
        2,
        "holds a checkpoint in the format dcp",
    ),
    "more than the disk holds": (
        None,
        f"{IN}/far/below --vocab-size {10**15}",
        1,
        "needs 9.6e+04 TB",
    ),
    "names that are not known, far below": (
        None,
        "convert hf-to-dcp --input hf --output out/far/below --dcp-names theirs",
        2,
        "--dcp-names theirs is not known",
    ),
    "names of a format that is not written": (
        None,
        f"{IN} --dcp-names hf",
        2,
        "--dcp-names has no effect on an output in the format mcore, only on dcp",
    ),
    "files of a size that ours have not": (
        None,
        f"{IN} --max-shard-size 1MB",
        2,
        "--max-shard-size has no effect on an output in the format mcore",
    ),
    "a family where no names are its own": (
        None,
        "convert hf-to-dcp --input hf --output out --model-type mistral",
        2,
        "--model-type has no effect on an output in the format dcp",
    ),
    "a config where the input has one": (
        None,
        f"{IN} --config hf/config.json",
        2,
        "--config hf/config.json has no effect: hf itself names its model",
    ),
    "a config where our own directory of torch's has one": (
        None,
        "convert dcp-to-hf --input dcp --output out --config hf",
        2,
        "--config hf has no effect: dcp itself names its model",
    ),
    "a config where our own folder of Megatron's has one": (
        None,
        "convert megatron-to-mcore --input megatron --output out --config hf",
        2,
        "--config hf has no effect: megatron itself names its model",
    ),
    "a config to compare what needs none": (
        None,
        "inspect dcp --compare megatron --config hf",
        2,
        "--config hf has no effect: both checkpoints themselves name their model",
    ),
    "a config to compare two of ours": (
        None,
        "inspect mcore --compare mcore --config hf",
        2,
        "--config hf has no effect: both checkpoints themselves name their model",
    ),
    "a config to look at one with": (
        None,
        "inspect mcore --config hf",
        2,
        "--config hf has no effect without --compare",
    ),
    "JSON of a comparison": (
        None,
        "inspect mcore --compare hf --as-json",
        2,
        "--as-json lists one checkpoint",
    ),
    "a size without end": (None, f"{IN} --max-shard-size 1e400", 2, "1e400 is not a size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_and_leaves_nothing_behind(home, capsys, name):
    break_it, words, code, message = WRONG[name]
    if break_it:
        break_it(home)
    before = sorted(home.rglob("*"))
    found, told = said(words, capsys)
    assert message in told
    assert found == code
    assert "Traceback" not in told
    assert sorted(home.rglob("*")) == before


def test_a_folder_without_a_tokenizer_says_so(home, capsys):
    delete("hf/tokenizer.json")(home)
    code, told = said(IN, capsys)
    assert code == 0
    assert "There was no tokenizer to copy." in told


def in_a_child(words, prepare):
    """Run the command in a process of its own, after ``prepare``; return code and errors."""
    reader, writer = os.pipe()  # a disk that is full takes no errors either

    def work():
        os.dup2(writer, 2)
        prepare()
        with open(1, "w", closefd=False) as sys.stdout, open(2, "w") as sys.stderr:
            return main(words.split())

    code = exit_code(fork(work))
    os.close(writer)
    with open(reader) as told:
        return code, told.read()


@pytest.mark.parametrize("num_bytes", [10, 4000])
@pytest.mark.parametrize(
    "words",
    [
        *(f"convert hf-to-{form} --input hf" for form in ("mcore", "hf", "megatron", "dcp")),
        "reshard mcore",
        "average mcore mcore",
    ],
)
def test_a_full_disk_is_told_and_nothing_of_the_output_stays(home, words, num_bytes):
    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.dont_write_bytecode = True  # it would be cut short
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    before = sorted(home.rglob("*"))
    code, told = in_a_child(f"{words} --output far/below", fill)
    assert code == 1
    assert "the disk or a quota is full" in told
    assert "cannot write far/" in told
    assert sorted(home.rglob("*")) == before


def test_an_output_that_was_there_and_empty_stays_so(home, capsys):
    flipped("mcore/release/rank_00000.safetensors", -5)(home)
    (home / "out").mkdir()
    assert said("reshard mcore --output out", capsys)[0] == 1
    assert list((home / "out").iterdir()) == []


def test_a_step_that_no_pointer_names_goes_with_the_error(tmp_path):
    def fail():
        with fresh_step(tmp_path / "far" / "below", RELEASE) as step:
            write_durably(step / INDEX, b"{}")
            raise OSError("no pointer")

    with pytest.raises(OSError, match="no pointer"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_save_clears_no_step_of_megatrons_away(home):
    before = sorted(home.rglob("*"))
    with pytest.raises(
        CheckpointError, match=r"release holds \.metadata: it is a checkpoint of another"
    ):
        save(home / "megatron", RELEASE, {}, world=SINGLE)
    old = home / "old" / "iter_0000007" / "mp_rank_00"
    old.mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match="iter_0000007 holds mp_rank_00: it is a checkpoint of"
    ):
        save(home / "old", 7, {}, world=SINGLE)
    shutil.rmtree(home / "old")
    assert sorted(home.rglob("*")) == before


def test_an_interrupt_leaves_nothing_either(home):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = sorted(home.rglob("*"))
    for form in ("mcore", "hf"):
        with pytest.raises(KeyboardInterrupt):
            convert("hf", "hf", form, "far/below", on_progress=interrupt)
    assert sorted(home.rglob("*")) == before


def test_a_command_that_is_ended_says_so_and_leaves_signals_as_they_were(
    home, monkeypatch, capsys
):
    def end(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        return "went on"

    monkeypatch.setattr("mcore_ckpt.conversion.inspection.describe", end)
    before = signal.getsignal(signal.SIGTERM)
    assert said("inspect mcore", capsys) == (1, "mcore-ckpt: error: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_command_in_another_thread_leaves_signals_alone(home, capsys):
    # Only the main thread may set a handler: Python refuses it with a ValueError elsewhere.
    before, codes = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: codes.append(main(["inspect", "mcore"])))
    thread.start()
    thread.join(60)
    told = capsys.readouterr()
    assert codes == [0], told.err
    assert "12 tensors" in told.out
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_a_killed_command_left_goes_with_the_next_to_the_same_output(home, caplog):
    def die_while_weights_are_written():
        def look(event, arguments):
            path = str(arguments[0]) if event == "open" else ""
            if ".out.partial" in path and path.endswith("safetensors"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)

    words = "convert mcore-to-hf --input mcore --output out"
    before = {path.name for path in home.iterdir()}
    code, told = in_a_child(words, die_while_weights_are_written)
    assert code == -signal.SIGKILL, told
    assert {path.name for path in home.iterdir()} == before | {".out.partial"}
    assert main(words.split()) == 0
    assert "taking over the lock of dead process" in caplog.text
    assert "of a killed command" in caplog.text
    assert {path.name for path in home.iterdir()} == before | {"out"}
    files = {path.name for path in (home / "out").iterdir()}
    assert files == {path.name for path in (home / "hf").iterdir()} | {"tokenizer_config.json"}


def test_a_disk_that_does_not_answer_is_told_as_one_that_is_read(home, monkeypatch, capsys):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    code, told = said("reshard mcore --output far/below", capsys)
    assert code == 1
    assert "error: cannot read mcore/release/rank_00000.safetensors: [Errno 5]" in told
    assert not (home / "far").exists()


def test_a_reader_that_has_had_enough_is_no_error(home):
    reader, writer = os.pipe()
    os.close(reader)
    assert in_a_child("inspect mcore", lambda: os.dup2(writer, 1)) == (0, "")
    os.close(writer)


def test_what_our_own_directory_says_about_itself_is_not_left_behind(home, capsys):
    code, told = said("convert dcp-to-mcore --input dcp --output out", capsys)
    assert code == 0
    assert "Left behind" not in told


def flipped(path, place):
    def change(home):
        content = bytearray((home / path).read_bytes())
        content[place % len(content)] ^= 1
        (home / path).write_bytes(content)

    return change


def cut_short(path, part=0.5):
    def change(home):
        content = (home / path).read_bytes()
        (home / path).write_bytes(content[: int(len(content) * part)])

    return change


OURS = "mcore/release"
DAMAGED = {
    "a byte of ours": ("mcore", flipped(f"{OURS}/rank_00000.safetensors", -5)),
    "a file of ours": ("mcore", cut_short(f"{OURS}/rank_00000.safetensors")),
    "our index": ("mcore", cut_short(f"{OURS}/index.json")),
    "our pointer": ("mcore", write(f"mcore/{TRACKER}", b"\xff\x00")),
    "a header of theirs": ("hf", write("hf/model.safetensors", b"\xff" * 40)),
    "a length of theirs": ("hf", write("hf/model.safetensors", b"\0" * 5)),
    "a file of theirs": ("hf", cut_short("hf/model.safetensors", 0.9)),
    "a config": ("hf", write("hf/config.json", b"[1, 2]")),
    "Megatron's list": ("megatron", cut_short("megatron/release/.metadata")),
    "Megatron's file": ("megatron", cut_short("megatron/release/__0_0.distcp")),
    "Megatron's bytes": ("megatron", write("megatron/release/__0_0.distcp", bytes(9000))),
    "torch's list": ("dcp", flipped("dcp/.metadata", 30)),
    "torch's file": ("dcp", cut_short("dcp/__0_0.distcp", 0.9)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_ends_every_command_with_one_line(home, capsys, name):
    form, damage = DAMAGED[name]
    damage(home)
    before = sorted(home.rglob("*"))
    other = "mcore" if form != "mcore" else "hf"
    commands = [
        f"convert {form}-to-{other} --input {form} --output far/below",
        f"inspect {form} --compare {other}",
        f"verify {form}",
        f"reshard {form} --output far/below",
        f"average {form} {form} --output far/below",
    ]
    for words in commands if form == "mcore" else commands[:2]:
        code, told = said(words, capsys)
        assert code in (1, 2), (words, told)
        assert told.startswith("mcore-ckpt: error: "), (words, told)
        assert told.count("\n") == 1, (words, told)
        assert sorted(home.rglob("*")) == before


def test_a_fault_of_the_program_shows_where_it_is(home, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("mcore_ckpt.conversion.inspection.describe", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["inspect", "mcore"])
