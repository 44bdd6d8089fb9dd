"""The recorded grades of other frameworks, and the way in which their definitions are taken from files."""

import inspect
import json
import sys
from pathlib import Path

import pytest

from rollcorr.conformance import PROPERTIES

FOLDER = Path(__file__).parents[2] / "experiments" / "conformance"
sys.path.insert(0, str(FOLDER))

import peers  # noqa: E402


def test_each_entry_grades_all_properties():
    entries = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    assert len(entries) == 12
    for entry in entries:
        verdicts = [grade["verdict"] for grade in entry["grades"]]
        assert len(verdicts) == len(PROPERTIES)
        assert set(verdicts) <= {"pass", "fail", "not applicable"}


def test_calls_on_the_page_are_those_that_ran():
    import grade_peers

    recorded = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    shown = [(entry["framework"], entry["how"], entry["origin"]) for entry in recorded]
    assert shown == [(peer.framework, peer.how, peer.origin) for peer in grade_peers.PEERS]
    source = inspect.getsource(peers)
    assert [entry["framework"] for entry in recorded if entry["call"] not in source] == []


def test_definitions_run_unchanged(tmp_path):
    file = tmp_path / "theirs.py"
    code = "import heavy\n\nLIMIT: float = 2.0\n\n\nclass Theirs(heavy.Base):\n"
    code += "    def clip(self, x: heavy.Tensor):\n        return min(x, LIMIT)\n"
    file.write_text(code, encoding="utf-8")
    names = peers.definitions(file, "LIMIT Theirs.clip")
    assert names["clip"](None, 3.0) == 2.0
    with pytest.raises(ImportError, match="does not define"):
        peers.definitions(file, "LIMIT missing")


def test_lines_on_the_page_are_those_that_ran():
    import lines

    recorded = json.loads((FOLDER / "lines.json").read_text(encoding="utf-8"))
    shown = [(entry["framework"], entry["code"], entry["place"], entry["run"]) for entry in recorded]
    assert shown == [(entry.framework, entry.code, entry.place, inspect.getsource(entry.run)) for entry in lines.LINES]


def test_lines_are_inserted_above_or_instead(tmp_path, monkeypatch):
    import lines

    (tmp_path / "theirs.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n", encoding="utf-8")
    monkeypatch.setattr(lines, "__file__", str(tmp_path / "a" / "b" / "lines.py"))
    entry = lines.LINES[0]._replace(file="theirs.py", code="x = not x")
    above = peers.definitions(lines.edited(entry, tmp_path, "if x:", replace=False), "f")
    assert [above["f"](x) for x in (True, False)] == [2, 1]
    instead = peers.definitions(lines.edited(entry, tmp_path, "if x:", replace=True), "f")
    assert instead["f"](True) == 2
