"""Types of presets and options. Type checkers read `option_types.pyi`, which tools/generate_docs.py writes.

At runtime the names are aliases of plain types, and `with_named_presets` adds the constructors.
"""

from typing import Any

PresetName = str
"""Name of a preset: one of the keys of `PRESETS`."""
CorrectionOptions = dict[str, Any]
"""Options of `rollcorr.correct`: the fields of a `RolloutCorrectionConfig` but `impl`, all optional."""
ConfigOptions = dict[str, Any]
"""Fields of a `RolloutCorrectionConfig`, all optional."""


class NamedPresets:
    """Base class of a configuration with a constructor for each preset."""
