"""What the token id explains of Var(d) at a real vocabulary: noise of an engine against weights that differ.

    python benchmarks/token_id_share.py [--vocabulary 151936] [--rows 128] [--tokens 256]

The body is stories260K, a small pretrained Llama with 512 tokens. Its output head is enlarged: each token is split into
about 297, whose rows are its own plus a part of their own, and whose frequencies fall as a power of the rank. So
the hidden states are of a trained model, ids are as unequal as in text, and the head has the width of Qwen3's. The body
reads the token that was split. Everything else is real: sampling, rounding, and policy-gradient updates by Adam.

Each line is a pair (sampler, trainer) on the same sampled tokens: k3, then the share that the id explains, exact and
with ids modulo 1,024 as steps and first-step nulls have it. "naive" is the ratio of sums of squares without a
correction for rare ids.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from stories import load_stories  # noqa: E402

from rollcorr.diagnostics.null.token_share import STEP_IDS, TokenSums  # noqa: E402

CHUNK = 256
POWER = 1.5
"""Of the rank, by which the frequency of the parts of a token falls."""
LEARNED_FROM = 8
"""Rows that the updates learn from."""
OWN_PART = 0.3
"""Size of a row's own part, relative to the spread of the rows of the small head."""


class Policy(nn.Module):
    """The small model with the large head."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        self.body = load_stories()
        head = self.body.lm_head.weight.detach()
        generator = torch.Generator().manual_seed(seed)

        # Children of one token have ranks 1, 2, … and probabilities that fall as a power of it.
        self.parent = torch.arange(vocabulary) % len(head)
        rank = torch.arange(vocabulary) // len(head) + 1
        weight = rank.double() ** -POWER
        weight /= torch.zeros(len(head), dtype=torch.float64).index_add(0, self.parent, weight)[self.parent]
        own = OWN_PART * head.std() * torch.randn(vocabulary, head.shape[1], generator=generator)
        self.head = nn.Parameter(head[self.parent] + own)
        self.bias = weight.log().float()

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states of (B, T) ids of the large vocabulary."""
        return self.body.model(input_ids=self.parent[ids]).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, V)."""
        return hidden @ self.head.T + self.bias.to(hidden.dtype)


@torch.no_grad()
def sample(policy: Policy, rows: int, tokens: int, seed: int) -> Tensor:
    """(B, 1 + T) ids: the start of a text, then what the policy samples."""
    torch.manual_seed(seed)
    ids = torch.full((rows, 1), 1)
    cache = None
    for _ in range(tokens):
        out = policy.body.model(input_ids=policy.parent[ids[:, -1:]], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = policy.logits(out.last_hidden_state[:, -1])
        ids = torch.cat([ids, (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1, keepdim=True)], 1)
    return ids


@torch.no_grad()
def log_probs(policy: Policy, ids: Tensor) -> np.ndarray:
    """log-probs of the sampled ids, (B · T,) float32: logits in the policy's precision, the softmax in float32."""
    hidden = policy.hidden(ids[:, :-1]).flatten(0, 1)
    targets = ids[:, 1:].flatten()
    parts = []
    for first in range(0, len(hidden), CHUNK):
        logits = policy.logits(hidden[first : first + CHUNK]).float()
        chosen = logits.gather(-1, targets[first : first + CHUNK, None]).squeeze(-1)
        parts.append(chosen - logits.logsumexp(-1))
    return torch.cat(parts).numpy()


def updated(policy: Policy, ids: Tensor, updates: int, lr: float, seed: int) -> Policy:
    """The policy after policy-gradient steps on 256 tokens each, with random advantages."""
    moved = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(moved.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(seed)
    for step in range(updates):
        row = ids[step % len(ids) : step % len(ids) + 1]
        logits = moved.logits(moved.hidden(row[:, :-1])).flatten(0, 1)
        chosen = logits.gather(-1, row[0, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        advantage = torch.randn(len(chosen), generator=generator)
        optimizer.zero_grad()
        (-(advantage * chosen).mean()).backward()
        optimizer.step()
    return moved


def int8(policy: Policy) -> Policy:
    """Every matrix rounded to 255 levels per row, as engines of 8 bits hold their weights."""
    rounded = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in rounded.parameters():
            if weight.dim() == 2:
                scale = weight.abs().amax(-1, keepdim=True) / 127
                weight.copy_((weight / scale.clamp(min=1e-12)).round() * scale)
    return rounded


def with_head_of(policy: Policy, other: Policy) -> Policy:
    """A policy with the output head of another one."""
    mixed = copy.deepcopy(policy)
    mixed.head = copy.deepcopy(other.head)
    return mixed


def measure(train: np.ndarray, rollout: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """k3 and the shares."""
    d = train.astype(np.float64) - rollout
    exact = TokenSums.of(ids, d).share()
    folded = TokenSums.of(ids, d, limit=STEP_IDS).share()
    count = np.bincount(ids)
    mean = np.bincount(ids, d) / np.maximum(count, 1)
    cut = np.clip(d, -20, 20)
    return {
        "k3": float((np.expm1(cut) - cut).mean()),
        "share": exact.share,
        "error": exact.error,
        "share_modulo_1024": folded.share,
        "naive": float((count * (mean - d.mean()) ** 2).sum() / ((d - d.mean()) ** 2).sum()),
        "tokens": exact.tokens,
        "ids": exact.ids,
    }


def main() -> None:
    """Measure each pair, and print a line of JSON for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--updates", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()

    # The updates learn from other rollouts than those that are measured.
    old = Policy(arguments.vocabulary, arguments.seed).eval()
    both = sample(old, arguments.rows + LEARNED_FROM, arguments.tokens, arguments.seed + 1)
    others, ids = both[:LEARNED_FROM], both[LEARNED_FROM:]
    flat = ids[:, 1:].flatten().numpy()
    print(json.dumps({"vocabulary": arguments.vocabulary, "tokens": len(flat), "different": len(np.unique(flat))}))

    def show(name: str, train: np.ndarray, rollout: np.ndarray) -> None:
        numbers = {key: float(f"{value:.4g}") for key, value in measure(train, rollout, flat).items()}
        print(json.dumps({"pair": name, **numbers}), flush=True)

    exact, rounded = log_probs(old, ids), log_probs(copy.deepcopy(old).to(torch.bfloat16), ids)
    show("bf16 engine", exact, rounded)
    show("int8 engine", exact, log_probs(int8(old), ids))
    for updates in arguments.updates:
        new = updated(old, others, updates, arguments.lr, arguments.seed)
        train = log_probs(new, ids)
        show(f"{updates} updates stale, bf16 engine", train, rounded)
        stale_head = log_probs(with_head_of(new, old).to(torch.bfloat16), ids)
        show(f"stale head of {updates} updates, bf16 engine", train, stale_head)
    print(json.dumps({"cpu_seconds": round(time.process_time() - start)}))


if __name__ == "__main__":
    main()
