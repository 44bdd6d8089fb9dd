"""Configurations as data, their presets, and the conversion of older schemas.

The dataclasses are frozen, keyword-only and checked at construction. An invalid type raises `TypeError`, an invalid
value raises `ValueError`, and an option without effect warns (`InertOptionWarning`). This package does not import
torch, so the command line starts fast.
"""

from rollcorr.config.checks import InertOptionWarning
from rollcorr.config.conversion import FieldReport, convert, converted_document
from rollcorr.config.correction_options import (
    Implementation,
    Level,
    Normalizer,
    RolloutCorrectionConfig,
)
from rollcorr.config.criteria import CRITERIA, Criterion, Threshold
from rollcorr.config.documents import dump_yaml, load_yaml
from rollcorr.config.finding import Finding, Severity
from rollcorr.config.loss_options import LossAggMode, LossConfig
from rollcorr.config.option_types import ConfigOptions, CorrectionOptions, PresetName
from rollcorr.config.presets import PRESETS
from rollcorr.config.sampling_spec import IncompatibleSamplingError, SamplingSpec, check_compatible

__all__ = [
    "CRITERIA",
    "PRESETS",
    "ConfigOptions",
    "CorrectionOptions",
    "Criterion",
    "FieldReport",
    "Finding",
    "Implementation",
    "IncompatibleSamplingError",
    "InertOptionWarning",
    "Level",
    "LossAggMode",
    "LossConfig",
    "Normalizer",
    "PresetName",
    "RolloutCorrectionConfig",
    "SamplingSpec",
    "Severity",
    "Threshold",
    "check_compatible",
    "convert",
    "converted_document",
    "dump_yaml",
    "load_yaml",
]
