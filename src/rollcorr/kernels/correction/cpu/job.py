"""Arguments of the compiled correction: the structures of job.h, filled from a configuration."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import numpy as np
import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.core.weights import log_band
from rollcorr.kernels.correction.call import accepted_band, exceedance_band, zeroing_band

MAX_CRITERIA = 11
LOG_PROB_TYPES = {torch.float32: 0, torch.bfloat16: 1}
MASK_TYPES = {torch.bool: 0, torch.uint8: 0, torch.int32: 1, torch.int64: 2, torch.float32: 3}

SCOPES = ("token", "seq_sum", "seq_mean", "seq_max")
KINDS = ("k1", "k2", "k3")
_LEVELS = (None, "token", "sequence", "geometric", "horizon")
_MODES = ("none", "truncate", "icepop")
_NONFINITE = {"reject_token": 0, "raise": 0, "reject_sequence": 1, "neutral": 2}
_NORMALIZATION = {"valid": 1, "kept": 2}

EVERYTHING, NOTHING = (-math.inf, math.inf), (math.inf, -math.inf)
"""Bands, nats."""

Fields = list[tuple[str, Any]]


def _struct_fields(kind: Any, names: str) -> Fields:  # noqa: ANN401 (a ctypes type)
    return [(name, kind) for name in names.split()]


class Band(ctypes.Structure):
    """Band on d, float32: a token is outside when d < lower or d > upper."""

    _fields_ = _struct_fields(ctypes.c_float, "lower upper")


class WideBand(ctypes.Structure):
    """Band on a log-ratio or a divergence, float64."""

    _fields_ = _struct_fields(ctypes.c_double, "lower upper")


class CriterionFields(ctypes.Structure):
    """A criterion: its statistic, the bounds on it, and at token level the d that it accepts."""

    _fields_ = [*_struct_fields(ctypes.c_int32, "scope kind"), ("bounds", WideBand), ("tokens", Band)]


class Job(ctypes.Structure):
    """Inputs, outputs and thresholds of one batch."""

    _fields_ = [
        *_struct_fields(
            ctypes.c_void_p, "train rollout mask offsets weights loss_mask sequence_kept places numbers policy_sums"
        ),
        *_struct_fields(ctypes.c_int64, "sequences length sequences_per_task tasks threads number_count"),
        *_struct_fields(ctypes.c_int64, "train_stride rollout_stride mask_stride"),
        *_struct_fields(ctypes.c_int32, "train_type rollout_type mask_type level mode nonfinite normalization"),
        *_struct_fields(ctypes.c_int32, "needs_k2 vetoing banded_below per_turn criteria_count"),
        ("criteria", CriterionFields * MAX_CRITERIA),
        ("token_criterion", ctypes.c_int32 * len(KINDS)),
        *_struct_fields(ctypes.c_float, "cap least floor ceiling"),
        *_struct_fields(Band, "band veto ten_percent weighted untouched accepted quiet"),
        *_struct_fields(WideBand, "wide_band wide_weighted low_weight"),
        *_struct_fields(ctypes.c_double, "bound decay"),
    ]


OF_BATCH = struct.Struct("=10Q6q3q3i")
"""The fields of a job that follow from the batch: addresses, sizes, strides and types, in the order of `Job`."""


def thresholds_of(config: RolloutCorrectionConfig) -> bytes:
    """Return the fields that depend only on the configuration: the bytes of a job after `OF_BATCH`."""
    bound, veto = config.safety_bound, config.rollout_token_veto_threshold
    cap = config.is_upper if config.is_mode == "truncate" and config.is_upper is not None else math.inf
    least = config.rollout_is_floor or 0.0
    low, high = log_band(*exceedance_band(config))
    level = "token" if config.rollout_is == "horizon" and not config.horizon_decay else config.rollout_is
    untouched = max(low, -bound, math.log(least) if least else -math.inf), min(high, bound, math.log(cap))
    zeroing, vetoed, accepted = zeroing_band(config), log_band(veto, None), EVERYTHING
    job = Job(
        level=_LEVELS.index(level),
        mode=_MODES.index(config.is_mode),
        nonfinite=_NONFINITE[config.nonfinite],
        normalization=_NORMALIZATION[config.batch_normalize_over],
        needs_k2=any(c.kind == "k2" and c.scope != "seq_max" for c in config.criteria),
        vetoing=veto is not None,
        banded_below=low > -math.inf,
        per_turn=config.rollout_is_horizon_per_turn,
        criteria_count=len(config.criteria),
        token_criterion=(-1, -1, -1),
        cap=cap,
        least=least,
        floor=math.exp(-bound),
        ceiling=math.exp(bound),
        bound=bound,
        decay=config.horizon_decay if config.rollout_is == "horizon" else 0.0,
        band=_round_to_float32((low, high)),
        weighted=_round_to_float32(zeroing),
        wide_band=(low, high),
        wide_weighted=zeroing,
        low_weight=log_band(None if config.is_upper is None else 1 / config.is_upper, None),
        veto=_round_to_float32(vetoed),
        ten_percent=_round_to_float32(log_band(0.9, 1.1)),
        untouched=_round_to_float32(untouched),
    )
    for i, criterion in enumerate(config.criteria):
        # The accepted d of a token follow from the criterion's bounds.
        bounds, kind = accepted_band(criterion), KINDS.index(criterion.kind)
        tokens = bounds if criterion.kind == "k1" else accepted_log_ratios(criterion.kind, bounds[1])
        scope = SCOPES.index(criterion.scope)
        job.criteria[i] = CriterionFields(scope, kind, WideBand(*bounds), _round_to_float32(tokens))
        if criterion.scope == "token":
            job.token_criterion[kind] = i
            accepted = _intersect_bands(accepted, tokens)
    job.accepted = _round_to_float32(accepted)

    # At token level a divergence also has moments and extremes of its own, which need the value of every token.
    described = any(criterion.scope == "token" and criterion.kind != "k1" for criterion in config.criteria)
    weighed = _intersect_bands(untouched, zeroing) if level == "token" else EVERYTHING
    job.quiet = _round_to_float32(
        NOTHING if described else _intersect_bands(_intersect_bands(accepted, vetoed), weighed)
    )
    return bytes(job)[OF_BATCH.size :]


def _intersect_bands(band: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Return the intersection of two bands."""
    return max(band[0], other[0]), min(band[1], other[1])


def accepted_log_ratios(kind: str, upper: float) -> tuple[float, float]:
    """Return the ends of {d : k(d) ≤ upper}, nats: both divergences are convex with their minimum at d = 0.

    k2: ±sqrt(2 upper). k3 has no closed form and is found by bisection; its upper end is +inf if k3(20) ≤ upper.
    """
    if kind == "k2":
        return -math.sqrt(2 * upper), math.sqrt(2 * upper)
    ends = []
    for sign, far in ((-1.0, upper + 1.0), (1.0, SAFETY_BOUND)):
        inside, outside = 0.0, far
        if sign > 0 and math.expm1(far) - far <= upper:
            inside = math.inf
        while inside < (middle := (inside + outside) / 2) < outside:
            if math.expm1(sign * middle) - sign * middle <= upper:
                inside = middle
            else:
                outside = middle
        ends.append(sign * inside)
    return ends[0], ends[1]


def _round_to_float32(bounds: tuple[float, float]) -> Band:
    """Return the float32 band that excludes a float32 exactly when the float64 bounds exclude it."""
    lower, upper = (np.float32(bound) for bound in bounds)
    if float(lower) < bounds[0]:
        lower = np.nextafter(lower, np.float32(np.inf))
    if float(upper) > bounds[1]:
        upper = np.nextafter(upper, np.float32(-np.inf))
    return Band(float(lower), float(upper))
