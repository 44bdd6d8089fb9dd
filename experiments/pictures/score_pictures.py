"""Judge the kept features of every log, and count the first causes.

    python experiments/pictures/score_pictures.py [picture_logs.npz] [--seeds 5 6 7 8 9]

Rules were tuned on the logs of seeds 0 to 4 at D = 768 and of seeds 0 and 1 at D = 65,536; the others are held out.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.null import Origin
from rollcorr.diagnostics.null.picture_judgment import guarded_null, judge_pictures
from rollcorr.diagnostics.null.picture_rows import FIELDS, PictureRows
from rollcorr.diagnostics.resolver import resolve_findings, standing

LOGS = Path(__file__).parent / "picture_logs.npz"
COLUMNS = ("step", "group", "timestep", "sigma", "sigma_next", "std", "log_mu", "log_pi", "kl", "version")
AS_FIELDS = {"std": "step_std", "log_mu": "rollout", "log_pi": "train"}
CAUSES = {
    "stale": {"frozen_sampler", "stale_by_lag"},
    "prompts": {"other_prompts"},
    "guidance": {"guidance_differs"},
    "guidance lost": {"guidance_differs"},
    "noise level": {"noise_level_differs"},
    "shift": {"shift_differs"},
    "schedule": {"schedule_differs"},
    "precision": {"precision_differs"},
}
"""Kind of log, without its setting after " @ " → codes that name its cause. Every other kind is healthy."""
NULLS = {"healthy fp8": "fp8", "healthy guided": "guided", "guidance lost": "guided", "healthy bf16": "bf16"}
WINDOW = 2


def pictures_of(values: np.ndarray, dimensions: int) -> PictureRows:
    """The denoising steps of a log, from the kept columns (10, n)."""
    table = np.full((values.shape[1], len(FIELDS)), np.nan)
    for name, column in zip(COLUMNS, values.astype(np.float64), strict=True):
        if name != "group":
            table[:, FIELDS.index(AS_FIELDS.get(name, name))] = column
    table[:, FIELDS.index("picture")] = np.arange(values.shape[1]) // WINDOW
    table[:, FIELDS.index("dimensions")] = dimensions
    return PictureRows(table)


def null_kind(dimensions: int, kind: str) -> str:
    """The null of the settings that a log should have been made with."""
    if dimensions == 65_536:
        return {"healthy fp8": "fp8", "healthy bf16": "bf16"}.get(kind, "matched")
    return NULLS.get(kind, "bf16")


def first_causes(logs: Path = LOGS) -> Iterator[tuple[int, int, str, tuple[str, ...], str]]:
    """D, seed, kind, the causes from the first one on, and the verdict of each log."""
    with np.load(logs) as stored:
        tables = {name: stored[name] for name in stored.files}
    for name, values in tables.items():
        size, seed, setting = name.split("/")
        kind = setting.partition(" @ ")[0]
        if kind.startswith("null"):
            continue
        dimensions = int(size)
        of_null = pictures_of(tables[f"{size}/{seed}/null {null_kind(dimensions, kind)}"], dimensions)
        judged = judge_pictures(
            pictures_of(values, dimensions), guarded_null(of_null, name="null.json", origin=Origin())
        )
        found = resolve_findings(null=judged.findings, evidence=Evidence(current={}, diffusion=True))
        warned = any(finding.severity != "note" for finding in found)
        causes = tuple(finding.code for finding in standing(found))
        yield dimensions, int(seed), setting, causes, "unhealthy" if warned else "healthy"


def main() -> None:
    """Print the counts for each kind, and each miss."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("logs", type=Path, nargs="?", default=LOGS)
    arguments.add_argument("--seeds", type=int, nargs="*")
    given = arguments.parse_args()
    right: Counter[tuple[int, str]] = Counter()
    total: Counter[tuple[int, str]] = Counter()
    for dimensions, seed, kind, causes, verdict in first_causes(given.logs):
        if given.seeds is not None and seed not in given.seeds:
            continue
        total[dimensions, kind] += 1
        wanted = CAUSES.get(kind.partition(" @ ")[0])
        good = causes[:1] and causes[0] in wanted if wanted else verdict == "healthy"
        right[dimensions, kind] += bool(good)
        if not good:
            sys.stdout.write(f"miss: D = {dimensions}, seed {seed}, {kind}: {causes}, {verdict}\n")
    for (dimensions, kind), count in sorted(total.items()):
        sys.stdout.write(f"D = {dimensions:6}  {kind:20} {right[dimensions, kind]} of {count}\n")


if __name__ == "__main__":
    main()
