"""Rules for options that change when a run resumes, the changes found, and their log, RUN/history.json.

A checkpoint fixes an option if its weights, its moments or its position in the data depend on the old value: the new
value would have no effect or produce incorrect numbers. Such a change raises `ValueError`. Every other option affects
only later steps: its change takes effect and is written to the history.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from rollcorr.config.documents import load_yaml
from rollcorr.train.config_file import option_values
from rollcorr.train.run_config import RunConfig


class OptionRule(NamedTuple):
    """Rule for a change of one option, or of every option in a block.

    Attributes:
        name: option or block.
        kind: "fixed" raises, "free" takes effect, "command" applies to one command and is not compared.
        reason: why the option is fixed.
    """

    name: str
    kind: Literal["fixed", "free", "command"]
    reason: str = ""


# The first rule with a matching name applies; an option without a rule is free.
OPTION_RULES = (
    OptionRule("run_dir", "command"),
    OptionRule("resume", "command"),
    OptionRule("stop_after_minutes", "command"),
    OptionRule("recipe", "fixed", "the weights are those of another kind of model"),
    OptionRule("seed", "fixed", "the order of the data and all noise follow from it"),
    OptionRule("model.gradient_checkpointing", "free"),
    OptionRule("model.encoder_dtype", "free"),
    OptionRule("model", "fixed", "the weights in the checkpoint are those of this model"),
    OptionRule("warm_up", "fixed", "the warm-up was before the first step"),
    OptionRule("task.bonus_length", "free"),
    OptionRule("task.reward", "free"),
    OptionRule("task", "fixed", "the checkpoint has a place in this data"),
    OptionRule("prompts", "fixed", "the checkpoint has a place in this data"),
    OptionRule("rollout.prompts_per_step", "fixed", "the checkpoint has a place in the data, in steps of this size"),
    OptionRule("optim.betas", "fixed", "Adam's moments are averages with these decays"),
)


@dataclass(frozen=True)
class OptionChange:
    """An option that differs between two configurations.

    Attributes:
        name: dotted name.
        old: its value before.
        new: its value now.
    """

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} → {self.new!r}"


def rule_of(name: str) -> OptionRule:
    """Return the rule for an option."""
    return next(
        (rule for rule in OPTION_RULES if name == rule.name or name.startswith(f"{rule.name}.")),
        OptionRule(name, "free"),
    )


def compared_options(config: RunConfig) -> dict[str, Any]:
    """Return every option that affects the training, by dotted name, with its value as in config.yaml."""
    return options_of(load_yaml(config.to_yaml()))


def options_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return `compared_options` of a parsed config.yaml, in JSON types."""
    values = {name: value for name, value in option_values(document) if rule_of(name).kind != "command"}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def options_sha256(options: Mapping[str, Any]) -> str:
    """Return the SHA-256 of `compared_options`, in hexadecimal."""
    return hashlib.sha256(_canonical_text(options).encode()).hexdigest()


def find_changes(old: Mapping[str, Any], config: RunConfig) -> list[OptionChange]:
    """Return the options of a configuration that differ from older ones.

    Args:
        old: older `compared_options`. A missing option did not exist yet and counts as its default.
        config: the current configuration.
    """
    new = compared_options(config)
    config_class: Any = type(config)  # a recipe's, whose options all have defaults
    defaults = {} if old.keys() >= new.keys() else compared_options(config_class())
    changes = [OptionChange(name, old.get(name, defaults.get(name)), new.get(name)) for name in {**new, **old}]
    return [change for change in changes if _canonical_text(change.old) != _canonical_text(change.new)]


def refuse_fixed(changes: Sequence[OptionChange], run_dir: str) -> None:
    """Raise if an option changed that a checkpoint fixes.

    Raises:
        ValueError: a fixed option changed; the message contains old and new values, the reason and the fixes.
    """
    rules = [(change, rule_of(change.name)) for change in changes]
    named = "; ".join(f"{change} ({rule.reason})" for change, rule in rules if rule.kind == "fixed")
    if named:
        raise ValueError(
            f"run_dir {run_dir!r} holds a run with other options, which cannot change within a run: {named}. Take the "
            "old values to go on with it, or choose another run_dir to start a new run"
        )


def _canonical_text(value: Any) -> str:  # noqa: ANN401
    """Return a canonical text of a value, in which NaN equals itself."""
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """A change of options.

    Attributes:
        after_step: completed steps when it took effect.
        changes: old and new values.
        sha256: of all options from then on.
    """

    after_step: int
    changes: tuple[OptionChange, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """RUN/history.json: the identity of a run and all its options so far. Each checkpoint contains a copy.

    Attributes:
        run: unique id of the run.
        first_options: options of its first start, by dotted name.
        sha256: of `first_options`.
        entries: changes since then, in order.
    """

    run: str
    first_options: Mapping[str, Any]
    sha256: str
    entries: tuple[HistoryEntry, ...] = ()

    @classmethod
    def begin(cls, options: Mapping[str, Any]) -> RunHistory:
        """Return the history of a new run."""
        return cls(run=secrets.token_hex(8), first_options=dict(options), sha256=options_sha256(options))

    @classmethod
    def from_json(cls, text: str) -> RunHistory:
        """Parse the text of `to_json`.

        Raises:
            ValueError: the text is not a history, or its options do not match its SHA-256.
        """
        try:
            data = json.loads(text)
            entries = tuple(
                HistoryEntry(**entry | {"changes": tuple(OptionChange(**change) for change in entry["changes"])})
                for entry in data["entries"]
            )
            history = cls(**data | {"entries": entries})
            hashes = [options_sha256(options) for options in history._all_versions()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not the history of a run ({error or type(error).__name__})") from error
        if hashes != [history.sha256, *(entry.sha256 for entry in entries)]:
            raise ValueError("its options do not have the SHA-256 that it names: it was changed")
        return history

    def to_json(self) -> str:
        """Return the text of history.json."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def options(self) -> dict[str, Any]:
        """Return the current options."""
        return self._all_versions()[-1]

    def changed(self, changes: Sequence[OptionChange], *, after_step: int) -> RunHistory:
        """Return a history with one more entry, or this one if `changes` is empty."""
        if not changes:
            return self
        options = _apply(self.options, changes)
        entry = HistoryEntry(after_step=after_step, changes=tuple(changes), sha256=options_sha256(options))
        return replace(self, entries=(*self.entries, entry))

    def _all_versions(self) -> list[dict[str, Any]]:
        versions = [dict(self.first_options)]
        for entry in self.entries:
            versions.append(_apply(versions[-1], entry.changes))
        return versions


def _apply(options: Mapping[str, Any], changes: Sequence[OptionChange]) -> dict[str, Any]:
    return {**options, **{change.name: change.new for change in changes}}
