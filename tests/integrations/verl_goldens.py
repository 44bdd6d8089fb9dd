"""The golden numbers as tensors. tests/golden/README.md has their provenance and how to compare."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def golden():
    return json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))


@cache
def arrays(name):
    with np.load(GOLDEN / name) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def by_name(kind):
    return {case["name"]: case for case in golden()[kind]}


def numbers(metrics):
    """JSON writes nan and ±inf as text."""
    return {name: float(value) for name, value in metrics.items()}


def assert_metrics(actual, expected, *, rtol, atol=0.0, keys="same"):
    if keys == "same":
        assert set(actual) == set(expected)
    wrong = {
        name: (actual[name], value)
        for name, value in expected.items()
        if not np.isclose(actual[name], value, rtol=rtol, atol=atol, equal_nan=True)
    }
    assert not wrong, f"(actual, expected): {wrong}"
