"""Time weights with a horizon against token weights: compiled kernel, 8 M tokens, in interleaved pairs.

    python benchmarks/horizon.py                            # λ = 0.9, 30 pairs
    python benchmarks/horizon.py --decay 0.99 --pairs 20 --threads 1
    python benchmarks/horizon.py --cpu-time --save          # CPU time, for a busy machine; writes benchmarks/results/

Each pair runs both levels on one batch, and the order changes from pair to pair. Outputs go to buffers that exist, and
metrics are not read. The ratio is horizon over token, of medians; the interval is that of 2,000 bootstrap samples of
the pairs. Log-ratios are independent, with the standard deviation that a case names, in nats: 0.02 where policies are
close, 0.2 where bounds on weights act. Exits with 1 if a ratio of close policies exceeds 1.5.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median

import torch
from paired import ratio_of_medians
from peers import HERE, provenance

from rollcorr import RolloutCorrectionConfig, correct
from rollcorr.core.layout import pack

LIMIT = 1.5
ROWS, LENGTH = 1024, 8192
CASES = [("dense", 0.02), ("padded", 0.02), ("packed", 0.02), ("dense", 0.2), ("packed", 0.2)]


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decay", type=float, default=0.9, help="λ (default 0.9)")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of each case (default 30)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/horizon.json")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of all threads, not elapsed time")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results, beyond = {}, False
    print(f"{'median ms':24s} {'token':>8s} {'horizon':>8s} {'ratio':>6s}  95 % interval")
    for layout, spread in CASES:
        pairs = timed_pairs(layout, spread, arguments)
        ratio, low, high = ratio_of_medians(pairs)
        token, horizon = (1e3 * median(column) for column in zip(*pairs, strict=True))
        name = f"{layout}, spread {spread:g}"
        print(f"{name:24s} {token:8.2f} {horizon:8.2f} {ratio:6.2f}  {low:.2f} to {high:.2f}", flush=True)
        results[name] = {"token_ms": token, "horizon_ms": horizon, "ratio": ratio, "interval": [low, high]}
        beyond |= spread < 0.1 and ratio > LIMIT
    if arguments.save:
        about = provenance(__file__, "cpu", arguments.threads) | {"load": round(os.getloadavg()[0], 1)}
        about |= {"pairs": arguments.pairs, "decay": arguments.decay, "cpu_time": arguments.cpu_time}
        text = json.dumps(about | {"cases": results}, indent=1)
        (HERE / "results" / "horizon.json").write_text(text + "\n", encoding="utf-8")
    raise SystemExit(int(beyond))


def timed_pairs(layout: str, spread: float, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the seconds of (token, horizon) of each pair: `LENGTH` tokens per row if dense, else an eighth to all."""
    generator = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand((ROWS, LENGTH), generator=generator)
    train = rollout + spread * torch.randn((ROWS, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 8, LENGTH + 1, (ROWS,), generator=generator)
    mask = torch.arange(LENGTH) < (torch.full_like(lengths, LENGTH) if layout == "dense" else lengths)[:, None]
    cu_seqlens = None
    if layout == "packed":
        (train, cu_seqlens), (rollout, _) = pack(train, mask), pack(rollout, mask)
        mask = torch.ones_like(train, dtype=torch.bool)
    out = torch.ones_like(train), torch.ones_like(mask)
    configs = (
        RolloutCorrectionConfig(rollout_is="token"),
        RolloutCorrectionConfig(rollout_is="horizon", rollout_is_horizon=arguments.decay),
    )

    def seconds(config: RolloutCorrectionConfig) -> float:
        clock = time.process_time if arguments.cpu_time else time.perf_counter
        start = clock()
        correct(train, rollout, mask, config, cu_seqlens=cu_seqlens, out=out, impl="cpu")
        return clock() - start

    pairs = []
    for pair in range(-2, arguments.pairs):  # two pairs warm up
        order = (0, 1) if pair % 2 else (1, 0)
        found = {side: seconds(configs[side]) for side in order}
        if pair >= 0:
            pairs.append((found[0], found[1]))
    return pairs


if __name__ == "__main__":
    main()
