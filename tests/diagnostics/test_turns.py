"""Mismatch by turn, and places by version of the weights."""

import json

import numpy as np
import pytest
import torch
from null_logs import rollouts, write_rows
from typer.testing import CliRunner

from rollcorr import estimate_provenance
from rollcorr.cli import app
from rollcorr.diagnostics import check_logs, null_of_logs
from rollcorr.diagnostics.null.token_ratios import turns_of
from rollcorr.diagnostics.null.version_cells import MOST_TURNS


def of_turns(rows, turns=4, length=20):
    """The rows with a mask of turns, each followed by five tokens of a tool, and twice the difference in turn 3."""
    mask = np.array(([True] * length + [False] * 5) * turns)
    for row in rows:
        d = np.array(row["old_log_prob"]) - row["rollout_log_prob"]
        d[2 * (length + 5) : 3 * (length + 5)] *= 2
        row |= {"old_log_prob": (np.array(row["rollout_log_prob"]) + d).tolist(), "response_mask": mask.tolist()}
    return rows


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    rows = of_turns(rollouts(rows=96, length=100))
    rows = [{**row, "step": 1 + number // 24} for number, row in enumerate(rows)]
    return write_rows(tmp_path_factory.mktemp("turns") / "log.parquet", rows)


def test_turns_by_hand():
    mask = np.array([1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 1], dtype=bool)
    assert turns_of(mask, np.array([5, 0, 4, 2])).tolist() == [1, 1, 1, 2, 2, 0, 1, 1, 2, 1, 1]


def test_k3_of_a_turn(log):
    rows = check_logs([log]).turns
    assert [(row.turn, row.tokens) for row in rows] == [(turn, 96 * 20) for turn in (1, 2, 3, 4)]
    k3 = [row.k3_kl for row in rows]
    assert k3[2] == pytest.approx(4 * np.mean([k3[0], k3[1], k3[3]]), rel=0.2)
    assert all(0 < row.error < row.k3_kl / 5 for row in rows)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_turns_do_not_depend_on_batches(log, batch_size):
    for row, other in zip(check_logs([log]).turns, check_logs([log], batch_size=batch_size).turns, strict=True):
        assert row == pytest.approx(other, rel=1e-12)


def test_a_log_of_one_turn_has_no_table(tmp_path):
    assert check_logs([write_rows(tmp_path / "log.parquet", rollouts(rows=12, length=40))]).turns == ()


def test_later_turns_share_a_row(tmp_path):
    rows = of_turns(rollouts(rows=12, length=4 * 20), turns=20, length=1)
    rows = [{**row, **{name: row[name][:80] for name in row if name != "prompt_ids"}} for row in rows]
    found = check_logs(
        [write_rows(tmp_path / "log.parquet", [{**r, "response_mask": [True, False] * 40} for r in rows])]
    )
    assert [row.turn for row in found.turns] == list(range(1, MOST_TURNS + 1))
    assert found.turns[-1].tokens == 12 * (40 - MOST_TURNS + 1)


def test_check_prints_turns(log):
    shown = CliRunner().invoke(app, ["check", str(log)]).output.splitlines()
    first = next(number for number, line in enumerate(shown) if line.split()[:2] == ["turn", "tokens"])
    assert [line.split()[:2] for line in shown[first + 1 : first + 5]] == [
        [str(turn), "1,920"] for turn in (1, 2, 3, 4)
    ]
    document = json.loads(CliRunner().invoke(app, ["check", str(log), "--json"]).output)
    assert [row["turn"] for row in document["turns"]] == [1, 2, 3, 4]


def test_one_version_carries_the_excess(tmp_path):
    """Half of each row was sampled by version 4, whose values are off; the halves change places from row to row."""
    null = null_of_logs([write_rows(tmp_path / "null.parquet", rollouts(rows=96, seed=2))])
    rows = rollouts(rows=64)
    for number, row in enumerate(rows):
        old = slice(60 * (number % 2), 60 * (number % 2) + 60)
        rollout = np.array(row["rollout_log_prob"])
        rollout[old] += np.random.default_rng(number).normal(size=60) * 0.4
        spans = [(0, 4 + number % 2), (60, 5 - number % 2)]
        row |= {
            "rollout_log_prob": rollout.tolist(),
            "step": 5,
            "policy_versions": [{"start": start, "length": 60, "version": version} for start, version in spans],
        }
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)], null=null)
    places = [finding.where for finding in result.hypotheses if finding.where]
    assert places == [{"version": [[4, 4]]}], result.hypotheses


@pytest.mark.parametrize("onset", [2, 3, 5])
def test_short_turns_have_an_exact_onset(onset):
    """Sixteen tokens after a gap contain two turns of eight, and the first turn with a jump looked larger."""
    random = torch.Generator().manual_seed(0)
    rows, turns, length = 200, 6, 8
    turn = torch.arange(turns).repeat_interleave(length + 1) + 1
    mask = (torch.arange(len(turn)) % (length + 1) < length).expand(rows, -1)
    rollout = -3 * torch.rand(rows, len(turn), generator=random)
    size = 0.01 + 0.03 * (turn > 1) + 1.5 * (turn == onset) + 0.2 * (turn > onset)
    train = (rollout + size * torch.randn(rollout.shape, generator=random)).clamp(max=0)
    assert estimate_provenance(train, rollout, mask).finding("turn_drift").evidence["turn"] == onset
