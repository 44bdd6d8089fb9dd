"""What to do, as data: the configurations, their presets, and the conversion of older generations.

Frozen, keyword-only, checked at construction: a wrong type is a TypeError, a wrong value a ValueError, and an option
that can have no effect beside the others warns (`InertOptionWarning`). Nothing in this room imports torch, so the
command line starts fast.
"""

from rollcorr.config.checks import InertOptionWarning
from rollcorr.config.conversion import Conversion, FieldReport, Schema, convert, converted_document, resolve
from rollcorr.config.correction_options import (
    Implementation,
    IsMode,
    Level,
    LossType,
    NonfinitePolicy,
    Normalizer,
    RolloutCorrectionConfig,
)
from rollcorr.config.criteria import CRITERIA, Criterion, Threshold
from rollcorr.config.finding import Finding, Severity
from rollcorr.config.loss_options import LOSS_AGG_MODES, LossAggMode, LossConfig
from rollcorr.config.option_types import ConfigOptions, CorrectionOptions, PresetName
from rollcorr.config.presets import PRESETS, Preset
from rollcorr.config.sampling_spec import Comparison, IncompatibleSamplingError, SamplingSpec, check_compatible
from rollcorr.config.yaml_text import dump_yaml, load_yaml

__all__ = [
    "CRITERIA",
    "LOSS_AGG_MODES",
    "PRESETS",
    "Comparison",
    "ConfigOptions",
    "Conversion",
    "CorrectionOptions",
    "Criterion",
    "FieldReport",
    "Finding",
    "Implementation",
    "IncompatibleSamplingError",
    "InertOptionWarning",
    "IsMode",
    "Level",
    "LossAggMode",
    "LossConfig",
    "LossType",
    "NonfinitePolicy",
    "Normalizer",
    "Preset",
    "PresetName",
    "RolloutCorrectionConfig",
    "SamplingSpec",
    "Schema",
    "Severity",
    "Threshold",
    "check_compatible",
    "convert",
    "converted_document",
    "dump_yaml",
    "load_yaml",
    "resolve",
]
