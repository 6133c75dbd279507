"""Names in object stores, and files that appear whole, on a disk and in a store."""

import os
import sys

import fsspec
import pytest

from mcore_base.atomic_files import copy_durably, replace_file, write_durably
from mcore_base.stores import StorePath, as_path, object_version


@pytest.fixture(autouse=True)
def store():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    return system


def test_a_url_is_a_store_path_and_a_folder_or_file_url_a_plain_path():
    path = as_path("memory://bucket/run")
    assert isinstance(path, StorePath)
    assert (path / "a").url == "memory://bucket/run/a"
    assert str(as_path("a/b")) == "a/b"
    assert str(as_path("file:///a/b")) == "/a/b"


def test_a_store_that_is_not_installed_is_told_with_what_to_install(monkeypatch):
    with pytest.raises(ValueError, match="nowhere: use a scheme such as s3"):
        as_path("nowhere://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"pip install 'mcore-base\[s3\]'"):
        as_path("s3://bucket/run")
    with pytest.raises(ValueError, match=r"pip install 'mcore-base\[remote\]'"):
        as_path("memory://bucket/run")


def test_the_version_of_an_object_is_its_tag_or_its_time():
    assert object_version({"ETag": "", "etag": "b", "mtime": 3.0}) == "b"
    assert object_version({"size": 1, "mtime": 3.0}) == "3.0"
    assert object_version({"size": 1}) == ""


def test_a_file_that_is_not_written_to_its_end_does_not_appear(tmp_path):
    path = tmp_path / "a.bin"
    write_durably(path, b"old")

    def fail(file):
        file.write(b"half")
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        replace_file(path, fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]
    with pytest.raises(OSError, match="gone"):
        replace_file(path, fail, tmp_path / "a.partial")
    assert (tmp_path / "a.partial").exists()  # a caller that names it continues from it
    assert path.read_bytes() == b"old"


def test_a_file_is_flushed_before_it_has_its_name_and_its_folder_after(tmp_path, monkeypatch):
    path, flushed = tmp_path / "a.bin", []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append((handle, path.exists())))
    write_durably(path, b"x")
    assert [has_name for _, has_name in flushed] == [False, True]


def test_files_and_folders_are_copied_to_a_store_and_back(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.txt").write_bytes(b"text")
    copy_durably(tmp_path / "a", as_path("memory://bucket/a"))
    copy_durably(as_path("memory://bucket/a"), tmp_path / "c")
    assert (tmp_path / "c" / "b.txt").read_bytes() == b"text"
