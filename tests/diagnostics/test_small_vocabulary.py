"""A policy of 16 tokens: its responses repeat contexts, and a sampler that is old looks like other faults there."""

import numpy as np
import pytest
import torch

from rollcorr import estimate_provenance
from rollcorr.diagnostics.faults import fault
from tests.diagnostics.null_logs import log_softmax

VOCABULARY, LENGTH, ROWS, STEPS, GROUP = 16, 12, 32, 30, 4


def sampled(*, drift=0.0, spread=0.4, by_token=0.0, temperature=1.0, seed=1):
    """Log-probs of both sides, two (rows, tokens) of float32: the trainer moves on for 30 steps, the sampler does not.

    A logit depends on the token before, on the place and on the token itself.

    Args:
        drift: by what each update moves the trainer's logits.
        spread: standard deviation of the logits.
        by_token: size of the token's own part of an update, relative to its context's part.
        temperature: of the sampler.
        seed: of prompts and draws.
    """
    tables = np.random.default_rng(0)
    shape = (LENGTH, VOCABULARY, VOCABULARY)
    base = spread * tables.normal(size=shape)
    direction = by_token * tables.normal(size=VOCABULARY) + tables.normal(size=shape)

    random = np.random.default_rng(seed)
    rows = ROWS * STEPS
    age = np.arange(rows)[:, None] // ROWS
    current = random.integers(VOCABULARY, size=rows // GROUP).repeat(GROUP)
    train, rollout = (np.empty((rows, LENGTH), dtype=np.float32) for _ in range(2))
    for place in range(LENGTH):
        mu = log_softmax(base[place, current] / temperature)
        pi = log_softmax(base[place, current] + drift * age * direction[place, current])
        drawn = (random.random(rows)[:, None] > np.exp(mu).cumsum(-1)).sum(-1).clip(max=VOCABULARY - 1)
        rollout[:, place], train[:, place] = (side[np.arange(rows), drawn] for side in (mu, pi))
        current = drawn
    return torch.from_numpy(train), torch.from_numpy(rollout)


def named(found):
    return {code for code in found.codes if fault(code).kind != "no finding"}


@pytest.mark.parametrize("by_token", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("spread", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("drift", [0.01, 0.03, 0.06])
def test_old_weights_are_no_temperature_no_other_request_and_no_placeholder(drift, spread, by_token):
    """Contexts come again, and with them the old sampler's values, while the trainer returns a new value each time."""
    assert named(estimate_provenance(*sampled(drift=drift, spread=spread, by_token=by_token))) == set()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_is_still_named(temperature):
    found = estimate_provenance(*sampled(temperature=temperature))
    assert named(found) == {"tempered"}
    assert found.temperature_ratio == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_rows_of_other_requests_are_still_named(share):
    train, rollout = sampled(spread=1.0)
    count = int(share * len(train))
    rollout[:count] = rollout[:count].roll(7 * GROUP, dims=0)
    finding = estimate_provenance(train, rollout).finding("other_request")
    assert finding.rows == pytest.approx(0.8 * count, rel=0.3)
    assert finding.evidence["rows_found_elsewhere"] > 10


def test_a_frozen_sampler_is_no_other_request():
    """The same texts come in every step: the sampler's values are those that the trainer had in the first step."""
    generator = torch.Generator().manual_seed(0)
    first, later = (-3 * torch.rand(ROWS, 64, generator=generator) - shift for shift in (0.0, 1.5))
    train, rollout = torch.cat([first, *[later] * (STEPS - 1)]), first.repeat(STEPS, 1)
    steps = torch.arange(STEPS).repeat_interleave(ROWS)
    assert "other_request" not in estimate_provenance(train, rollout, steps=steps).codes

    # Within a step, the rows of other requests are still found.
    train, rollout = first.repeat(STEPS, 1), first.roll(1, dims=0).repeat(STEPS, 1)
    finding = estimate_provenance(train, rollout, steps=steps).finding("other_request")
    assert finding.evidence["rows_found_elsewhere"] > 10


@pytest.mark.parametrize("constant", [0.0, -1.0])
def test_constants_are_still_named_beside_old_weights(constant):
    train, rollout = sampled(drift=0.005)
    filled = torch.rand(rollout.shape, generator=torch.Generator().manual_seed(0)) < 0.02
    found = estimate_provenance(train, rollout.masked_fill(filled, constant))
    assert named(found) == {"placeholder"}
    assert found.finding("placeholder").tokens == pytest.approx(int(filled.sum()), rel=0.1)
