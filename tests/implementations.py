"""Implementations of the correction under test, and the inputs that each accepts.

Three ways to run a test once per implementation:

    @per_implementation                       calls with impl="auto" run on the implementation that the
    def test_…():                             test's id names: `correct` and its callers (losses, drop-in functions)

    @pytest.mark.parametrize("impl", IMPLEMENTATIONS)      the test names it itself: correct(…, impl=impl)

    with under_test(impl): …                  the same as the first, inside a hypothesis test

Where the named implementation does not take a case, for instance float64 log-probs on "cpu", or slices of sequences,
"torch" runs it. pytest's summary counts these runs and prints the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.kernels.correction import dispatch as kernels
from rollcorr.kernels.correction import triton
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.cpu import kernel

IMPLEMENTATIONS: list[str] = [name for name, (usable, _) in kernels.implementations().items() if usable]
"""Those that run here. Triton needs a GPU, or its interpreter (`make test-triton`)."""

EVERY_DTYPE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

per_implementation = pytest.mark.usefixtures("implementation")


@dataclass(frozen=True)
class Takes:
    """Inputs that an implementation accepts, and its arithmetic.

    Attributes:
        dtypes: of log-probs.
        largest_bound: of `safety_bound`.
        largest_log_ratio: log-ratios beyond count as that.
        adds_in_float32: sums over some tokens are in float32 before they are merged in float64.
        every_weight_bound: a floor of weights, and bands without an upper end.
    """

    dtypes: tuple[torch.dtype, ...] = EVERY_DTYPE
    largest_bound: float = 88.0
    largest_log_ratio: float = float("inf")
    adds_in_float32: bool = False
    every_weight_bound: bool = True


TAKES = {
    "reference": Takes(),
    "torch": Takes(),
    "cpu": Takes(dtypes=(torch.float32, torch.bfloat16), largest_bound=40.0, adds_in_float32=True),
    "triton": Takes(largest_bound=40.0, largest_log_ratio=1e16, adds_in_float32=True, every_weight_bound=False),
}


@dataclass
class Runs:
    """The implementation under test, its number of runs, and the reasons of fallbacks."""

    name: str
    own: int = 0
    others: Counter[str] = field(default_factory=Counter)


_current: list[Runs] = []


def implementation_under_test() -> str | None:
    """The implementation that `per_implementation` or `under_test` names; None outside of them."""
    return _current[-1].name if _current else None


def widest_dtype() -> torch.dtype:
    """Return float64, or float32 if the implementation under test rejects float64."""
    name = implementation_under_test()
    return torch.float64 if name is None or torch.float64 in TAKES[name].dtypes else torch.float32


def last_digits(name: str | None = None) -> float:
    """Return the relative tolerance between two sums of the same values: for float64, or float32 accumulators."""
    name = name or implementation_under_test()
    return 1e-6 if name is not None and TAKES[name].adds_in_float32 else 1e-12


@contextmanager
def under_test(name: str) -> Iterator[Runs]:
    """Make `impl="auto"` select this implementation if it accepts the batch, and record fallbacks."""
    runs = Runs(name)
    fastest, original = kernels._fastest_implementation, kernels.torch_correction

    def chosen(batch: Batch, config: RolloutCorrectionConfig) -> str:
        reason = refusal(name, batch, config)
        if reason is None:
            runs.own += 1
            return name
        runs.others[reason] += 1
        return "torch"

    def noted(batch: Batch, config: RolloutCorrectionConfig, *, reduce=None, **options):
        if reduce is not None and name != "torch":
            runs.others["slices of sequences are merged by torch alone"] += 1
        elif reduce is not None:
            runs.own += 1
        return original(batch, config, reduce=reduce, **options)

    kernels._fastest_implementation, kernels.torch_correction = chosen, noted
    _current.append(runs)
    try:
        yield runs
    finally:
        _current.pop()
        kernels._fastest_implementation, kernels.torch_correction = fastest, original


def refusal(name: str, batch: Batch, config: RolloutCorrectionConfig) -> str | None:
    """Why an implementation does not take a batch; None where it does."""
    if name == "cpu":
        return kernel.why_not(batch, config)
    if name == "triton":
        return triton.why_not(batch, config)
    return None
