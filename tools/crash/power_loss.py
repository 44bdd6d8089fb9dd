"""What a power loss leaves of a folder: only what was flushed.

A file is cut to the size that it had when it was last flushed. A name that was made, changed or removed since its
folder was last flushed is as it was before. That is the least that POSIX promises; a real disk may keep more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Event(NamedTuple):
    """A line of the log of `FileEvents.run`.

    Attributes:
        number: from 1.
        kind: "open", "write", "fsync", "rename", …
        amount: bytes to write, the size to cut to, or 1 if an open empties the file.
        path: what changes, below the root, with a slash at its start.
        inode: of what the path names before the call; 0 if there is nothing.
        size: of that.
        source: what a rename or a link names first.
    """

    number: int
    kind: str
    amount: int
    path: str
    inode: int
    size: int
    source: str


@dataclass
class _Change:
    """A name that was made or removed, and is not flushed."""

    kind: str  # "made", "renamed" or "removed"
    path: str
    source: str
    event: int
    is_replacement: bool


def read_events(log: Path) -> list[Event]:
    """The events of a followed run."""
    events = []
    for line in log.read_text(encoding="utf-8").splitlines():
        number, kind, amount, path, inode, size, source = line.split("\t")
        events.append(Event(int(number), kind, int(amount), path, int(inode), int(size), source))
    return events


def lose_power(root: Path, events: Iterable[Event], removed: Path) -> None:
    """Undo everything under a root that was not flushed.

    Args:
        root: the folder that was followed.
        events: those that happened.
        removed: the folder with the links to removed files, as given to `FileEvents.run`.
    """
    flushed: dict[int, int] = {}
    changes: list[_Change] = []
    for event in events:
        _note_content(event, flushed)
        _note_name(event, changes)

    # The newest first, so that each finds the names that it left.
    while changes:
        _undo(root, changes.pop(), changes, removed)
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            state = path.stat()
            if state.st_size > flushed.get(state.st_ino, state.st_size):
                os.truncate(path, flushed[state.st_ino])


def _note_content(event: Event, flushed: dict[int, int]) -> None:
    """Note how much of a file is on the disk. What was there at its first event came from before the run."""
    if not event.inode:
        return
    size = flushed.setdefault(event.inode, event.size)
    if event.kind == "fsync":
        flushed[event.inode] = event.size
    elif event.kind == "truncate":
        flushed[event.inode] = min(size, event.amount)
    elif event.kind == "open" and event.amount:
        flushed[event.inode] = 0


def _note_name(event: Event, changes: list[_Change]) -> None:
    """Note a name that changes, or that a flushed folder has made all its names last."""
    exists = event.inode != 0
    if event.kind == "fsync":
        lasting = [change for change in changes if str(PurePosixPath(change.path).parent) == (event.path or "/")]
        gone = [(change.path + "/", change.event) for change in lasting if change.kind == "removed"]
        changes[:] = [
            change
            for change in changes
            if change not in lasting
            and not any(change.path.startswith(folder) and change.event < at for folder, at in gone)
        ]
    elif event.kind in ("open", "mkdir", "link") and not exists and event.path:
        changes.append(_Change("made", event.path, "", event.number, is_replacement=False))
    elif event.kind == "unlink" and exists:
        changes.append(_Change("removed", event.path, "", event.number, is_replacement=False))
    elif event.kind == "rename" and event.source != event.path:
        _move(changes, event.source, event.path)
        changes.append(_Change("renamed", event.path, event.source, event.number, is_replacement=exists))


def _undo(root: Path, change: _Change, before: list[_Change], removed: Path) -> None:
    """Undo one change of a name."""
    path, kept = root / change.path[1:], removed / str(change.event)
    if change.kind == "made":
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    elif change.kind == "renamed":
        if path.exists():
            path.rename(root / change.source[1:])
        _move(before, change.path, change.source)
        if change.is_replacement and kept.exists():
            os.link(kept, path)
    elif kept.exists():
        path.unlink(missing_ok=True)
        os.link(kept, path)
    else:
        path.mkdir(exist_ok=True)


def _move(changes: list[_Change], source: str, target: str) -> None:
    """Give the noted names in a folder, or of a file, the path that they have after a rename."""
    for change in changes:
        for name in ("path", "source"):
            path = getattr(change, name)
            if path == source or path.startswith(f"{source}/"):
                setattr(change, name, target + path[len(source) :])
