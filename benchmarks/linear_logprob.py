"""Time log-probs without logits, forward and backward, against full logits, TRL, Liger and a masked full softmax.

    python benchmarks/linear_logprob.py            # 512 tokens, d = 1,024, V = 32,768 and 151,936, on the CPU
    python benchmarks/linear_logprob.py --vocabulary 32768 --rounds 10
    python benchmarks/linear_logprob.py --device cuda --dtype bfloat16 --tokens 8192 --width 4096
    python benchmarks/linear_logprob.py --save     # also writes benchmarks/results/

TRL and Liger are installed into benchmarks/.venv/linear, which borrows this environment's torch; the timing runs there.
Every round runs every contender once (short ones ten times), and ratios are of minima. "Four products" are the matrix
products alone: logits, logits again, the gradient in the hidden states, that in the head. Peak memory is what
tensors that a contender makes hold at most at a time: gradients included, what exists before it not.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peers import HERE, interleaved, provenance, run_beside, summary

if TYPE_CHECKING:
    import torch

    from rollcorr.core.sampling import KeptSets

PEERS = ["trl==1.16.0", "liger-kernel==0.8.5"]
PEERS_NEED = ["pandas", "datasets"]
KEPT = 20
PRODUCTS, MASKED = "four products", "masked full softmax, added to a gradient"


def main() -> None:
    """Run in an environment that holds the peers."""
    arguments = parse()
    run_beside(__file__, "linear", PEERS, PEERS_NEED)
    import torch

    torch.set_num_threads(arguments.threads)
    for vocabulary in arguments.vocabulary:
        report(arguments, vocabulary)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="N (default 512)")
    parser.add_argument("--width", type=int, default=1024, help="hidden size, d (default 1024)")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32768, 151936], help="V (default 32768 151936)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default float32")
    parser.add_argument("--part", default="all", choices=["all", "whole", "kept"], help="what to time (default all)")
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds (default 6)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    return parser.parse_args()


@dataclass
class Batch:
    """Hidden states, a head with a gradient that exists, tokens, their kept sets, and the gradient of the log-probs."""

    hidden: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor
    ids: torch.Tensor
    kept: KeptSets
    mask: torch.Tensor
    upstream: torch.Tensor

    def backward(self, log_prob: torch.Tensor, upstream: torch.Tensor | None = None) -> None:
        """Gradients of Σ g log p."""
        (log_prob * (self.upstream if upstream is None else upstream)).sum().backward()


def make_batch(arguments: argparse.Namespace, V: int) -> Batch:
    """Random ones; each token keeps itself and others that no two share more often than chance has it."""
    import torch

    from rollcorr.core.sampling import KeptSets

    generator = torch.Generator().manual_seed(0)
    N, d, dtype = arguments.tokens, arguments.width, getattr(torch, arguments.dtype)
    hidden = torch.randn(N, d, generator=generator).to(arguments.device, dtype).requires_grad_()
    weight = (torch.randn(V, d, generator=generator) / d**0.5).to(arguments.device, dtype).requires_grad_()
    sets = torch.stack([torch.randperm(V, generator=generator)[:KEPT] for _ in range(N)]).to(arguments.device)
    mask = torch.zeros(N, V, dtype=torch.bool, device=arguments.device).scatter_(1, sets, True)
    return Batch(
        hidden=hidden,
        weight=weight,
        gradient=torch.zeros_like(weight),
        ids=sets[:, 0].contiguous(),
        kept=KeptSets(sets.int().flatten(), torch.arange(N + 1, device=arguments.device) * KEPT),
        mask=mask,
        upstream=torch.randn(N, generator=generator).to(arguments.device),
    )


def contenders(batch: Batch, impl: str) -> dict[str, Callable[[], object]]:
    """Everything that is timed, by name."""
    import torch

    from rollcorr.kernels.linear_logprob import linear_log_prob

    hidden, weight, ids = batch.hidden, batch.weight, batch.ids
    half = batch.upstream.masked_fill(torch.arange(len(ids), device=ids.device) % 2 == 0, 0.0)
    buffer = torch.empty(len(ids), 4096, dtype=hidden.dtype, device=hidden.device)
    of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)

    def products() -> None:
        with torch.no_grad():
            for rows, out in zip(weight.split(4096), of_weight.split(4096), strict=True):
                chunk = buffer[:, : len(rows)] if len(rows) == 4096 else buffer[:, : len(rows)].contiguous()
                torch.mm(hidden, rows.t(), out=chunk)
                torch.mm(hidden, rows.t(), out=chunk)
                of_hidden.addmm_(chunk, rows)
                torch.mm(chunk.t(), hidden, out=out)

    def fresh(log_prob: Callable[[], torch.Tensor], upstream: torch.Tensor | None = None) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            batch.backward(log_prob(), upstream)

        return run

    def added(log_prob: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad, weight.grad = None, batch.gradient
            batch.backward(log_prob())

        return run

    def ours(**options: Any) -> Callable[[], torch.Tensor]:
        return lambda: linear_log_prob(hidden, weight, ids, impl=impl, **options).log_prob

    def full() -> torch.Tensor:
        return (hidden @ weight.t()).float().log_softmax(-1).gather(1, ids[:, None]).squeeze(1)

    def masked() -> torch.Tensor:
        logits = (hidden @ weight.t()).float().masked_fill(~batch.mask, -torch.inf)
        return logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)

    def without_gradient(log_prob: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return torch.no_grad()(log_prob)

    trl, liger = peers(batch)
    into = {"kept": batch.kept, "accumulate_into": batch.gradient}
    return {
        PRODUCTS: products,
        "full logits": fresh(full),
        "TRL 1.16.0": fresh(trl),
        "Liger 0.8.5": fresh(liger),
        "rollcorr": fresh(ours()),
        "rollcorr, added to a gradient": fresh(ours(accumulate_into=batch.gradient)),
        "TRL 1.16.0, half of the gradients zero": fresh(trl, half),
        "Liger 0.8.5, half of the gradients zero": fresh(liger, half),
        "rollcorr, half of the gradients zero": fresh(ours(), half),
        MASKED: added(masked),
        "rollcorr, kept sets, added to a gradient": fresh(ours(**into)),
        "rollcorr, kept sets, a gradient of their own": fresh(ours(kept=batch.kept)),
        "masked full softmax, forward": without_gradient(masked),
        "rollcorr, kept sets, forward": without_gradient(ours(kept=batch.kept)),
    }


def peers(batch: Batch) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """What TRL's and Liger's trainers call, with the chunk sizes that they choose."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction
    from trl.kernels import ChunkedLogProbFunction

    def trl() -> torch.Tensor:
        return ChunkedLogProbFunction.apply(batch.hidden, batch.weight, None, batch.ids, 1.0, 4096, None, 1.0, ())[0]

    def liger() -> torch.Tensor:
        return _ChunkedSelectiveLogProbFunction.apply(batch.hidden, batch.weight, batch.ids, None, 1.0, 4096)

    return trl, liger


def report(arguments: argparse.Namespace, V: int) -> None:
    """Time, weigh, print and save one vocabulary size."""
    import torch

    batch = make_batch(arguments, V)
    contestants = contenders(batch, "triton" if arguments.device == "cuda" else "auto")
    if arguments.part != "all":
        kept = {name: run for name, run in contestants.items() if "kept" in name or "masked" in name}
        chosen = kept if arguments.part == "kept" else contestants.keys() - kept.keys()
        contestants = {name: run for name, run in contestants.items() if name in chosen or name == PRODUCTS}
    memory = {name: peak(run, batch) for name, run in contestants.items()}
    synchronize = torch.cuda.synchronize if arguments.device == "cuda" else None
    times = interleaved(contestants, arguments.rounds, synchronize=synchronize)
    figures = {name: summary(runs) for name, runs in times.items()}
    shape = f"N = {arguments.tokens:,}, d = {arguments.width:,}, V = {V:,}, K = {KEPT}, {arguments.dtype}"
    print(f"\n{shape}, {arguments.device}, {arguments.threads} threads, torch {torch.__version__}")
    print(f"{'ms':46s} {'min':>9s} {'median':>9s} {'CPU':>9s} {'/ products':>10s} {'masked /':>9s} {'peak MB':>9s}")
    for name, of in figures.items():
        line = f"{name:46s} {of['min'] * 1e3:9.1f} {of['median'] * 1e3:9.1f} {of['cpu'] * 1e3:9.1f}"
        masked = figures[MASKED]["min"] / of["min"] if MASKED in figures else float("nan")
        ratios = f"{of['min'] / figures[PRODUCTS]['min']:10.3f} {masked:9.1f}"
        print(f"{line} {ratios} {memory[name] / 1e6:9.1f}")
    if arguments.save:
        save(arguments, V, figures, memory)


def peak(run: Callable[[], object], batch: Batch) -> int:
    """Bytes in tensors that a call has made, at most at one time."""
    from counting import Counts

    run()
    batch.hidden.grad = batch.weight.grad = None
    with Counts() as counts:
        run()
    return counts.peak_bytes


def save(arguments: argparse.Namespace, V: int, figures: dict[str, Any], memory: dict[str, int]) -> None:
    """Write the figures with what is needed to repeat them."""
    result = provenance(__file__, arguments.device, arguments.threads) | {
        "tokens": arguments.tokens,
        "width": arguments.width,
        "vocabulary": V,
        "kept": KEPT,
        "dtype": arguments.dtype,
        "peak_bytes": memory,
        "seconds": figures,
    }
    name = f"linear_logprob_{arguments.device}_{arguments.dtype}_{arguments.tokens}x{arguments.width}x{V}.json"
    path = HERE / "results" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print("wrote", path.relative_to(HERE.parent))


if __name__ == "__main__":
    main()
