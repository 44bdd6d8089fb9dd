"""Time the trainer's log-probs from (B, T, V) logits against `linear_log_prob`, and count the memory of both.

    python benchmarks/trainer_log_prob.py                    # the demo's policy, then V = 32,768 and 151,936
    python benchmarks/trainer_log_prob.py --sizes 151936x256 --rounds 3

Scoring is a forward pass without gradients; the loss is a forward pass and the backward pass of Σ g log p. Both are of
the whole model, which beyond the demo's policy has one layer, so that the head costs what it can at most. Paths take
turns. Peak memory is that of tensors made meanwhile, gradients included.

On two busy cores, medians in ms and peaks in MB, logits against `linear_log_prob`, which `train/grpo` therefore uses:

    demo, V = 258     scoring   20 and  18 ms,   4 and   4 MB     loss   57 and   67 ms,  34 and  34 MB
    V = 32,768        scoring  213 and 129 ms, 151 and  10 MB     loss  530 and  350 ms, 166 and 104 MB
    V = 151,936       scoring 1012 and 576 ms, 700 and  16 MB     loss 2519 and 2237 ms, 947 and 947 MB

The last loss is as large in both because the head is tied to the embedding: two gradients of 311 MB, and their sum.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from counting import Counts
from peers import interleaved, summary

from rollcorr.engines import TokenBatch, score_responses, score_responses_fused
from rollcorr.train.grpo import make_tiny_policy


def main() -> None:
    """Print a line per size, path and phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["demo", "32768x256", "151936x512"], help="demo, or VxD")
    parser.add_argument("--rows", type=int, default=8, help="responses of a batch (default 8)")
    parser.add_argument("--width", type=int, default=48, help="tokens of the longest response (default 48)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    arguments = parser.parse_args()
    print(f"{'size':12s} {'phase':8s} {'path':8s} {'median ms':>10s} {'min ms':>9s} {'peak MB':>9s}")
    for size in arguments.sizes:
        for (phase, path), run in measured(arguments, size).items():
            times, peak = run
            print(
                f"{size:12s} {phase:8s} {path:8s} {1e3 * times['median']:10.1f} {1e3 * times['min']:9.1f} {peak:9.1f}"
            )


def measured(arguments: argparse.Namespace, size: str) -> dict[tuple[str, str], Any]:
    """Seconds and megabytes by phase and path."""
    model, tokens = make_batch(arguments, size)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(tokens.response_ids.shape, generator=generator).masked_fill(~tokens.response_mask, 0.0)

    def logits() -> torch.Tensor:
        return score_responses(model, tokens).log_prob

    def linear() -> torch.Tensor:
        return score_responses_fused(model, tokens, entropy=True).log_prob

    def loss(log_prob: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            (log_prob() * upstream).sum().backward()

        return run

    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for path, function in (("logits", logits), ("linear", linear)):
        runs["scoring", path] = torch.no_grad()(function)
        runs["loss", path] = loss(function)
    memory = {name: peak(run, model) for name, run in runs.items()}
    times = interleaved(runs, arguments.rounds)
    return {name: (summary(times[name]), memory[name] / 1e6) for name in sorted(runs, reverse=True)}


def make_batch(arguments: argparse.Namespace, size: str) -> tuple[Any, TokenBatch]:
    """A policy, and a batch of random responses of uneven lengths."""
    overrides: dict[str, int] = {}
    if size != "demo":
        vocabulary, width = map(int, size.split("x"))
        overrides = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 1}
    policy = make_tiny_policy(**overrides)
    if size != "demo":
        policy.model.resize_token_embeddings(vocabulary, mean_resizing=False)
    rows, width = arguments.rows, arguments.width
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(policy.model.get_input_embeddings().weight), (rows, 16 + width), generator=generator)
    lengths = torch.randint(width // 4, width + 1, (rows, 1), generator=generator)
    prompt, response = ids.split([16, width], dim=1)
    mask = torch.arange(width) < lengths
    return policy.model.eval(), TokenBatch(prompt, torch.ones_like(prompt, dtype=torch.bool), response, mask)


def peak(run: Callable[[], object], model: Any) -> int:
    """Bytes in tensors that a call has made, at most at one time."""
    run()
    model.zero_grad()
    with Counts() as counts:
        run()
    model.zero_grad()
    return counts.peak_bytes


if __name__ == "__main__":
    main()
