"""The k3 of engines that hold the trainer's weights: what their arithmetic alone does to log-probs.

    python benchmarks/engine_noise.py [--rows 256] [--tokens 128] [--pools FOLDER]

The model is stories260K, a small pretrained Llama; the trainer scores in float32. With --pools, two pools of int8
rollouts (other prompts, other seeds) are written for `make calibration`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from stories import load_stories  # noqa: E402

from rollcorr.config import SamplingSpec  # noqa: E402
from rollcorr.diagnostics.null import MismatchProfile  # noqa: E402
from rollcorr.engines import GenerationSettings, TransformersEngine, measure_null, score_responses  # noqa: E402
from rollcorr.engines.base import Engine, Rollout  # noqa: E402
from rollcorr.engines.ctranslate2 import CTranslate2Engine  # noqa: E402
from rollcorr.rollout_log import RolloutBatch  # noqa: E402

NEVER = 0  # the model's padding, which it does not sample: responses have their full length


def rollouts(model: torch.nn.Module, engine: Engine, rows: int, seed: int, block: int = 256) -> list[RolloutBatch]:
    """Rollouts of an engine from prompts of their own, scored by the float32 model."""

    def score(rollout: Rollout) -> torch.Tensor:
        with torch.no_grad():
            return score_responses(model, rollout.tokens).log_prob

    random = np.random.default_rng(seed)
    prompts = [[1, *random.integers(259, 512, size=3).tolist()] for _ in range(rows)]
    parts = range(0, rows, block)
    return [
        measure_null(engine, prompts[at : at + block], seed=seed * 100_003, first_row=at, score=score) for at in parts
    ]


def log_ratios(batches: list[RolloutBatch]) -> list[np.ndarray]:
    """d of the valid tokens of each row."""
    rows = []
    for batch in batches:
        d = (batch.packed("old_log_prob") - batch.packed("rollout_log_prob")).double()
        mask = batch.packed("response_mask")
        for values, valid in zip(d.split(batch.lengths.tolist()), mask.split(batch.lengths.tolist()), strict=True):
            rows.append(values[valid].numpy())
    return rows


def profile_of(rows: list[np.ndarray]) -> MismatchProfile:
    """The profile of some rows of d."""
    d = np.concatenate(rows).astype(np.float32)
    rollout = np.full(len(d), -1.0, dtype=np.float32)
    lengths = np.array([len(row) for row in rows])
    return MismatchProfile.of(rollout + d, rollout, np.ones(len(d), dtype=bool), lengths)


def engines(model: torch.nn.Module, tokens: int) -> dict[str, Engine]:
    """Every engine that runs without a server."""
    settings = GenerationSettings(
        sampling=SamplingSpec(), max_new_tokens=tokens, eos_token_id=NEVER, pad_token_id=NEVER
    )
    found: dict[str, Engine] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        found[f"transformers {name}"] = TransformersEngine(model, settings, dtype=dtype)
    for name in ("float32", "int8"):
        found[f"ctranslate2 {name}"] = CTranslate2Engine(model, settings, compute_type=name, threads=1)
    return found


def main() -> None:
    """Measure, and print one JSON object per engine."""
    parser = argparse.ArgumentParser(description="The k3 of engines that hold the trainer's weights.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pools", type=Path)
    asked = parser.parse_args()
    model = load_stories()
    if asked.pools is None:
        for name, engine in engines(model, asked.tokens).items():
            profile = profile_of(log_ratios(rollouts(model, engine, asked.rows, seed=1)))
            found = {"engine": name, "k3": profile.k3, "std": profile.std, "tokens": profile.tokens}
            print(json.dumps(found), flush=True)
        return

    asked.pools.mkdir(parents=True, exist_ok=True)
    engine = engines(model, asked.tokens)["ctranslate2 int8"]
    for name, seed in (("null", 1), ("disjoint", 2)):
        rows = log_ratios(rollouts(model, engine, asked.rows, seed=seed))
        np.save(asked.pools / f"{name}.npy", np.stack([row for row in rows if len(row) == asked.tokens]))


if __name__ == "__main__":
    main()
