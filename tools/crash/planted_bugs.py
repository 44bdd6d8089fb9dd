"""Plant each known durability bug in a copy of the package, and check that crash_runs.py finds it.

    python tools/crash/planted_bugs.py                     all of them, some minutes
    python tools/crash/planted_bugs.py --bugs no_fsync_file

A bug is a replacement of source text. Where the text has changed, this fails and names the bug: write it anew for the
new code, so that the harness goes on being tested.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "src" / "rollcorr"
RUN = "grpo_skipping"
"""The run of crash_runs.py that finds every bug: a stale engine, left-out steps, rollout logs."""


class BugNoLongerAppliesError(ValueError):
    """The source has changed; the message names the bug and the text that is missing."""


@dataclass(frozen=True)
class Bug:
    """A durability bug.

    Attributes:
        file: where, below the package.
        changes: pairs of texts, the correct one and the one in its place; each correct one occurs once.
        kinds: how the harness finds it: `--kinds` of crash_runs.py.
        paths: where: `--paths` of crash_runs.py.
    """

    file: str
    changes: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...] = ("power",)
    paths: str = ""

    def planted(self, source: str, name: str) -> str:
        """The source with the bug.

        Raises:
            BugNoLongerAppliesError: a text is missing or occurs twice.
        """
        for correct, wrong in self.changes:
            if source.count(correct) != 1:
                raise BugNoLongerAppliesError(
                    f"this planted bug no longer applies: {name}; {self.file} has this text {source.count(correct)} "
                    f"times, not once; write the bug anew for the new code:\n{correct}"
                )
            source = source.replace(correct, wrong)
        return source


FILES, LOOP, CHECKPOINT = "run_directory/durable_files.py", "train/loop.py", "train/checkpoint.py"
KILL = ("kill",)
CHECKPOINTS = r"checkpoints/\.step_00000[234]"
"""Later checkpoints while they are written: a start goes on from the one before."""
WRITTEN = '(*partial.rglob("*"), partial)'
LINES_FLUSHED = '"""Wait until every line is on the disk."""'

BUGS: Mapping[str, Bug] = {
    # What was written is not flushed.
    "no_fsync_file": Bug(FILES, ((WRITTEN, 'partial.rglob("*")'),)),
    "no_fsync_folder": Bug(
        FILES, (("partial.replace(target)\n        flush_to_disk", "partial.replace(target)\n        str"),)
    ),
    "no_fsync_checkpoint_tree": Bug(FILES, ((WRITTEN, "(partial,)"),)),
    "no_fsync_metrics": Bug("run_directory/sinks.py", ((LINES_FLUSHED, "return"),)),
    "no_fsync_rollout_log": Bug("rollout_log/writer.py", (("os.fsync(file.fileno())", "pass"),)),
    # A file is written under its final name.
    "text_in_place": Bug(
        FILES,
        ((" partial = partial_path(target)", " partial = target if target.suffix else partial_path(target)"),),
        KILL,
        r"^/\w+\.(json|yaml)$",
    ),
    "rollout_log_in_place": Bug(
        "rollout_log/writer.py",
        (("self._hidden = self.path.with_name(", "self._hidden = self.path or self.path.with_name("),),
        KILL,
        "rollouts/",
    ),
    # A start does not restore everything.
    "moments_not_restored": Bug(
        LOOP, (("trainer.optimizer.load_state_dict(checkpoint.optimizer)", "pass"),), KILL, CHECKPOINTS
    ),
    "engine_weights_not_restored": Bug(
        LOOP, (("if trainer.engine is None or checkpoint.engine_weights is None:", "if True:"),), KILL, CHECKPOINTS
    ),
    "skipped_steps_not_restored": Bug(
        LOOP, (("trainer.skipped_steps = checkpoint.state.skipped_steps", "pass"),), KILL, CHECKPOINTS
    ),
    # A checkpoint, or the log beside it, is not what a start needs.
    "manifest_after_rename": Bug(
        CHECKPOINT,
        (
            ("_write_manifest(partial, state.step)", "pass"),
            (
                "delete_older_checkpoints(directory, state.step, keep=keep)",
                "_write_manifest(final, state.step); delete_older_checkpoints(directory, state.step, keep=keep)",
            ),
        ),
        KILL,
        r"/step_\d+/manifest",
    ),
    "sha256_ignored": Bug(CHECKPOINT, (('if digest != entry["sha256"]:', "if digest is None:"),), ("damage",)),
    "old_checkpoints_deleted_first": Bug(
        CHECKPOINT,
        (
            (
                "final = directory / step_name(state.step)",
                "[*map(delete_folder_durably, paths_by_step(directory).values())]; "
                "final = directory / step_name(state.step)",
            ),
        ),
        KILL,
        CHECKPOINTS,
    ),
    "log_not_flushed_before_checkpoint": Bug(LOOP, (("self.lines.flush()", "pass"),)),
    "log_written_after_checkpoint": Bug(
        LOOP,
        (
            ("self.lines.write(self.step, metrics)\n", "pass\n"),
            (
                "self._save()\n\n        if",
                "self._save()\n            self.lines.write(self.step, metrics)\n\n        if",
            ),
        ),
        KILL,
        "metrics.jsonl",
    ),
    # And others.
    "later_lines_kept": Bug(
        "run_directory/metrics_file.py",
        (("if size != directory.metrics.stat().st_size:", "if not size:"),),
        KILL,
        CHECKPOINTS,
    ),
    "draws_from_process_history": Bug(
        "train/steps.py",
        (("manual_seed(derived_seed(seed, purpose, step))", "manual_seed(int(torch.randint(2**31, ())))"),),
        KILL,
        CHECKPOINTS,
    ),
    "lock_without_effect": Bug("run_directory/run_lock.py", (("fcntl.LOCK_EX | ", "fcntl.LOCK_SH | "),), ("lock",)),
}


def plant(name: str, package: Path) -> None:
    """Change a copy of the package."""
    bug = BUGS[name]
    file = package / bug.file
    file.write_text(bug.planted(file.read_text(encoding="utf-8"), name), encoding="utf-8")


def fault_found(name: str, folder: Path, *, jobs: int, points: int) -> str:
    """The first fault that crash_runs.py reports of a bug; empty if it reports none.

    Raises:
        RuntimeError: crash_runs.py itself failed.
    """
    bug = BUGS[name]
    shutil.copytree(PACKAGE, folder / "rollcorr", ignore=shutil.ignore_patterns("__pycache__"))
    plant(name, folder / "rollcorr")
    command = [sys.executable, str(Path(__file__).with_name("crash_runs.py")), "--runs", RUN, "--first"]
    command += ["--jobs", str(jobs), "--points", str(points), "--paths", bug.paths, "--kinds", *bug.kinds]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "runs equal an uninterrupted one" not in ended.stdout:
        raise RuntimeError(f"{name}: crash_runs.py failed\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    faults = [
        line for line in ended.stdout.splitlines() if line.startswith(f"{RUN}: ") and ": " in line[len(RUN) + 2 :]
    ]
    return faults[0] if ended.returncode == 1 else ""


def main() -> int:
    """Plant and look for each bug; returns 1 if one was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", nargs="*", choices=BUGS, default=list(BUGS), help="which bugs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--points", type=int, default=12, help="kill points to try, until one finds the bug")
    options = parser.parse_args()

    missed = []
    for name in options.bugs:
        with tempfile.TemporaryDirectory() as folder:
            fault = fault_found(name, Path(folder), jobs=options.jobs, points=options.points)
        print(f"{name}: {fault[:200] if fault else 'MISSED'}", flush=True)
        missed += [] if fault else [name]
    print(f"{len(options.bugs) - len(missed)} of {len(options.bugs)} planted bugs were found")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
