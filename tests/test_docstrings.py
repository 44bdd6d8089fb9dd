"""Docstrings of public names say what they take, in which shape and unit, and how they fail."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT = Path(__file__).with_name("docstring_faults.txt")


def faults():
    path = ROOT / "tools" / "docstring_faults.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


def test_no_public_name_lacks_more_than_the_list_says():
    """The list may only get shorter: whoever writes a docstring takes its line out."""
    left = [line for line in LEFT.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found = faults().docstring_faults()
    assert sorted(set(found) - set(left)) == [], "write these docstrings"
    assert sorted(set(left) - set(found)) == [], "these are written: take them out of the list"


def test_a_docstring_without_shapes_or_errors_is_found(monkeypatch):
    module = faults()

    def halve(log_prob: "Tensor", other: "Tensor") -> None:  # noqa: F821
        """Halve it."""
        raise ValueError("never")

    assert list(module._of_function("halve", halve)) == [
        "halve: no line for log_prob, other",
        "halve: no shape",
        "halve: no unit",
        "halve: no errors",
    ]
