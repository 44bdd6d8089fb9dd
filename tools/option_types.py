"""`src/rollcorr/config/option_types.pyi`: what type checkers know of presets and options, from the tables of both."""

from __future__ import annotations

from dataclasses import fields

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.presets import BAND_LOWER, PRESETS

WIDTH = 120
"""Characters of a line."""
ONLY_OF_CONFIGURATIONS = ("impl",)
"""Fields that `correct` has as arguments of its own."""


def option_types_stub() -> str:
    """The stub: names of presets, options as keyword arguments, and the constructors of the presets."""
    types = {field.name: str(field.type).replace("'", '"') for field in fields(RolloutCorrectionConfig)}
    names = "\n".join(f"    {_quoted(name)}," for name in PRESETS)
    options = "\n".join(f"    {name}: {of}" for name, of in types.items() if name not in ONLY_OF_CONFIGURATIONS)
    others = "\n".join(f"    {name}: {types[name]}" for name in ONLY_OF_CONFIGURATIONS)
    constructors = "\n".join(_constructor(name, types) for name in PRESETS)
    return f"""# Written by tools/generate_docs.py from the fields of RolloutCorrectionConfig and the table of presets.

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

from typing_extensions import Self

from .correction_options import Implementation, Level, LossType, NonfinitePolicy, NormalizedUnits, Normalizer
from .criteria import Threshold

PresetName: TypeAlias = Literal[
{names}
]

class CorrectionOptions(TypedDict, total=False):
{options}

class ConfigOptions(CorrectionOptions, total=False):
{others}

class NamedPresets:
{constructors}
"""


def _constructor(name: str, types: dict[str, str]) -> str:
    """A preset as a class method, with its arguments and their defaults."""
    preset = PRESETS[name]
    arguments = ["cls"]
    for argument, set_fields in preset.parameters.items():
        of = "float | None" if set_fields[0] == BAND_LOWER else types[set_fields[0]]
        default = next((preset.values.get(field) for field in set_fields), None)
        shown = _quoted(default) if isinstance(default, str) else repr(default)
        arguments.append(f"{argument}: {of} = {shown}")

    # As ruff formats it: in one line, with the arguments in a line of their own, or one argument to a line.
    line = ", ".join(arguments)
    if len(f"    def {name}({line}) -> Self: ...") > WIDTH:
        fits = len(line) + 8 <= WIDTH
        line = f"\n        {line}\n    " if fits else "".join(f"\n        {one}," for one in arguments) + "\n    "
    return f"    @classmethod\n    def {name}({line}) -> Self: ..."


def _quoted(text: str) -> str:
    return f'"{text}"'
