"""docs/reference/options.md: every option of both trainers, of a correction and of a loss, from the dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Sequence

from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.diffusion import DiffusionActorConfig
from rollcorr.train import Family, FlowGrpoConfig, GrpoConfig
from rollcorr.train.flow_grpo.families import FAMILIES
from rollcorr.train.verl_paths import VERL_PATHS, VerlPath

Table = Callable[[Sequence[str], Sequence[Sequence[object]]], str]


def options_page(generated: str, table: Table) -> str:
    """The tables, one per block of options."""
    return f"""# Options

{generated}

This page lists the options of a correction, of a loss, and of the two trainers. On the command line, write an option as
`block.name=value`: `rollcorr train examples/train/demo.yaml optim.lr=1e-4`. [The trainer](../guides/trainer.md) and
[Flow-GRPO](../guides/flow_grpo.md) explain the blocks.

## Correction

These are the fields of `RolloutCorrectionConfig`, the options of `rollcorr.correct`, and the options in the block
`algorithm.rollout_correction` of a trainer. [Presets](presets.md) are named sets of them.

{_block(RolloutCorrectionConfig, table)}

## Loss

These are the fields of `LossConfig`, and the options in the block `algorithm.loss` of the trainer for language models.

{_block(LossConfig, table)}

## Trainer for language models

{_blocks(GrpoConfig, table)}

## Trainer for diffusion models

The block `algorithm.loss` has the fields of `rollcorr.diffusion.DiffusionActorConfig`.

{_blocks(FlowGrpoConfig, table)}

## Families of diffusion models

The class of the network selects the family. `model.family` sets [your own](../guides/flow_grpo.md#your-own-family).

{table(("network", "family", "schedulers"), [_family(name, family) for name, family in FAMILIES.items()])}

## Paths of verl and verl-omni

`rollcorr train` also reads these paths of verl's configuration, in a file and as overrides, with or without Hydra's
`+`. Paths without a matching option ("none") accept only listed values. Options of the correction may have the names
of [any release of verl](../coming_from/migration.md).

{table(("path of verl", "option here", "values"), [_path(name, path) for name, path in VERL_PATHS.items()])}

Where to go next: [presets](presets.md) for named sets of options, [the trainer](../guides/trainer.md) for how a run
reads them.
"""


def _blocks(config: type, table: Table) -> str:
    """A table of the options at the top, then one for each block."""
    simple, blocks = [], []
    for field in dataclasses.fields(config):
        nested = _nested(config, field)
        (simple if nested is None else blocks).append((field, nested))
    parts = [_rows(config, [field for field, _ in simple], table)]
    for field, nested in blocks:
        parts += [f"### {field.name}: {_title(config)}", _nested_rows(nested, f"{field.name}.", table)]
    return "\n\n".join(parts)


def _family(network: str, family: Family) -> tuple[str, str, str]:
    """The row of a family."""
    return f"`{network}`", type(family).__name__, ", ".join(f"`{name}`" for name in family.schedulers)


def _path(name: str, path: VerlPath) -> tuple[str, str, str]:
    """The row of a path of verl."""
    option = f"`{path.option}`" if path.option else "none"
    if path.values is None:
        return f"`{name}`", option, "as in verl"
    pairs = [(str(theirs).lower(), ours) for theirs, ours in path.values.items()]
    texts = [f"`{theirs}`" if ours in ("", theirs) else f"`{theirs}` → `{ours}`" for theirs, ours in pairs]
    return f"`{name}`", option, ", ".join(texts)


def _title(config: type) -> str:
    return "diffusion models" if config is FlowGrpoConfig else "language models"


def _nested_rows(config: type, prefix: str, table: Table) -> str:
    """The options of a block, and of the blocks in it but for the correction and the loss of language models."""
    rows = []
    for field in dataclasses.fields(config):
        nested = _nested(config, field)
        if nested is None:
            rows.append(_row(config, field, prefix))
        elif nested is LossConfig:
            rows.append((f"`{prefix}{field.name}`", "–", "see [Loss](#loss)"))
        else:
            rows += [_row(nested, inner, f"{prefix}{field.name}.") for inner in dataclasses.fields(nested)]
    return table(("option", "default", "meaning"), rows)


def _block(config: type, table: Table) -> str:
    return _rows(config, list(dataclasses.fields(config)), table)


def _rows(config: type, fields: Sequence[dataclasses.Field], table: Table) -> str:
    return table(("option", "default", "meaning"), [_row(config, field, "") for field in fields])


def _row(config: type, field: dataclasses.Field, prefix: str) -> tuple[str, str, str]:
    return f"`{prefix}{field.name}`", _default(field), _meaning(config, field.name)


def _default(field: dataclasses.Field) -> str:
    value = field.default
    if value is dataclasses.MISSING and callable(field.default_factory):
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "–"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        value = list(value)
    return "–" if value == "" else f"`{value}`"


def _nested(config: type, field: dataclasses.Field) -> type | None:
    """The class of a block of options; None for a plain value."""
    hint = typing.get_type_hints(config).get(field.name)
    return hint if inspect.isclass(hint) and dataclasses.is_dataclass(hint) else None


def _meaning(config: type, name: str) -> str:
    """What the docstring of the class, or of one above it, says of a field.

    Raises:
        ValueError: no docstring describes the field.
    """
    for owner in (*config.__mro__, DiffusionActorConfig):
        entry = _described(owner).get(name)
        if entry:
            return entry.replace("|", "\\|")
    raise ValueError(f"{config.__name__}.{name} has no line in a docstring: describe it under Attributes")


def _described(config: type) -> dict[str, str]:
    """Field → its lines under Attributes or Args, in one."""
    text = inspect.getdoc(config) or ""
    section = re.search(r"^(?:Attributes|Args):\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    if not section:
        return {}
    entries = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {5,}.*|\n(?=\n? {5,}))*)", section[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
