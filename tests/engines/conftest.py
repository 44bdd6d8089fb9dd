"""Fixtures of the tests of engines."""

import pytest
from fake_clock import FakeClock
from micro_policy import make_micro_policy

from rollcorr.engines.transport import waiting
from rollcorr.train.grpo.policy import Policy

pytest.register_assert_rewrite("engine_contract")  # no test file by its name


@pytest.fixture
def micro_policy() -> Policy:
    return make_micro_policy()


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    """The clock of every wait of the test."""
    fake = FakeClock()
    monkeypatch.setattr(waiting, "monotonic", fake.monotonic)
    monkeypatch.setattr(waiting, "sleep", fake.sleep)
    monkeypatch.setattr(waiting, "SLICE", 0.5)
    return fake
