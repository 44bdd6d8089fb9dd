"""RUN/history.json: which run this is, its first options, and every change of them. Each checkpoint has it too."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollcorr.train.option_changes import OptionChange, options_sha256


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """A change of options.

    Attributes:
        after_step: completed steps when it took effect.
        changes: what changed.
        sha256: of all options from then on.
    """

    after_step: int
    changes: tuple[OptionChange, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The identity of a run, and its options from the beginning until now.

    Attributes:
        run: tells it from every other run.
        first_options: what it began with, by dotted name.
        sha256: of `first_options`.
        entries: changes since then, in order.
    """

    run: str
    first_options: Mapping[str, Any]
    sha256: str
    entries: tuple[HistoryEntry, ...] = ()

    @classmethod
    def begin(cls, options: Mapping[str, Any]) -> RunHistory:
        """The history of a new run."""
        return cls(run=secrets.token_hex(8), first_options=dict(options), sha256=options_sha256(options))

    @classmethod
    def from_json(cls, text: str) -> RunHistory:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is something else, or its options do not have its SHA-256.
        """
        try:
            data = json.loads(text)
            entries = tuple(
                HistoryEntry(
                    after_step=entry["after_step"],
                    changes=tuple(OptionChange(**change) for change in entry["changes"]),
                    sha256=entry["sha256"],
                )
                for entry in data["entries"]
            )
            history = cls(run=data["run"], first_options=data["first_options"], sha256=data["sha256"], entries=entries)
            hashes = [options_sha256(options) for options in history._versions()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not the history of a run ({error or type(error).__name__})") from error
        if hashes != [history.sha256, *(entry.sha256 for entry in entries)]:
            raise ValueError("its options do not have the SHA-256 that it names: it was changed")
        return history

    def to_json(self) -> str:
        """The text of history.json."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def options(self) -> dict[str, Any]:
        """The options of now."""
        return self._versions()[-1]

    def changed(self, changes: Sequence[OptionChange], *, after_step: int) -> RunHistory:
        """This history with one entry more; itself if nothing changed."""
        if not changes:
            return self
        options = _apply(self.options, changes)
        entry = HistoryEntry(after_step=after_step, changes=tuple(changes), sha256=options_sha256(options))
        return RunHistory(
            run=self.run, first_options=self.first_options, sha256=self.sha256, entries=(*self.entries, entry)
        )

    def _versions(self) -> list[dict[str, Any]]:
        versions = [dict(self.first_options)]
        for entry in self.entries:
            versions.append(_apply(versions[-1], entry.changes))
        return versions


def _apply(options: Mapping[str, Any], changes: Sequence[OptionChange]) -> dict[str, Any]:
    return {**options, **{change.name: change.new for change in changes}}
