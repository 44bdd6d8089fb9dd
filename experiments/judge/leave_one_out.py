"""Delete the rules that name a fault, check its loops again, and print the answers: they should be `unknown`.

    python experiments/judge/leave_one_out.py

The logs are the loops of `compact_logs.py`. Stale weights keep their course over the steps, which names them as well.
A false name is the harm that this measures.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from calibrate import _answer, _null
from compact_logs import LOOPS_FILE, log_of, write_logs
from judge_key import read_key

from rollcorr.diagnostics import check_logs
from rollcorr.diagnostics.null import weight_causes
from rollcorr.diagnostics.provenance import estimate, misreported

WEIGHTS = ("_test_model_weights", "_started_later")
OF_NULL: Mapping[str, tuple[str, ...]] = {
    "dropout": ("_stochastic",),
    "template": ("_other_prompt", "_fading", "_prompt_length", "_padding"),
    "other_weights": WEIGHTS,
    "partial_sync": WEIGHTS,
    "frozen_sync": WEIGHTS,
}
"""Fault → its tests of an excess over a null."""


@contextlib.contextmanager
def without_rules(fault: str) -> Iterator[None]:
    """Delete the rules that name a fault."""
    left = tuple(test for test in weight_causes._TESTS if test.__name__ not in OF_NULL.get(fault, ()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(weight_causes, "_TESTS", left))
        if fault == "temperature":
            stack.enter_context(mock.patch.object(estimate, "find_temperature", return_value=[]))
        if fault == "shift_by_one":
            stack.enter_context(mock.patch.object(misreported, "find_shifts", misreported.RepairedPairs))
        if fault == "template":
            stack.enter_context(mock.patch.object(estimate, "find_early", lambda pairs: ([], pairs)))
        yield


def main() -> int:
    """Print the answers by fault."""
    key, nulls = read_key(), {}
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        for name, path in write_logs(Path(folder), LOOPS_FILE):
            if name.startswith("nulls/"):
                nulls[name] = _null(path, next((value for part, value in key.engines.items() if part in name), ""))
                continue
            log = log_of(name)
            if log.name in ("healthy", "top_p_raw"):
                continue
            with without_rules(log.name):
                result = check_logs([path], null=nulls[log.null.with_suffix("").as_posix()])
            answer = _answer(log, result, key, None)
            named = f"{answer.outcome} ({answer.code})" if answer.outcome in ("right", "false") else answer.outcome
            outcomes[log.name][named] += 1
    for fault, counts in sorted(outcomes.items()):
        shown = ", ".join(f"{outcome} {count}" for outcome, count in counts.most_common())
        print(f"| {fault} | {counts.total()} | {shown} |")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
