"""Custom study in YAML: a pair of policies, the estimators, the lengths and the batch sizes.

    pair: {kind: tempered, severity: 0.3, vocabulary: 8}     # or kl: 0.01 in place of severity
    length: [16, 64, 256]
    estimators:
      - decoupled_token_is
      - {name: mine, rollout_is: sequence, rollout_is_threshold: 4.0}
      - {name: wide, preset: decoupled_geo_rs, rollout_rs_threshold: "0.9_1.1"}     # a preset, some options replaced
    batch_sizes: [64, 1024]
    samples: 4096
    seed: 0

A pair may also be given as tables: `trainer` and `rollout` are logits, `reward` the points, each a list of S lists of V
numbers. `next_state` of the same shape is optional; by default the state is the last token, or the only state. `goal`
is optional as well.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import PRESETS, RolloutCorrectionConfig
from rollcorr.config.checks import check_integer, check_number, unknown_name
from rollcorr.config.documents import read_yaml
from rollcorr.simulation.estimators import Estimators, every_estimator
from rollcorr.simulation.markov_policies import MarkovPolicy, RewardRule, last_token_state
from rollcorr.simulation.mismatches import PolicyPair, make_pair, pair_at_kl
from rollcorr.simulation.sequence_rows import exact_rows, sample_rows
from rollcorr.simulation.studies import Cell, ResultRow, measure

_GENERATED_PAIR_KEYS = ("kind", "severity", "kl", "vocabulary", "states", "spread", "seed", "outcome", "reports")
_TABLE_PAIR_KEYS = ("trainer", "rollout", "reward", "next_state", "goal")


_DEFAULTS: dict[str, Any] = {
    "length": 16,
    "estimators": None,
    "batch_sizes": [64, 1024],
    "samples": 4096,
    "seed": 0,
}
"""Defaults of the optional keys. Without `estimators`, a study measures all built-in ones."""


def read_simulation_file(path: str | os.PathLike[str]) -> list[Cell]:
    """Read and check a file.

    Returns:
        One cell for each length.

    Raises:
        OSError: the file cannot be read.
        TypeError, ValueError: the file is not YAML, or contains an invalid key or value; the message names it, its
            limit and the nearest name.
    """
    document = read_yaml(Path(path))
    if not isinstance(document, Mapping):
        raise TypeError(f"{path} must hold keys such as pair and length; got {type(document).__name__}")
    _check_keys("the file", document, ("pair", *_DEFAULTS))
    if "pair" not in document:
        raise ValueError(f"{path} names no pair; add, for instance, pair: {{kind: noise, severity: 0.2}}")
    options = _DEFAULTS | dict(document)
    pair, chosen = options["pair"], options["estimators"]
    if not isinstance(pair, Mapping):
        raise TypeError(f"pair must be a mapping such as {{kind: noise, severity: 0.2}}; got {pair!r}")
    check_integer("samples", options["samples"], at_least=40)
    check_integer("seed", options["seed"], at_least=0)
    lengths = _parse_integers("length", options["length"])

    # Build both once here, so that an error is raised before the first cell and not after an hour.
    chosen_estimators(chosen)
    for length in lengths:
        pair_of(pair, length)

    shared = {
        "pair": dict(pair),
        "chosen": chosen,
        "batch_sizes": _parse_integers("batch_sizes", options["batch_sizes"]),
        "samples": options["samples"],
        "seed": options["seed"],
    }
    return [Cell("estimators", {"length": length, **shared}) for length in lengths]


def _parse_integers(option: str, values: object) -> list[int]:
    """Return one integer or a list of integers as a list.

    Raises:
        TypeError, ValueError: the list is empty, or an entry is not an integer above 0.
    """
    listed = values if isinstance(values, list) else [values]
    if not listed:
        raise ValueError(f"{option} is an empty list; give at least one number")
    return [check_integer(option, value, at_least=1) for value in listed]


def run_file_cell(cell: Cell) -> list[ResultRow]:
    """Measure one length of a file: exactly if the sums fit, otherwise from samples."""
    settings = cell.settings
    pair = pair_of(settings["pair"], settings["length"])
    rows = exact_rows(pair)
    if rows is None:
        rows = sample_rows(pair, settings["samples"], torch.Generator(device="cpu").manual_seed(settings["seed"]))
    chosen = chosen_estimators(settings["chosen"])
    return measure(rows, chosen, tuple(settings["batch_sizes"]), kind=pair.kind, severity=pair.severity)


def pair_of(options: Mapping[str, Any], length: int) -> PolicyPair:
    """Return the pair described by a file's `pair`.

    Raises:
        TypeError, ValueError: a key is unknown, or a value is invalid.
    """
    if "kind" in options:
        _check_keys("pair", options, _GENERATED_PAIR_KEYS)
        given = {key: value for key, value in options.items() if key not in ("kind", "severity", "kl")}
        if ("severity" in options) == ("kl" in options):
            raise ValueError(f"pair needs severity or kl, one of them; got {', '.join(options)}")
        if "kl" in options:
            return pair_at_kl(options["kind"], options["kl"], length=length, **given)
        return make_pair(options["kind"], options["severity"], length=length, **given)

    _check_keys("pair", options, _TABLE_PAIR_KEYS)
    missing = [name for name in ("trainer", "rollout", "reward") if name not in options]
    if missing:
        raise ValueError(f"pair has no {' and no '.join(missing)}; give a kind, or the tables trainer, rollout, reward")
    trainer, rollout, points = (_parse_table(name, options[name]) for name in ("trainer", "rollout", "reward"))
    policy = MarkovPolicy(trainer, _parse_next_state(options.get("next_state"), *trainer.shape))
    goal = options.get("goal")
    rule = RewardRule(points, None if goal is None else check_number("goal", goal))
    return PolicyPair(policy, policy.with_logits(rollout), rule, length)


def chosen_estimators(chosen: object) -> Estimators:
    """Return configurations from names and mappings; defaults to every estimator of the built-in study.

    Raises:
        TypeError, ValueError: an entry is neither, a name is unknown, or a configuration is invalid.
    """
    built_in = every_estimator()
    if chosen is None:
        return built_in
    known = built_in | {name: RolloutCorrectionConfig.preset(name) for name in PRESETS}
    if not isinstance(chosen, list) or not chosen:
        raise TypeError(f"estimators must be a list of names and configurations; got {chosen!r}")
    named: Estimators = {}
    for entry in chosen:
        if isinstance(entry, str):
            if entry not in known:
                raise ValueError(unknown_name(f"no estimator is named {entry!r}", entry, known))
            named[entry] = known[entry]
        elif isinstance(entry, Mapping):
            name = str(entry.get("name", ", ".join(f"{key}={value}" for key, value in entry.items())))
            named[name] = _build_estimator(name, {key: value for key, value in entry.items() if key != "name"})
        else:
            raise TypeError(f"an estimator is a name or a mapping of options; got {entry!r}")
    return named


def _build_estimator(name: str, options: dict[str, Any]) -> RolloutCorrectionConfig:
    """Return a custom estimator: fields of a configuration, or a preset with some of its fields replaced.

    Raises:
        TypeError, ValueError: an option or the preset is unknown, or a value is invalid.
    """
    preset = options.pop("preset", None)
    _check_keys(f"estimator {name!r}", options, ["preset", *RolloutCorrectionConfig().to_dict()])

    # A warning of the configuration does not contain the estimator's name, so add it.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if preset is None:
            config = RolloutCorrectionConfig(**options)
        else:
            config = RolloutCorrectionConfig.preset(str(preset)).with_options(**options)
    for warning in caught:
        warnings.warn(f"estimator {name!r}: {warning.message}", warning.category, stacklevel=2)
    return config


def _check_keys(where: str, given: Mapping[Any, Any], known: Any) -> None:  # noqa: ANN401 (any collection of names)
    for key in given:
        if key not in known:
            raise ValueError(unknown_name(f"{where} has no option {key!r}", key, known))


def _parse_table(name: str, values: object) -> Tensor:
    """Convert a list of lists of numbers to (S, V) float64."""
    try:
        table = torch.tensor(values, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise ValueError(f"pair.{name} must be a list of lists of numbers, all of one length; {error}") from error
    if table.dim() != 2:
        raise ValueError(f"pair.{name} must have states as rows and tokens as columns; got {table.dim()} dimensions")
    return table


def _parse_next_state(values: object, states: int, vocabulary: int) -> Tensor:
    if values is not None:
        return _parse_table("next_state", values).long()
    if states not in (1, vocabulary):
        raise ValueError(
            f"pair.next_state is needed: {states} states and {vocabulary} tokens; without it the state is the last "
            "token, so there are as many, or there is one state"
        )
    return last_token_state(states, vocabulary)
