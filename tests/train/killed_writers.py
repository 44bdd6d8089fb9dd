"""A program: two ways to replace a text, killed at each file event; prints what is left, as JSON.

python tests/train/killed_writers.py FOLDER
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "crash"))

from file_events import FileEvents

from rollcorr.run_directory.durable_files import write_text_durably

OLD, NEW = "old " * 10, "new " * 10


def plainly(path, text):
    path.write_text(text, encoding="utf-8")


def left_by(write, folder, events):
    """The texts that are left, for a kill before each event, and in the middle of it; and the names of all files."""
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
    full = events.run(lambda: refused(call), file.parent, disk=7).exit_code
    return {"events": count, "texts": texts, "files": sorted(files), "exit code on a full disk": full}


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
    for write in (plainly, write_text_durably):
        (folder / write.__name__).mkdir()
        found[write.__name__] = left_by(write, folder / write.__name__, events)
    json.dump(found, sys.stdout)


main()
