"""A file is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os

import pytest

from rollcorr.run_directory.durable_files import partial_path, write_text_durably


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
