"""Another context, other weights and a late start, from synthetic tokens whose difference is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.fault_row import Case, in_excess_at_start
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.null.excess_tokens import ExcessTokens
from rollcorr.diagnostics.null.fading import other_context
from rollcorr.diagnostics.null.token_ratios import k3_of
from rollcorr.diagnostics.provenance.pair_sample import PairSample

ROWS, LENGTH, KINDS, STEPS, NOISE = 300, 20, 6, 12, 1e-4
GRID = np.arange(ROWS * LENGTH)
ROW, POSITION = GRID // LENGTH, GRID % LENGTH
STEP = 1 + ROW * STEPS // ROWS
IDS = np.random.default_rng(0).integers(0, KINDS, ROWS * LENGTH)
PREVIOUS = np.where(POSITION > 0, np.roll(IDS, 1), KINDS)
PAIR = PREVIOUS * KINDS + IDS


def tokens_of(d: np.ndarray) -> ExcessTokens:
    """Tokens that differ by `d`, over a noise of `NOISE` each."""
    equal = np.append((IDS[1:] == IDS[:-1]) & (ROW[1:] == ROW[:-1]), False)
    places = {
        "rows": ROW,
        "positions": POSITION,
        "step": STEP,
        "ids": IDS,
        "pair": PAIR,
        "pair_at": PAIR * LENGTH + POSITION,
        "repeats": np.roll(equal, 1) + 2 * equal,
    }
    return ExcessTokens(d - 1, np.full(len(d), -1.0), k3_of(d), np.full(len(d), NOISE), places)


def context_of(d: np.ndarray) -> str:
    tokens = tokens_of(d)
    return other_context(tokens, tokens.share("pair"))


def table(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.3, shape)


@pytest.mark.parametrize(
    ("side", "effect", "found"), [(1, 1.5, True), (2, 1.5, True), (2, 0.1, False), (2, -1.5, False)]
)
def test_displaced_context_spares_equal_neighbors(side, effect, found):
    equal = (tokens_of(np.zeros(len(GRID))).places["repeats"] & side) > 0
    context = context_of(table(len(GRID)) - effect * ~equal)
    assert ("a token ahead or behind" in context) == found


def test_neighbors_explain_by_hand():
    tokens = tokens_of(np.where((tokens_of(np.zeros(len(GRID))).places["repeats"] & 2) > 0, 0.0, -0.5))
    assert tokens.share_of_equal_neighbors() == pytest.approx(
        1.0, abs=0.06
    )  # positions of different shares explain the rest
    assert replace(tokens, places={**tokens.places, "repeats": np.zeros_like(IDS)}).share_of_equal_neighbors() == 0.0


def test_pairs_at_their_position_show_displacement():
    assert "at their position alone (100%" in context_of(table(KINDS * (KINDS + 1), LENGTH)[PAIR, POSITION])


def test_updates_heal_another_context():
    assert "fell to 4%" in context_of(table(len(GRID)) * np.where(STEP <= STEPS // 2, 1.0, 0.2))


@pytest.mark.parametrize("growth", [1.0, 3.0])
def test_other_weights_show_no_other_context(growth):
    assert context_of(table(KINDS * (KINDS + 1))[PAIR] * np.where(STEP <= STEPS // 2, 1.0, growth)) == ""


def test_first_step_and_start_by_hand():
    tokens = tokens_of(np.where(STEP >= 3, 0.1, 0.0))
    assert tokens.first_step == 0.0  # 500 tokens of step 1
    assert tokens.since_start.places["step"].min() == 3


@pytest.mark.parametrize(("ratio", "refuted"), [(50.0, True), (1.1, False)])
def test_excess_at_first_step_refutes_missed_sync(ratio, refuted):
    named = Finding(**{**vars(fault("weights_differ").finding), "evidence": {"ratio_of_first_step": ratio}})
    refutation = in_excess_at_start(Case(None, None, [named]))
    assert (refutation is not None and refutation.instead == "weights_differ") == refuted


def test_few_ids_still_show_a_sure_temperature():
    generator = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    rollout, train = (logits / 0.7).log_softmax(-1), logits.log_softmax(-1)
    ids = torch.multinomial(rollout.exp(), 1, generator=generator)
    sides = [side.gather(1, ids)[:, 0].float() for side in (train, rollout)]
    lengths = torch.full((400,), 10)
    sample = PairSample.of(*sides, torch.ones(4000, dtype=torch.bool), lengths, first=0, response_ids=ids[:, 0])
    assert sample.estimate().finding("tempered") is not None


def seen_tokens(of_surprise: float, of_seen: float) -> ExcessTokens:
    """Tokens that differ by their surprise, which is larger for ids not seen before, and by "seen" itself."""
    seen = np.array([IDS[i] in IDS[i - POSITION[i] : i] for i in GRID]).astype(np.int64)
    generator = np.random.default_rng(2)
    unlikely = generator.random(len(GRID)) < np.where(seen == 1, 0.1, 0.8)
    d = of_surprise * unlikely + of_seen * seen + generator.normal(0, 0.1, len(GRID))
    tokens = tokens_of(d)
    rollout = np.where(unlikely, -3.0, -0.3)
    return replace(tokens, rollout=rollout, train=rollout + d, places={**tokens.places, "seen": seen})


def test_penalty_shifts_seen_tokens_as_likely():
    of_penalty, of_weights = seen_tokens(0.0, 0.3), seen_tokens(-0.5, 0.0)
    assert of_penalty.of_seen() > 0.3
    assert of_penalty.of_seen(as_likely=True) > 0.1
    assert of_weights.of_seen() > 0.2
    assert of_weights.of_seen(as_likely=True) < 0.01


def test_position_beyond_pairs_shows_displacement():
    of_pair, at_position = table(KINDS * (KINDS + 1))[PAIR], table(KINDS * (KINDS + 1), LENGTH)[PAIR, POSITION]
    assert "at their position alone" in context_of(0.7 * of_pair + at_position)
    assert context_of(0.7 * of_pair + 0.6 * at_position + 0.8 * table(len(GRID))) == ""


def test_outliers_hide_no_healing():
    d = table(len(GRID)) * np.where(STEP <= STEPS // 2, 1.0, 0.2)
    d[-20:] = 3.0
    tokens = tokens_of(d)
    assert tokens.k3[STEP > 8].mean() > tokens.k3[STEP <= 4].mean()
    assert "while the trainer learned" in context_of(d)
