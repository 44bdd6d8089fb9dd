"""Docstrings of public names contain arguments, shapes, units, errors and sources."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def checker():
    path = ROOT / "tools" / "docstring_faults.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


def test_no_public_name_leaves_out_an_argument_a_shape_a_unit_an_error_or_a_source():
    assert checker().docstring_faults() == []


def test_a_docstring_without_shapes_or_errors_is_found():
    module = checker()

    def halve(log_prob: "Tensor", other: "Tensor") -> None:  # noqa: F821
        """Halve it."""
        raise ValueError("never")

    assert list(module._of_function("halve", halve)) == [
        "halve: no line for log_prob, other",
        "halve: no shape",
        "halve: no unit",
        "halve: no errors",
    ]
