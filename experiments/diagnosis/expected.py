"""What the check should say of each fault: the one place where faults and codes meet.

A class is a kind of cause; its codes are those that `rollcorr check --json` prints for it. A fault accepts the codes of
one or two classes: a sampler with old weights may be told from its weights, or from the versions that the log records.
"""

from __future__ import annotations

from collections.abc import Mapping

CLASSES: Mapping[str, frozenset[str]] = {
    "weights": frozenset({"weights_differ", "frozen_sampler"}),
    "staleness": frozenset({"stale_by_lag"}),
    "prefix": frozenset({"stale_prefix_cache"}),
    "template": frozenset({"template"}),
    "stochastic": frozenset({"stochastic_trainer"}),
    "temperature": frozenset({"tempered", "processed", "raw"}),
    "truncation": frozenset({"truncated"}),
    "shift": frozenset({"shifted"}),
    "request": frozenset({"other_request"}),
    "placeholder": frozenset({"placeholder", "zeros", "sentinel"}),
    "unit": frozenset({"wrong_unit", "positive"}),
    "storage": frozenset({"storage"}),
    "mask": frozenset({"foreign_tokens"}),
    "turn": frozenset({"turn_drift"}),
    "noise": frozenset({"matched", "ordinary_noise"}),
    "open": frozenset({"unexplained", "cannot_tell"}),
}

NOT_A_CAUSE = ("noise", "open")
"""Classes that name nothing that is wrong."""

FAULTS: Mapping[str, tuple[str, ...]] = {
    "stale_1": ("weights", "staleness"),
    "stale_4": ("weights", "staleness"),
    "stale_16": ("weights", "staleness"),
    "stale_head": ("weights",),
    "unsynced_layer": ("weights",),
    "adapter_zeroed": ("weights",),
    "no_bos": ("template",),
    "rope_theta": ("weights",),
    "prefix_cache": ("prefix",),
    "left_pads": ("template",),
    "dropout": ("stochastic",),
    "int4": ("weights",),
    "other_prompt": ("template",),
    "quantized": ("weights",),
}
"""Fault → classes that name it. A rotary base that differs is a model that differs, as weights are."""

ALONE: Mapping[str, tuple[str, ...]] = {"prefix_cache": ("prefix", "template")}
"""Fault → further classes that are right for it without a null. An old prefix cache fades as another prompt does, and
docs/guides/sampling.md says that pairs cannot tell them apart."""


def class_of(code: str) -> str:
    """The class of a code; the code itself when no class holds it."""
    return next((name for name, codes in CLASSES.items() if code in codes), code)


def names(fault: str, code: str) -> bool:
    """Whether a code is right for a fault, or for a class."""
    return class_of(code) in FAULTS.get(fault, (fault,))


def right_alone(fault: str, code: str, *, id_explains: bool) -> bool:
    """Whether a first hypothesis is right for a fault without a null.

    Where the token id explains enough of the variance, it must be the fault's own class, or that the weights differ.
    Elsewhere that it cannot be told is right too; a setting of the sampling never is.
    """
    name = class_of(code)
    if name == "weights" or names(fault, code) or name in ALONE.get(fault, ()):
        return True
    return not id_explains and (not code or name in NOT_A_CAUSE)
