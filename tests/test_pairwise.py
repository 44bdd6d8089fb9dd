"""The chosen cases contain every pair, and pytest runs them."""

import itertools

import pytest
from pairwise import covering_rows


@pytest.mark.parametrize("sizes", [[2, 3], [3, 4, 5], [2, 2, 2, 2, 3], [7]])
@pytest.mark.parametrize("strength", [1, 2])
def test_rows_contain_every_combination(sizes, strength):
    rows = covering_rows(sizes, strength)
    for columns in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        found = {tuple(row[column] for column in columns) for row in rows}
        assert found == set(itertools.product(*(range(sizes[column]) for column in columns)))
    assert len(rows) == len(set(rows))


def test_pairs_are_far_fewer_than_the_product():
    assert len(covering_rows([3, 5, 3, 3], 2)) <= 20
    assert len(covering_rows([3, 5, 3, 3], 1)) == 5


@pytest.mark.covering(2)
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize(("second", "third"), [("a", True), ("b", False)], ids=["A", "B"])
@pytest.mark.parametrize("fourth", [0.5, None])
def test_marked_cases_run(first, second, third, fourth):
    assert (second, third) in [("a", True), ("b", False)]


def test_marked_cases_were_the_pairs(request):
    ran = [item.callspec.id for item in request.session.items if item.originalname == "test_marked_cases_run"]
    assert 6 <= len(ran) < 12
    assert all(len(name.split("-")) == 3 for name in ran)
