"""The trained study: its cells are comparable, a tiny one runs the same code, and the committed page is theirs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

STUDY = Path(__file__).parents[2] / "experiments" / "mismatch_in_practice"

TINY = (
    "steps=2",
    "task.additions=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=24",
    "rollout.refresh_every=2",
    "optim.mini_batch_size=2",
    "checkpoint.every=1",
)


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    import trained

    return trained


@pytest.fixture
def training(study):
    import trained_cell

    return trained_cell


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    import trained_page

    return trained_page


@pytest.fixture
def tiny_study(training, monkeypatch, tmp_path):
    """The study in a folder of its own, with a policy that was hardly warmed up."""
    monkeypatch.setattr(training, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(training, "MODEL", training.MODEL | {"hidden_size": 16, "intermediate_size": 16})
    monkeypatch.setattr(training, "WARM_UP", ((1, 2, 2, 1e-3), (2, 2, 2, 1e-3)))
    return training


def quiet():
    return Console(file=io.StringIO())


def test_the_grid_has_two_seeds_everywhere_and_three_where_training_breaks(study):
    cells = study.cells()
    seeds = {}
    for cell in cells:
        seeds.setdefault((cell.column, cell.correction), []).append(cell.seed)
    assert len({cell.name for cell in cells}) == len(cells)
    for column in study.STUDY:
        for correction in (*study.GRID, *study.MORE.get(column, ())):
            assert seeds.pop((column, correction)) == ([0, 1, 2] if column in study.BREAKS else [0, 1])
    assert seeds == {}


def test_every_cell_samples_and_trains_on_the_same_number_of_responses(study):
    configs = [cell.config() for cell in study.cells() if cell.seed == 0]
    base = configs[0]
    for config in configs:
        assert (config.steps, config.rollout.rows, config.rollout.max_new_tokens) == (
            base.steps,
            base.rollout.rows,
            base.rollout.max_new_tokens,
        )
        assert (config.optim, config.task, config.threads) == (base.optim, base.task, 1)


def test_a_tiny_cell_runs_and_goes_on_and_is_written(tiny_study, tmp_path):
    cell = tiny_study.Cell("stale_quantized", "seq_tis", 0)

    # The first call ends after one step, and the second goes on with it.
    first = tiny_study.run_cell(cell, quiet(), *TINY, "steps=1", problems=4)
    result = tiny_study.run_cell(cell, quiet(), *TINY, problems=4)
    tiny_study.write_cell(cell.path(tmp_path), result)
    assert result["metrics"]["reward"][:1] == first["metrics"]["reward"]
    assert result["held_out"][:2] == first["held_out"]

    # A checkpoint between the regular ones, as a stopped run saves it, adds no point.
    later = tiny_study.run_cell(cell, quiet(), *TINY, "checkpoint.every=2", problems=4)
    assert [point["step"] for point in later["held_out"]] == [0, 2]

    kept = json.loads(cell.path(tmp_path).read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(result))
    assert [point["step"] for point in kept["held_out"]] == [0, 1, 2]
    assert kept["metrics"]["staleness"] == [0, 1]
    assert kept["metrics"]["k3"][0] > 1e-6
    assert kept["responses"] == 8
    assert {"processor", "threads", "torch", "commit", "core_seconds"} <= kept.keys()


def test_the_committed_page_is_that_of_the_committed_cells(study, page, monkeypatch, tmp_path):
    monkeypatch.setattr(page, "PAGE", tmp_path / "trained.md")
    monkeypatch.setattr(page, "FIGURES", tmp_path)
    monkeypatch.setattr(page, "_curves", lambda *_, **__: None)
    page.write_page(
        study.read_cells(study.cells(), study.CELLS_OF_BENCH, study.CELLS),
        [cell.name for cell in study.cells()],
        study.facts(),
    )
    assert (tmp_path / "trained.md").read_text(encoding="utf-8") == (STUDY / "trained.md").read_text(encoding="utf-8")


def test_committed_cells_are_those_of_the_settings(study):
    for result in study.read_cells(study.cells(), study.CELLS_OF_BENCH, study.CELLS):
        config = study.Cell(result["column"], result["correction"], result["seed"]).config()
        assert (result["steps"], result["responses"]) == (config.steps, config.steps * config.rollout.rows)
        assert all(len(values) == config.steps for values in result["metrics"].values())
        assert result["held_out"][-1]["step"] == config.steps
