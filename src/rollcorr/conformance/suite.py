"""Grades of a function: each property on drawn batches, and the smallest batch that fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from random import Random
from typing import Literal, NamedTuple

import numpy as np

from rollcorr.conformance.batches import OUTSIDE, Rows, draw_rows, make_token, smallest, tensors_of
from rollcorr.conformance.function_calls import Correct, Options, Subject
from rollcorr.conformance.properties import PROPERTIES, Property

Verdict = Literal["pass", "fail", "not applicable", "error"]

# Batches for each property; its sets of options take turns.
BATCHES = 60

# Any correction accepts this batch: an error here is one of the call, never a grade.
ORDINARY: Rows = (
    (make_token(0.1), make_token(-0.2), make_token(0.05)),
    (make_token(-0.1), make_token(0.2), OUTSIDE),
)

RAISED, WIDE = "raised", 10_000


class Grade(NamedTuple):
    """The grade of a function for one property.

    Attributes:
        property: the property.
        verdict: "pass"; "fail"; "not applicable", by a rule; "error" if the function raises on an ordinary batch.
        reason: the difference, the missing option or output, or the error; empty for a pass.
        counterexample: the smallest failing batch; empty unless it failed.
        options: those of the failing call.
    """

    property: Property
    verdict: Verdict
    reason: str = ""
    counterexample: Rows = ()
    options: Options = {}  # noqa: RUF012 - never changed

    def __str__(self) -> str:
        """Return the grade on one line, and the call that fails below it."""
        colon = ": " if self.reason else ""
        lines = [f"{self.verdict:<14}  {self.property.number:>2}  {self.property.title}{colon}{self.reason}"]
        if self.counterexample:
            names = ("train_log_prob", "rollout_log_prob", "response_mask")
            tables = [
                np.array2string(x.numpy(), separator=", ", max_line_width=WIDE) for x in tensors_of(self.counterexample)
            ]
            lines += [f"    required: {self.property.statement}"]
            lines += [f"    {name} = {table}".replace("\n", "") for name, table in zip(names, tables, strict=True)]
            lines += ["    " + ", ".join(f"{name}={value!r}" for name, value in self.options.items())]
        return "\n".join(lines)


def grade_function(function: Correct, *, batches: int = BATCHES) -> Iterator[Grade]:
    """Grade a function by the fifteen properties; each grade is yielded when it is known. `PROPERTIES` lists them.

    A property is not applicable if the function lacks a parameter or an output that it needs, or raises
    `NotImplementedError` for its options on an ordinary batch. Any other exception there is an "error", and no grade.

    Args:
        function: called as function(train_log_prob, rollout_log_prob, response_mask, **options), with float32 log-probs
            and a bool mask, (B, T) each; it returns a dictionary. `rollcorr conformance --help` describes both.
        batches: batches that are drawn for each property; its sets of options take turns.
    """
    return (grade_property(function, wanted, batches=batches) for wanted in PROPERTIES)


def grade_property(function: Correct, wanted: Property, *, batches: int = BATCHES) -> Grade:
    """Grade a function by one property.

    Args:
        function: as in `grade_function`.
        wanted: the property, one of `PROPERTIES`.
        batches: batches that are drawn.
    """
    subject = Subject(function)
    readiness = [_obstacle(subject, wanted, options) for options in wanted.variants]
    usable = [options for options, (verdict, _) in zip(wanted.variants, readiness, strict=True) if verdict == "pass"]
    blocking = next((grade for grade in readiness if grade[0] == "error"), readiness[0])
    if not usable or blocking[0] == "error":
        return Grade(wanted, *blocking)

    # A property has its own generator, so an edit to one leaves the batches of the others as they are.
    random = Random(wanted.number)
    for number in range(batches):
        rows, options = draw_rows(random, scale=wanted.scale, special=wanted.special), usable[number % len(usable)]
        if fault := _first_fault(subject, wanted, rows, options):
            found = _shrink(subject, wanted, rows, options, fault)
            return Grade(wanted, "fail", _first_fault(subject, wanted, found, options), found, options)
    return Grade(wanted, "pass")


def _obstacle(subject: Subject, wanted: Property, options: Options) -> tuple[Verdict, str]:
    # The reason why a property is not graded under these options; ("pass", "") if it can be.
    if lacking := subject.lacks(options):
        return "not applicable", f"it takes no option {lacking!r}"
    try:
        outcome = subject(ORDINARY, options)
    except NotImplementedError as error:
        return "not applicable", f"it does not support {dict(options)}: {error}"
    except Exception as error:
        return "error", f"with {dict(options)} an ordinary batch {RAISED} {type(error).__name__}: {error}"
    outputs = {
        **outcome.result,
        "statistics": outcome.numbers or None,
        "merge": getattr(subject.function, "merge", None),
    }
    missing = [name for name in wanted.outputs if outputs.get(name) is None]
    return ("not applicable", f"it has no {missing[0]}") if missing else ("pass", "")


def _first_fault(subject: Subject, wanted: Property, rows: Rows, options: Options) -> str:
    # The first difference that a check finds, or the exception of the function; empty without either.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return next(wanted.check(subject, rows, options), "")
    except Exception as error:
        return f"{RAISED} {type(error).__name__}: {error}"


def _shrink(subject: Subject, wanted: Property, rows: Rows, options: Options, fault: str) -> Rows:
    # A wrong number stays a wrong number, and an exception an exception.
    def fails(candidate: Rows) -> bool:
        # Rows without a valid token belong to property 11, which adds them itself.
        if not all(any(token[2] for token in row) for row in candidate):
            return False
        found = _first_fault(subject, wanted, candidate, options)
        return bool(found) and found.startswith(RAISED) == fault.startswith(RAISED)

    return smallest(rows, fails)
