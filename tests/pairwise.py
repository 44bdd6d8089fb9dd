"""Run pairs of parameters, not their product: `@pytest.mark.covering(2)` above the `parametrize` marks.

A full product runs a test hundreds of times and finds hardly more bugs than pairs of values. `covering(2)` runs a
set of cases in which every pair of values of two parameters occurs; `covering(1)`, one in which every value occurs.
Fixtures, such as `per_implementation`, multiply these cases as before.
"""

from __future__ import annotations

import itertools

import pytest


def covering_rows(sizes: list[int], strength: int) -> list[tuple[int, ...]]:
    """Choose rows of indices so that every combination of `strength` columns occurs; greedy, the same on every run.

    Args:
        sizes: number of values of each column.
        strength: columns whose combinations must occur: 1 for each value, 2 for each pair.
    """
    columns = list(itertools.combinations(range(len(sizes)), min(strength, len(sizes))))

    def parts(row: tuple[int, ...]) -> set[tuple]:
        return {(chosen, tuple(row[column] for column in chosen)) for chosen in columns}

    candidates = {row: parts(row) for row in itertools.product(*map(range, sizes))}
    missing = set().union(*candidates.values())
    rows = []
    while missing:
        best = max(candidates, key=lambda row: len(candidates[row] & missing))
        missing -= candidates.pop(best)
        rows.append(best)
    return rows


def parametrize_covering(metafunc: pytest.Metafunc) -> None:
    """Replace the `parametrize` marks of a test with the mark `covering` by one, with the chosen cases."""
    covering = metafunc.definition.get_closest_marker("covering")
    if covering is None:
        return

    # pytest multiplies the mark next to the function first, which is the first here.
    marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
    metafunc.definition.own_markers[:] = [mark for mark in metafunc.definition.own_markers if mark not in marks]
    names, columns = [], []
    for mark in marks:
        argnames = mark.args[0]
        listed = [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else list(argnames)
        names += listed
        columns.append(_parameter_sets(mark, len(listed)))

    chosen = []
    for row in covering_rows([len(column) for column in columns], *covering.args):
        cells = [column[index] for column, index in zip(columns, row, strict=True)]
        ids = "-".join(name for _, name in cells)
        chosen.append(pytest.param(*(value for values, _ in cells for value in values), id=ids))
    metafunc.parametrize(names, chosen)


def _parameter_sets(mark: pytest.Mark, width: int) -> list[tuple[tuple, str]]:
    """Return the values and the id of each case of a mark."""
    values = list(mark.args[1])
    ids = list(mark.kwargs.get("ids") or map(_id, values))
    return [(tuple(value) if width > 1 else (value,), str(name)) for value, name in zip(values, ids, strict=True)]


def _id(value: object) -> str:
    if isinstance(value, tuple | list):
        return "-".join(map(_id, value))
    return getattr(value, "__name__", None) or str(value)
