"""A program: replace a text, killed or without power at each file event; print the remaining files as JSON.

python tests/train/killed_writers.py FOLDER
"""

import json
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "crash"))

from file_events import FileEvents
from planted_bugs import BUGS, FILES, PACKAGE
from power_loss import lose_power, read_events

from rollcorr.run_directory.durable_files import write_text_durably

OLD, NEW = "old " * 10, "new " * 10


def plainly(path, text):
    path.write_text(text, encoding="utf-8")


def left_by(write, folder, events):
    """The remaining texts after a kill before and during each event; and the names of all files."""
    file = folder / "place" / "file.txt"
    file.parent.mkdir()

    def call():
        write(file, NEW)
        return 0

    file.write_text(OLD, encoding="utf-8")
    count = events.run(call, file.parent).events
    texts, files = [], set()
    for event in range(1, count + 1):
        for in_the_middle in (False, True):
            file.write_text(OLD, encoding="utf-8")
            assert events.run(call, file.parent, kill_at=event, in_the_middle=in_the_middle).killed
            texts.append(file.read_text(encoding="utf-8"))
            files |= {path.name for path in file.parent.iterdir()}
    without_power = [left_without_power(call, file, events, event) for event in (*range(1, count + 1), 0)]
    full = events.run(lambda: refused(call), file.parent, disk=7).exit_code
    return {
        "events": count,
        "texts": texts,
        "without power": without_power,
        "files": sorted(files),
        "exit code on a full disk": full,
    }


def left_without_power(call, file, events, event):
    """The remaining text if the power fails before an event, or after the end for 0."""
    log, removed = file.parents[1] / "events.log", file.parents[1] / f"removed_{event}"
    removed.mkdir()
    file.write_text(OLD, encoding="utf-8")
    events.run(call, file.parent, kill_at=event, log=log, removed=removed)
    lose_power(file.parent, [line for line in read_events(log) if not event or line.number < event], removed)
    return file.read_text(encoding="utf-8")


def planted(name):
    """The way to replace a text that has a bug of `tools/crash/planted_bugs.py`."""
    module = types.ModuleType(name)
    exec(BUGS[name].planted((PACKAGE / FILES).read_text(encoding="utf-8"), name), vars(module))
    return module.write_text_durably


def refused(call):
    try:
        return call()
    except OSError as error:
        return error.errno


def main():
    folder = Path(sys.argv[1])
    try:
        events = FileEvents(folder)
        events.run(lambda: 0, folder)
    except OSError as error:
        sys.exit(f"cannot run here: {error}")
    found = {}
    ways = {"plainly": plainly, "write_text_durably": write_text_durably}
    ways |= {name: planted(name) for name in ("no_fsync_file", "no_fsync_folder", "text_in_place")}
    for name, write in ways.items():
        (folder / name).mkdir()
        found[name] = left_by(write, folder / name, events)
    json.dump(found, sys.stdout)


main()
