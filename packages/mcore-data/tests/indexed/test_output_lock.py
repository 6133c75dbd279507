"""Outputs that stay, are replaced when asked, and have one writer at a time."""

import resource
import sys

import pytest
from forks import exit_code, fork

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed.manifest import read_manifest
from mcore_data.indexed.output_lock import only_writer
from mcore_data.preprocessing.preprocessing import preprocess


def make(folder, **options):
    config = {"input": (str(folder / "in.jsonl"),), "output_prefix": str(folder / "out")}
    tokenizer = TokenizerConfig(tokenizer_type="ByteTokenizer")
    return preprocess(PreprocessConfig(**(config | options)), tokenizer)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": "three"}\n')
    return tmp_path


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_other_options_made_stays_until_it_may_be_replaced(source, partitions):
    make(source, partitions=partitions)
    make(source, partitions=partitions)
    bin_file = source / "out_text_document.bin"
    manifest = read_manifest(source / "out_text_document")
    with pytest.raises(ValueError, match=r"out_text_document\.bin exists and was .*--over"):
        make(source, partitions=partitions, append_eod=True)
    assert len(bin_file.read_bytes()) == 2 * len("onethree")
    assert read_manifest(source / "out_text_document") == manifest
    make(source, partitions=partitions, append_eod=True, overwrite=True)
    assert len(bin_file.read_bytes()) == 2 * (len("onethree") + 2)
    (source / "out_text_document.manifest.json").unlink()
    if partitions == 1:  # joined pairs are told by those of their parts
        with pytest.raises(ValueError, match="--overwrite"):
            make(source, append_eod=True)


def test_a_new_run_that_fails_leaves_the_old_pair_and_its_manifest(source):
    make(source)
    before = {path.name: path.read_bytes() for path in source.glob("out_text*")}
    (source / "in.jsonl").write_text('{"text": "other"}\nnot JSON\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        make(source, overwrite=True)
    after = {path.name: path.read_bytes() for path in source.glob("out_text*")}
    assert after.items() >= before.items()


def test_two_processes_do_not_write_one_prefix(source):
    with only_writer(source / "out"):
        assert exit_code(fork(lambda: refused(source))) == 0
    make(source)
    assert not (source / "out.lock").exists()


def refused(folder):
    with pytest.raises(ValueError, match="another process is writing it"):
        make(folder)


def test_a_full_disk_is_named_and_the_same_command_goes_on(source):
    lines = [f'{{"text": "{"word " * 50}{i}"}}\n' for i in range(400)]
    (source / "in.jsonl").write_text("".join(lines))
    make(source, output_prefix=str(source / "whole"))
    assert exit_code(fork(lambda: fill_up(source))) == 0
    assert not (source / "out_text_document.bin").exists()
    make(source)
    for suffix in (".bin", ".idx"):
        made, whole = (source / f"{name}_text_document{suffix}" for name in ("out", "whole"))
        assert made.read_bytes() == whole.read_bytes()


def fill_up(folder):
    sys.dont_write_bytecode = True  # it would be cut short
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    with pytest.raises(RuntimeError, match=r"disk is full .* repeat the command to continue"):
        make(folder)
