"""The null that a Monitor measures itself: from the first fresh steps of the run, and from measurements after syncs.

The first steps of a run may be wrong already. So their null must pass the guard of every null, and its verdict stays
"unchanged since steps 1 to 5" until something shows equal weights: token ids, a probe, or a measurement that agrees.
All work is done in the writer thread; a step only reads the numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollcorr.correction.weight_probe import ROUNDING, STALE, WeightProbe
from rollcorr.diagnostics.health.health_check import FIRST_STEPS
from rollcorr.diagnostics.health.trend import AGE, NULL_IS_LARGE, NULL_IS_VETTED, NULL_K3, NULL_STD
from rollcorr.monitor.rollout_sample import HostRows, rollout_batch
from rollcorr.run_directory.stored_run import BadInputError

if TYPE_CHECKING:
    from rollcorr.diagnostics import MismatchNull
    from rollcorr.rollout_log import RolloutBatch

logger = logging.getLogger("rollcorr.monitor")

# Number of fresh steps after which the null is made, even if it has few tokens.
MOST_STEPS = 20


class OwnNull:
    """A null that grows during the run.

    Args:
        file: where a null with equal weights is saved; `None` if a null was given, whose file stays as it is.
        given: the null that the run started with; optional.
        from_first_steps: whether the first fresh steps make a null.

    Attributes:
        null: the null so far; optional.
        numbers: the metrics of the null that was measured; empty without one.
    """

    def __init__(self, file: Path | None, given: MismatchNull | None, *, from_first_steps: bool) -> None:
        self.null = given
        self._file = file
        self._is_vetted = given is not None
        self._collects = from_first_steps and given is None
        self._asked = 0
        self._steps: list[int] = []
        self._batches: list[RolloutBatch] = []
        self._probe: WeightProbe | None = None
        self.numbers: Mapping[str, float] = {}

    def wants(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the rows of a step are needed: it is among the first ones, and its weights are fresh."""
        if not self._collects or self._asked >= MOST_STEPS or metrics.get(AGE, 0.0) > 0:
            return False
        self._asked += 1
        return True

    def add_step(self, step: int, rows: Sequence[HostRows]) -> None:
        """Add a fresh step; the last one that is needed makes the null."""
        from rollcorr.diagnostics.log_check import null_of_batch  # it needs Arrow
        from rollcorr.diagnostics.log_check.check import check_batches
        from rollcorr.diagnostics.null.run_null import GOOD_TOKENS

        if not self._collects:
            return
        self._steps.append(step)
        self._batches += [rollout_batch(part) for part in rows]
        tokens = sum(int(batch.packed("response_mask").sum()) for batch in self._batches)
        if len(self._steps) < MOST_STEPS and (len(self._steps) < FIRST_STEPS or tokens < GOOD_TOKENS):
            return

        self._collects = False
        if not tokens:
            return
        name, batches = f"steps {self._steps[0]} to {step} of this run", self._batches
        self._batches = []
        try:
            null = null_of_batch(batches, name=name, kind="first steps")
            problems: Sequence[object] = check_batches(batches).causes
        except BadInputError as error:
            problems = [error]
        if problems:
            logger.warning("%s are not used as a null: %s", name, problems[0])
            return

        # Keep a null of `add_measurement`, if there is one: its weights are known to be equal.
        if self.null is None:
            self.null, self._is_vetted = null, not (null.unvetted or null.doubted)
            self._publish()

    def add_measurement(self, batch: RolloutBatch) -> None:
        """Add rollouts that were sampled and scored with equal weights, right after a sync."""
        from rollcorr.diagnostics.log_check import null_of_batch
        from rollcorr.diagnostics.null.run_null import follow_policy

        try:
            fresh = null_of_batch(batch, name="the measurement after a sync")
            if self.null is None:
                self.null = replace(fresh, name="the null of this run")
            elif not self._is_vetted and self.null.profile.k3 >= STALE * max(fresh.profile.k3, ROUNDING):
                logger.warning("%s show more mismatch than equal weights do; they are not a null", self.null.name)
                self.null = fresh
            else:
                self.null = follow_policy(self.null, fresh)
        except BadInputError as error:
            logger.warning("a measurement is left out of the null: %s", error)
            return
        self._is_vetted = True
        self._publish()

    def add_probe(self, probe: WeightProbe) -> None:
        """Add a probe, which shows whether the run's mismatch is that of equal weights."""
        self._probe = probe
        self._publish()

    def _publish(self) -> None:
        """Compute the metrics of the null, and save it once its weights are known to be equal."""
        from rollcorr.diagnostics.null.run_null import is_large

        null, probe = self.null, self._probe
        if null is None:
            return

        # If the weights of the first steps were equal, a sync does not reduce their mismatch much.
        if probe is not None and null.kind == "first steps":
            agrees = null.profile.k3 < STALE * max(probe.synced_k3, ROUNDING)
            self._is_vetted = agrees and (self._is_vetted or probe.cause == "noise")
            self._probe = None
        if self._is_vetted:
            null = replace(null, unvetted="", doubted="")
        self.numbers = {
            NULL_K3: null.profile.k3,
            NULL_STD: null.profile.std,
            NULL_IS_VETTED: float(self._is_vetted),
            NULL_IS_LARGE: float(is_large(null)),
        }
        if self._is_vetted and is_large(null) and self._file is not None:
            try:
                null.save(self._file)
            except OSError as error:
                logger.warning("%s is not written: %s", self._file, error)
