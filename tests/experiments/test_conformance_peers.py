"""The recorded grades of other frameworks, and the way in which their definitions are taken from files."""

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
    assert len(entries) == 11
    for entry in entries:
        verdicts = [grade["verdict"] for grade in entry["grades"]]
        assert len(verdicts) == len(PROPERTIES)
        assert set(verdicts) <= {"pass", "fail", "not applicable"}


def test_definitions_run_unchanged(tmp_path):
    file = tmp_path / "theirs.py"
    code = "import heavy\n\nLIMIT: float = 2.0\n\n\nclass Theirs(heavy.Base):\n"
    code += "    def clip(self, x: heavy.Tensor):\n        return min(x, LIMIT)\n"
    file.write_text(code, encoding="utf-8")
    names = peers.definitions(file, "LIMIT Theirs.clip")
    assert names["clip"](None, 3.0) == 2.0
    with pytest.raises(ImportError, match="does not define"):
        peers.definitions(file, "LIMIT missing")
