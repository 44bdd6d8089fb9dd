"""Find the schema of correction options, and write options of any schema in the newest form.

A schema shows itself by a key that only it has, or by a value: `rollout_is` was a bool in 2025-10, and `rollout_rs` the
name of a level in 2025-11. `rollcorr.config.generations` converts field by field.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from typing import Any

from rollcorr.config.checks import InertOptionWarning
from rollcorr.config.criteria import CRITERIA, STEP_CRITERIA
from rollcorr.config.generations import (
    CONVERTERS,
    DEFAULTS,
    KEYS,
    LATE_2025_11,
    OLDER_CRITERIA,
    RENAMED,
    SCHEMAS,
    Schema,
    shown,
)

SECTION = "rollout_correction"


def find_schema(options: Mapping[str, Any], *, flat: bool) -> Schema:
    """Return the schema of a set of options; `flat` says that they lie in `algorithm` itself.

    Raises:
        ValueError: a mixture of schemas; the message contains the overrides of the newest form.
    """
    signs = _signs(options)
    level = options.get("rollout_is")

    # The newest names without a sign only exclude the first schema.
    later = [key for key in options if "2025-10" not in owners(key)]
    if isinstance(level, str):
        later.append(f"rollout_is: {level}")

    # verl 0.7 wrote the operating mode of 2025-11 with the newest names.
    found = [schema for schema in SCHEMAS if signs[schema]]
    if found == ["2025-11", "newest"] and set(signs["newest"]) <= set(LATE_2025_11):
        return "2025-11"
    if len(found) > 1 or (found == ["2025-10"] and later):
        groups = [f"{schema}: {', '.join(signs[schema])}" for schema in found]
        if len(found) == 1:
            groups.append(f"later: {', '.join(later)}")
        raise ValueError(
            f"these options mix generations ({'; '.join(groups)}); write all of them in one{instead(options)}"
        )
    if found:
        return found[0]
    # Only the first schema put its options flat into `algorithm`.
    return "2025-10" if flat and not later else "newest"


def newest_overrides(options: Mapping[str, Any]) -> str:
    """Return options of any schema, or of a mixture, as overrides of the newest form.

    Each schema's options are converted on their own, and the newer ones win.

    Raises:
        TypeError, ValueError: as `rollcorr.config.convert`.
    """
    fields: dict[str, Any] = {}
    off = False
    for schema in SCHEMAS:
        part = _part(options, schema)
        if schema != "newest" and not _signs(part)[schema]:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InertOptionWarning)
            config, _ = CONVERTERS[schema](part)
        off = off or config is None
        if config is not None:
            fields |= {key: value for key, value in config.to_dict().items() if value != DEFAULTS[key]}
    return as_overrides(fields) or f"algorithm.{SECTION}={'null' if off else '{}'}"


def as_overrides(fields: Mapping[str, Any]) -> str:
    """Return fields of a correction as overrides to type; with Hydra's plus where verl's own class lacks the key."""
    return " ".join(
        f"{'' if key in KEYS['newest'][:7] else '+'}algorithm.{SECTION}.{key}={shlex.quote(shown(value))}"
        for key, value in fields.items()
    )


def overrides(values: Mapping[str, Any], path: str = "") -> str:
    """Return nested options as overrides to type."""
    return " ".join(
        overrides(value, f"{path}{key}.") if isinstance(value, Mapping) else f"{path}{key}={shlex.quote(shown(value))}"
        for key, value in values.items()
    )


def nested(name: object, value: object) -> dict[Any, Any]:
    """Return a dotted name's value in nested blocks; a `+` before the name, Hydra's mark of a new key, is dropped."""
    first, *rest = name.removeprefix("+").split(".", 1) if isinstance(name, str) else [name]
    return {first: nested(rest[0], value) if rest else value}


def instead(options: Mapping[str, Any]) -> str:
    """Return the end of a message that refuses options: the overrides to type, or why there are none yet."""
    try:
        return f". In the newest form: {newest_overrides(options)}"
    except (TypeError, ValueError) as error:
        return f". First fix this: {error}"


def owners(key: str) -> list[Schema]:
    """Return the schemas that have an option."""
    return [schema for schema in SCHEMAS if key in KEYS[schema]]


def _part(options: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return the options of one schema in a mixture; a threshold goes with its level or criterion."""
    level, rs = options.get("rollout_is"), options.get("rollout_rs")
    other: tuple[str, ...] = ()
    if isinstance(level, str if schema == "2025-10" else bool):
        other = ("rollout_is", "rollout_is_threshold")
    if rs is not None and (rs in OLDER_CRITERIA) != (schema == "2025-11"):
        other += ("rollout_rs", "rollout_rs_threshold")
    other += tuple(older for older, newer in RENAMED.items() if newer in options)
    own = KEYS[schema] + (LATE_2025_11 if schema == "2025-11" else ())
    return {key: value for key, value in options.items() if key in own and key not in other}


def _signs(options: Mapping[str, Any]) -> dict[Schema, list[str]]:
    """Return the keys and values that only one schema has, by schema."""
    signs = {schema: [key for key in options if owners(key) == [schema]] for schema in SCHEMAS}
    level, rs = options.get("rollout_is"), options.get("rollout_rs")
    if isinstance(level, bool):
        signs["2025-10"].append(f"rollout_is: {shown(level)}")
    names = {name.strip() for name in rs.split(",")} if isinstance(rs, str) else set()
    if names & OLDER_CRITERIA.keys():
        signs["2025-11"].append(f"rollout_rs: {rs}")
    if names & (CRITERIA | STEP_CRITERIA).keys():
        signs["newest"].append(f"rollout_rs: {rs}")
    return signs
