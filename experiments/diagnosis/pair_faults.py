"""Pairs of log-probs of synthetic policies, and the faults that can be put into some of their rows.

A vocabulary of V tokens is kept as K blocks: the likeliest tokens alone, the rest in blocks of equally likely tokens.
So a softmax at any temperature is exact for any V at the price of K. The engine's logits are the trainer's plus noise;
tokens are drawn from what the engine samples from.

    healthy = healthy_pairs(rows=24, length=128, seed=0)
    broken = inject("shifted", healthy, severity=1, share=0.2, seed=0)
    estimate_provenance(broken.train, broken.rollout, broken.mask, cu_seqlens=broken.cu_seqlens)

`SWEEP` lists the causes with their severities; `EXPECTED` the codes that name each. `sweep` goes through all of them:

    python experiments/diagnosis/pair_faults.py naming.csv --seeds 10
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from rollcorr import estimate_provenance

LONE = 24
"""Tokens that have a block of their own."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Log-probs of sampled tokens, packed.

    Attributes:
        train: log π, (N,) float32.
        rollout: log μ, (N,) float32.
        mask: true on tokens that count, (N,).
        cu_seqlens: (B + 1,).
        affected: rows with the fault, (B,) bool.
        policy: where both sides came from; None after rows were cut.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    affected: Tensor
    policy: Policy | None = field(default=None, repr=False)

    @property
    def row(self) -> Tensor:
        """The row of each token, (N,)."""
        return torch.arange(len(self.cu_seqlens) - 1).repeat_interleave(self.cu_seqlens.diff())

    @property
    def position(self) -> Tensor:
        """The position of each token in its row, (N,)."""
        return torch.arange(len(self.train)) - self.cu_seqlens[self.row]


@dataclass(frozen=True, eq=False)
class Policy:
    """Logits of trainer and engine over blocks of tokens.

    Attributes:
        train: (N, K), before any temperature.
        engine: (N, K).
        log_count: log of the tokens in each block, (K,).
        temperature: of trainer and sampler.
        generator: of the tokens drawn.
    """

    train: Tensor
    engine: Tensor
    log_count: Tensor
    temperature: float
    generator: torch.Generator

    def draw(self, temperature: float, *, top_p: float = 1.0, top_k: int = 0) -> tuple[Tensor, Tensor]:
        """Blocks drawn from the engine, (N,), and the blocks that it kept, (N, K)."""
        mass = (self.engine / temperature + self.log_count).log_softmax(-1)
        order = self.engine.argsort(-1, descending=True)
        sorted_mass = mass.gather(-1, order).exp()
        before = sorted_mass.cumsum(-1) - sorted_mass
        count = self.log_count.exp()[order]
        kept = (before < top_p) & ((count.cumsum(-1) - count < top_k) if top_k else True)
        kept[..., 0] = True
        kept = torch.zeros_like(kept).scatter(-1, order, kept)
        noise = -torch.empty_like(mass).exponential_(generator=self.generator).log()
        return (mass.masked_fill(~kept, -math.inf) + noise).argmax(-1), kept

    def log_prob(self, side: str, block: Tensor, temperature: float, kept: Tensor | None = None) -> Tensor:
        """Log-prob of one token of each block, over the kept blocks where they are given, (N,)."""
        z = (self.train if side == "train" else self.engine) / temperature
        mass = z + self.log_count if kept is None else (z + self.log_count).masked_fill(~kept, -math.inf)
        return (z.gather(-1, block.unsqueeze(-1)).squeeze(-1) - mass.logsumexp(-1)).clamp(max=0)


def healthy_pairs(
    *,
    rows: int = 24,
    length: int = 128,
    spread: float = 0.5,
    vocabulary: int = 32_000,
    temperature: float = 1.0,
    noise: float = 0.03,
    tail: float = 0.0,
    rounded: bool = True,
    decided: bool = True,
    replayed: bool = False,
    seed: int = 0,
) -> Pairs:
    """A log without a fault.

    Args:
        rows: sequences.
        length: median tokens of a response.
        spread: standard deviation of the log of a response's length.
        vocabulary: V.
        temperature: that both sides divide by.
        noise: standard deviation of the engine's logits; 0.03 is bfloat16, 0.15 int8.
        tail: share of tokens whose noise is 20 times as large: a mixture of experts that routes elsewhere.
        rounded: round the engine's logits to bfloat16.
        decided: whether most contexts have a likely token; an untrained policy has none.
        replayed: sample with top_p 0.9 and score both sides over the kept set.
        seed: of everything.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = (length * (spread * torch.randn(rows, generator=generator)).exp()).round().long().clamp(min=4)
    tokens = int(lengths.sum())
    starts = _block_starts(vocabulary)
    counts = torch.tensor([b - a for a, b in zip(starts, [*starts[1:], vocabulary], strict=True)])
    middle = torch.tensor(starts) + counts / 2

    # Half of the contexts are all but certain, some are open: what trained language models show.
    kind, inside = torch.rand(2, tokens, 1, generator=generator)
    steepness = torch.where(kind < 0.5, 5 + 9 * inside, torch.where(kind < 0.85, 1.8 + 3.2 * inside, 1.05 + inside))
    z = -steepness * (middle + 0.5).log() + 0.3 * torch.randn(tokens, len(starts), generator=generator)
    if not decided:
        z = 0.8 * torch.randn(tokens, len(starts), generator=generator)

    size = noise * torch.where(torch.rand(tokens, 1, generator=generator) < tail, 20.0, 1.0)
    engine = z + size * torch.randn(z.shape, generator=generator) / counts.sqrt().clamp(max=8)
    engine = (engine + 8).bfloat16().float() - 8 if rounded else engine
    policy = Policy(z, engine, counts.log(), temperature, generator)

    block, kept = policy.draw(temperature, top_p=0.9 if replayed else 1.0)
    train, rollout = (policy.log_prob(side, block, temperature, kept) for side in ("train", "engine"))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    nobody = torch.zeros(rows, dtype=torch.bool)
    return Pairs(train, rollout, torch.ones(tokens, dtype=torch.bool), cu_seqlens, nobody, policy)


def _block_starts(vocabulary: int) -> list[int]:
    starts, size = list(range(min(LONE, vocabulary))), 1.0
    while starts[-1] + 1 < vocabulary and len(starts) < 200:
        size *= 1.35
        starts.append(min(max(starts[-1] + 1, int(starts[-1] + size)), vocabulary))
    return [start for start in starts if start < vocabulary]


def inject(cause: str, pairs: Pairs, *, severity: float | str, share: float = 1.0, seed: int = 0) -> Pairs:
    """Put a fault into a share of the rows, one at least; `SWEEP` names the causes and their severities."""
    generator = torch.Generator().manual_seed(1000 + seed)
    rows = len(pairs.cu_seqlens) - 1
    affected = torch.zeros(rows, dtype=torch.bool)
    affected[torch.randperm(rows, generator=generator)[: max(1, round(share * rows))]] = True
    broken = replace(pairs, affected=affected)
    return _INJECTIONS[cause](broken, severity, affected[pairs.row], generator)


def _tempered(pairs: Pairs, severity: float, tokens: Tensor, _: torch.Generator) -> Pairs:
    """The sampler's temperature is `severity` times the trainer's, and its log-probs say so."""
    return _sampled(pairs, tokens, pairs.policy.temperature * severity)


def _raw(pairs: Pairs, severity: float, tokens: Tensor, _: torch.Generator) -> Pairs:
    """Sampled at `severity`, the trainer divides by it too, the engine reports temperature 1."""
    policy = pairs.policy
    block, _ = policy.draw(severity)
    train, rollout = policy.log_prob("train", block, severity), policy.log_prob("engine", block, 1.0)
    return _where(pairs, tokens, train, rollout)


def _truncated(pairs: Pairs, severity: float, tokens: Tensor, _: torch.Generator) -> Pairs:
    """Sampled with top_p (below 1) or top_k; the engine's log-probs are over what was kept."""
    limit = {"top_p": severity} if severity < 1 else {"top_k": int(severity)}
    return _sampled(pairs, tokens, pairs.policy.temperature, **limit)


def _sampled(pairs: Pairs, tokens: Tensor, temperature: float, **limit: float) -> Pairs:
    policy = pairs.policy
    block, kept = policy.draw(temperature, **limit)
    train = policy.log_prob("train", block, policy.temperature)
    return _where(pairs, tokens, train, policy.log_prob("engine", block, temperature, kept))


def _shifted(pairs: Pairs, severity: float, tokens: Tensor, _: torch.Generator) -> Pairs:
    """The rollout's log-probs come `severity` tokens late (negative: early) in their row."""
    rollout = pairs.rollout.clone()
    for start, end in _spans(pairs, tokens):
        rollout[start:end] = rollout[start:end].roll(int(severity))
    return replace(pairs, rollout=rollout)


def _late_shift(pairs: Pairs, severity: float, tokens: Tensor, generator: torch.Generator) -> Pairs:
    """As `_shifted`, but from some token on: the first tenth to half of each row is right."""
    rollout = pairs.rollout.clone()
    for start, end in _spans(pairs, tokens):
        right = 0.1 + 0.4 * float(torch.rand(1, generator=generator))
        begin = start + round(right * (end - start))
        rollout[begin:end] = rollout[begin:end].roll(int(severity))
    return replace(pairs, rollout=rollout)


def _other_request(pairs: Pairs, severity: str, tokens: Tensor, generator: torch.Generator) -> Pairs:
    """The affected rows exchange their log-probs ("swap"), or get those of requests that the log lacks ("lost")."""
    rollout = pairs.rollout.clone()
    spans = _spans(pairs, tokens)
    if severity == "lost" or len(spans) < 2:
        for start, end in spans:
            pick = torch.randperm(len(rollout), generator=generator)[: end - start]
            rollout[start:end] = pairs.rollout[pick]
        return replace(pairs, rollout=rollout)
    for (start, end), (a, b) in zip(spans, [*spans[1:], spans[0]], strict=True):
        theirs = pairs.rollout[a:b]
        rollout[start:end] = theirs.repeat(-(-(end - start) // len(theirs)))[: end - start]
    return replace(pairs, rollout=rollout)


def _placeholder(constant: float) -> Callable[..., Pairs]:
    def put(pairs: Pairs, severity: float, tokens: Tensor, generator: torch.Generator) -> Pairs:
        """A constant in place of a share `severity` of the affected rows' tokens."""
        holes = tokens & (torch.rand(len(tokens), generator=generator) < severity)
        return replace(pairs, rollout=pairs.rollout.masked_fill(holes, constant))

    return put


def _unit(pairs: Pairs, severity: str, tokens: Tensor, _: torch.Generator) -> Pairs:
    """Another unit on the rollout's side."""
    turned = {
        "log2": pairs.rollout / math.log(2),
        "log10": pairs.rollout / math.log(10),
        "sign": -pairs.rollout,
        "probability": pairs.rollout.exp(),
    }[severity]
    return replace(pairs, rollout=torch.where(tokens, turned, pairs.rollout))


def _storage(pairs: Pairs, severity: str, tokens: Tensor, _: torch.Generator) -> Pairs:
    """The rollout's log-probs went through a 16-bit type."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[severity]
    return replace(pairs, rollout=torch.where(tokens, pairs.rollout.to(dtype).float(), pairs.rollout))


def _template(pairs: Pairs, severity: float, tokens: Tensor, generator: torch.Generator) -> Pairs:
    """The trainer saw another beginning: its logits are `severity` off at the first token, less from token to token."""
    size = severity * torch.exp(-pairs.position / 4)
    return _retrained(pairs, tokens, size, generator)


def _turn_drift(pairs: Pairs, severity: float, tokens: Tensor, generator: torch.Generator) -> Pairs:
    """A gap in the middle of each row; after it, the trainer's logits of the affected rows are `severity` off."""
    lengths = pairs.cu_seqlens.diff()[pairs.row]
    mask = pairs.mask & ((pairs.position - lengths // 2).abs() > lengths // 16 + 1)
    size = severity * (pairs.position > lengths // 2).float()
    return replace(_retrained(pairs, tokens, size, generator), mask=mask)


def _retrained(pairs: Pairs, tokens: Tensor, size: Tensor, generator: torch.Generator) -> Pairs:
    policy = pairs.policy
    z = policy.train + size.unsqueeze(-1) * torch.randn(policy.train.shape, generator=generator)
    other = replace(policy, train=z)
    block, _ = other.draw(policy.temperature)
    train, rollout = (other.log_prob(side, block, policy.temperature) for side in ("train", "engine"))
    return _where(pairs, tokens, train, rollout)


def _foreign(kind: str) -> Callable[..., Pairs]:
    def put(pairs: Pairs, severity: float, tokens: Tensor, generator: torch.Generator) -> Pairs:
        """A span of `severity` tokens of another origin in each affected row: a tool's output, or padding at the end.

        The trainer finds them surprising (tool) or all but impossible (pad); the engine has zeros or a score there.
        """
        train, rollout = pairs.train.clone(), pairs.rollout.clone()
        for start, end in _spans(pairs, tokens):
            size = min(int(severity), max(end - start - 4, 1))
            at = end - size
            if kind != "pad":
                at = int(torch.randint(start, max(end - size, start) + 1, (1,), generator=generator))
            draw = torch.rand(size, generator=generator)
            train[at : at + size] = -24 - 8 * draw if kind in ("pad", "scored") else -6 * draw
            rollout[at : at + size] = train[at : at + size] if kind == "scored" else 0.0
        return replace(pairs, train=train, rollout=rollout)

    return put


def _spans(pairs: Pairs, tokens: Tensor) -> list[tuple[int, int]]:
    bounds = pairs.cu_seqlens.tolist()
    return [(a, b) for a, b in itertools.pairwise(bounds) if bool(tokens[a])]


def _where(pairs: Pairs, tokens: Tensor, train: Tensor, rollout: Tensor) -> Pairs:
    return replace(
        pairs, train=torch.where(tokens, train, pairs.train), rollout=torch.where(tokens, rollout, pairs.rollout)
    )


_INJECTIONS: Mapping[str, Callable[..., Pairs]] = {
    "tempered": _tempered,
    "raw": _raw,
    "truncated": _truncated,
    "shifted": _shifted,
    "late_shift": _late_shift,
    "other_request": _other_request,
    "zero": _placeholder(0.0),
    "constant": _placeholder(-1.0),
    "minus_9999": _placeholder(-9999.0),
    "nan": _placeholder(math.nan),
    "unit": _unit,
    "storage": _storage,
    "template": _template,
    "turn_drift": _turn_drift,
    "tool": _foreign("tool"),
    "pad": _foreign("pad"),
    "scored": _foreign("scored"),
}

SWEEP: Mapping[str, tuple[float | str, ...]] = {
    "tempered": (0.5, 0.7, 0.8, 0.9, 0.95, 1.1, 1.3, 2.0),
    "raw": (0.5, 0.7, 0.8, 0.9, 1.1, 1.3),
    "truncated": (0.8, 0.9, 0.95, 0.98, 50.0, 20.0),
    "shifted": (1, -1, 2, -3),
    "late_shift": (1, -1, 2, -3),
    "other_request": ("swap", "lost"),
    "zero": (1.0, 0.5, 0.1, 0.02),
    "constant": (1.0, 0.5, 0.1, 0.02),
    "minus_9999": (1.0, 0.5, 0.1, 0.02),
    "nan": (1.0, 0.5, 0.1, 0.02),
    "unit": ("log2", "log10", "sign", "probability"),
    "storage": ("bf16", "fp16"),
    "template": (0.5, 1.0, 2.0, 4.0),
    "turn_drift": (0.2, 0.5, 1.0, 2.0),
    "tool": (4, 8, 16, 32),
    "pad": (4, 8, 16, 32),
    "scored": (4, 8, 16, 32),
}
"""Cause → its severities; each is swept over shares of rows as well."""

EXPECTED: Mapping[str, frozenset[str]] = {
    "tempered": frozenset({"tempered", "processed"}),
    "raw": frozenset({"tempered", "raw"}),
    "truncated": frozenset({"truncated"}),
    "shifted": frozenset({"shifted"}),
    "late_shift": frozenset({"shifted"}),
    "other_request": frozenset({"other_request"}),
    "zero": frozenset({"placeholder"}),
    "constant": frozenset({"placeholder"}),
    "minus_9999": frozenset({"placeholder"}),
    "nan": frozenset({"placeholder"}),
    "unit": frozenset({"wrong_unit"}),
    "storage": frozenset({"storage"}),
    "template": frozenset({"template"}),
    "turn_drift": frozenset({"turn_drift"}),
    "tool": frozenset({"foreign_tokens"}),
    "pad": frozenset({"foreign_tokens"}),
    "scored": frozenset({"foreign_tokens"}),
}
"""Cause → the codes that are right for it. "matched" and "unexplained" name no cause."""

SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)
"""Shares of rows of the sweep."""
LOGS: Sequence[Mapping[str, float | bool]] = (
    {},
    {"vocabulary": 150_000, "noise": 0.15},
    {"vocabulary": 512, "temperature": 0.7},
    {"noise": 0.05, "tail": 0.02},
    {"rows": 64, "length": 40},
    {"rows": 16, "length": 400, "noise": 0.005, "rounded": False},
)
"""The logs of the sweep: a seed takes them in turn; 32 rows of 128 tokens unless they say otherwise."""
NO_CAUSE = frozenset({"matched", "unexplained"})
"""Codes that name nothing."""


@dataclass(frozen=True)
class Naming:
    """What one log of the sweep was called.

    Attributes:
        cause: what was put into it.
        severity: as in `SWEEP`.
        share: of the rows.
        seed: of the log and of the fault.
        named: whether a right code was named.
        wrong: codes that are not the cause's, joined by spaces. A note about storage is none.
    """

    cause: str
    severity: float | str
    share: float
    seed: int
    named: bool
    wrong: str


def sweep(*, seeds: int = 10, causes: Sequence[str] = tuple(SWEEP)) -> Iterator[Naming]:
    """Each severity of each cause in each share of the rows, with this many seeds."""
    for cause in causes:
        for severity, share, seed in itertools.product(SWEEP[cause], SHARES, range(seeds)):
            healthy = healthy_pairs(seed=31 * seed + 7, **{"rows": 32, **LOGS[seed % len(LOGS)]})
            broken = inject(cause, healthy, severity=severity, share=share, seed=seed)
            found = estimate_provenance(broken.train, broken.rollout, broken.mask, cu_seqlens=broken.cu_seqlens)
            codes = set(found.codes) - NO_CAUSE
            wrong = codes - EXPECTED[cause] - {"storage"}
            yield Naming(cause, severity, share, seed, bool(codes & EXPECTED[cause]), " ".join(sorted(wrong)))


def main() -> None:
    """Write the sweep as CSV."""
    parser = argparse.ArgumentParser(description="Which causes are named, by severity and share of rows.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--causes", nargs="*", default=list(SWEEP))
    arguments = parser.parse_args()
    with arguments.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Naming.__dataclass_fields__)
        for naming in sweep(seeds=arguments.seeds, causes=arguments.causes):
            writer.writerow([getattr(naming, name) for name in Naming.__dataclass_fields__])


if __name__ == "__main__":
    main()
