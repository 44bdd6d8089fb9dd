"""A file is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os

import pytest

from rollcorr.run_directory.durable_files import (
    atomic_write,
    disk_failure,
    make_folder_durably,
    partial_path,
    remove_leftovers,
    write_text_durably,
)


def test_a_text_replaces_the_old_one(tmp_path):
    path = tmp_path / "config.yaml"
    write_text_durably(path, "first")
    write_text_durably(path, "zweitens: ü")
    assert path.read_text(encoding="utf-8") == "zweitens: ü"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_text_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "config.yaml"
    path.write_text("sound", encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_text_durably(path, "new")
    assert path.read_text(encoding="utf-8") == "sound"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_what_is_being_written_is_hidden_beside_its_place(tmp_path):
    assert partial_path(tmp_path / "step_000001") == tmp_path / ".step_000001.partial"


def chained(error, cause):
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(28, "No space left on device"), 28),
        (Exception("No space left on device (os error 28)"), 28),
        (chained(RuntimeError("unexpected pos 704 vs 598"), OSError(27, "File too large")), 27),
        (RuntimeError("shapes differ"), None),
        (chained(ValueError("a wrong option"), OSError(2, "No such file")), None),
        (OSError("without a number"), None),
    ],
)
def test_the_disk_is_found_behind_the_errors_of_libraries(error, number):
    found = disk_failure(error)
    assert (None if found is None else found.errno) == number


def test_a_folder_that_cannot_be_written_leaves_nothing_and_names_the_file(tmp_path):
    def write():
        with atomic_write(tmp_path / "reference", needed=9) as partial:
            partial.mkdir()
            (partial / "weights").touch()
            raise Exception("I/O error: No space left on device (os error 28)")

    with pytest.raises(
        OSError, match=r"weights was not written \(No space left on device\): 9 bytes needed, [\d,]+ free"
    ):
        write()
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_or_stays_as_it_was(tmp_path, monkeypatch):
    final = tmp_path / "reference"

    def write(text):
        with atomic_write(final) as partial:
            partial.mkdir()
            (partial / "weights").write_text(text, encoding="utf-8")

    for text in ("old", "new"):
        write(text)
        assert (final / "weights").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["reference"]

    # The second of the two renames fails, so the first one is undone.
    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="Input/output"):
        write("newest")
    assert (final / "weights").read_text(encoding="utf-8") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["reference"]


@pytest.mark.parametrize("successor", [False, True])
def test_a_folder_set_aside_comes_back_unless_its_successor_has_arrived(tmp_path, successor):
    (tmp_path / ".reference.set-aside").mkdir()
    (tmp_path / ".reference.set-aside" / "old").touch()
    if successor:
        (tmp_path / "reference").mkdir()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["reference"]
    assert (tmp_path / "reference" / "old").exists() != successor


def test_every_folder_that_is_made_is_flushed_in_the_one_above(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (flushed.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    make_folder_durably(tmp_path / "a" / "b")
    assert flushed == [str(tmp_path), str(tmp_path / "a")]
    make_folder_durably(tmp_path / "a" / "b")
    assert len(flushed) == 2
