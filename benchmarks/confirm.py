"""Time `rollcorr confirm`, and score it: a real small model, a sampler with another temperature or penalty, and none.

    python benchmarks/confirm.py [--rows 8] [--tokens 128]

The model is stories260K, a small pretrained Llama (vocabulary 512). The sampler computes in bfloat16, the trainer in
float32. For each case this prints the verdict, the share of the excess that the named variant removes, and the
processor time of all variants of all rows in one thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from stories import load_stories  # noqa: E402

from rollcorr.config import SamplingSpec  # noqa: E402
from rollcorr.confirm import confirm  # noqa: E402
from rollcorr.engines import GenerationSettings, TransformersEngine, measure_null, score_responses  # noqa: E402
from rollcorr.rollout_log import RolloutLogWriter  # noqa: E402

CASES = {
    "none": {},
    "temperature 0.8": {"temperature": 0.8},
    "repetition penalty 1.1": {"repetition_penalty": 1.1},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 20": {"top_k": 20},
}


def main() -> None:
    """Print a line per case; exit with 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows to score (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response (default 128)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_stories()
    draw = np.random.default_rng(0)
    prompts = [[1, *draw.integers(259, 512, size=3).tolist()] for _ in range(4 * arguments.rows)]

    def score(rollout):
        with torch.no_grad():
            return score_responses(model, rollout.tokens).log_prob

    print(f"{'sampler':24s} {'CPU s':>6s} {'removed':>8s}  verdict")
    wrong = 0
    for name, options in CASES.items():
        sampling = SamplingSpec(**{"logprobs": "processed", **options})
        settings = GenerationSettings(
            max_new_tokens=arguments.tokens, pad_token_id=0, eos_token_id=0, sampling=sampling
        )
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log.parquet"
            with RolloutLogWriter(log) as writer:
                writer.write(measure_null(TransformersEngine(model, settings), prompts, seed=1, score=score))
            start = time.process_time()
            result = confirm(log, model, rows=arguments.rows)
            seconds = time.process_time() - start
        best = next((share for side in result.sides.values() for share in side.removed.values()), None)

        # The log records the temperature of both sides, and the trainer scores without it.
        expected = {"none": None, "temperature 0.8": "trainer: temperature 1"}
        wrong += result.cause != expected.get(name, f"sampler: {name}")
        print(f"{name:24s} {seconds:6.1f} {'' if best is None else f'{best:.1%}':>8s}  {result.verdict}")
    raise SystemExit(int(wrong > 0))


if __name__ == "__main__":
    main()
