"""The stages of tools/gpu.py: a function each, which is given a plan and a place for its rows."""

from __future__ import annotations

import importlib
from typing import NamedTuple


class Plan(NamedTuple):
    """What to run on.

    Attributes:
        device: "cuda" or "cpu".
        quick: small sizes, to see that everything runs.
    """

    device: str
    quick: bool


class Stage(NamedTuple):
    """One stage.

    Attributes:
        module: the file of this folder whose `run(plan, rows)` it is.
        seconds: its limit.
        what: it in a few words.
    """

    module: str
    seconds: float
    what: str

    def run(self, plan: Plan, rows: object) -> None:
        """Run it here."""
        importlib.import_module(f"gpu_stages.{self.module}").run(plan, rows)


STAGES = {
    "ceilings": Stage("ceilings", 40, "what the device can do: copy, matrix product, launch"),
    "correctness": Stage("correctness", 150, "golden cases, random batches, 2³¹ tokens, equal bits"),
    "waiting": Stage("waiting", 80, "no wait, graph capture, launches"),
    "correction": Stage("correction_time", 130, "the correction, by size and layout, against its peers"),
    "log_probs": Stage("log_prob_time", 90, "log-probs without logits, against their peers"),
    "training": Stage("training_share", 110, "the correction's share of a training step; the demo"),
    "nsight": Stage("nsight", 60, "hardware counters of the three launches"),
}
