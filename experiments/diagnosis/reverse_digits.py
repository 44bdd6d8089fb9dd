"""A training loop that knows no rule: a small Llama learns by GRPO to reverse ten digits, and its weight sync stops.

    python experiments/diagnosis/reverse_digits.py OUTPUT.npz [--seed 1] [--steps 22] [--last-sync 15]

The sampler is a bfloat16 copy. OUTPUT has a row for each response, with the columns of a rollout log.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

DIGITS, BOS, SEPARATOR, END, VOCABULARY = 10, 11, 12, 13, 14
ROWS, GROUP = 128, 8
"""Responses of a step, and of a prompt."""
WARM_UP, UPDATES = 150, 2
"""Supervised steps before the run, and updates of each step of the run."""
MANTISSA = 12
"""Bits of a stored log-prob's mantissa: more than float16 has, and they compress."""


def problems(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts (rows, 12) with ten digits each, and their right answers (rows, 11)."""
    digits = torch.randint(10, (rows, DIGITS), generator=generator)
    prompt = [torch.full((rows, 1), BOS), digits, torch.full((rows, 1), SEPARATOR)]
    return torch.cat(prompt, 1), torch.cat([digits.flip(1), torch.full((rows, 1), END)], 1)


def score(model: nn.Module, prompts: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of the responses, in one pass: (rows, 11), nats."""
    logits = model(torch.cat([prompts, ids], 1)).logits[:, prompts.shape[1] - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw responses token by token: ids and log-probs, (rows, 11) each."""
    ids, log_probs, fed, cache = [], [], prompts, None
    for _ in range(DIGITS + 1):
        answer = model(fed, past_key_values=cache, use_cache=True)
        cache, log_prob = answer.past_key_values, answer.logits[:, -1].float().log_softmax(-1)
        fed = torch.multinomial(log_prob.exp(), 1, generator=generator)
        ids.append(fed)
        log_probs.append(log_prob.gather(1, fed))
    return torch.cat(ids, 1), torch.cat(log_probs, 1)


def warm_up(model: nn.Module, generator: torch.Generator) -> None:
    """Teach the task by examples, until most digits are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(WARM_UP):
        prompts, answers = problems(64, generator)
        loss = -score(model, prompts, answers).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run(seed: int, steps: int, last_sync: int) -> Mapping[str, np.ndarray]:
    """Train, and return the columns of all rollouts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape))
    warm_up(model, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = copy.deepcopy(model).bfloat16()

    columns: dict[str, list[Tensor]] = {}
    for step in range(1, steps + 1):
        if step <= last_sync:
            sampler.load_state_dict(model.state_dict())
        prompts, answers = (x.repeat_interleave(GROUP, 0) for x in problems(ROWS // GROUP, generator))
        ids, rollout = sample(sampler, prompts, generator)
        with torch.no_grad():
            old = score(model, prompts, ids)
        row = {"step": torch.full((ROWS,), step), "prompt_ids": prompts, "response_ids": ids}
        for name, values in (row | {"rollout_log_prob": rollout, "old_log_prob": old}).items():
            columns.setdefault(name, []).append(values)

        # GRPO: the advantage is the reward within its group, in standard deviations.
        reward = (ids == answers).float().mean(1).view(-1, GROUP)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        for _ in range(UPDATES):
            ratio = (score(model, prompts, ids) - old).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return {name: stored(torch.cat(parts).numpy()) for name, parts in columns.items()}


def stored(values: np.ndarray) -> np.ndarray:
    """Small ids as bytes, log-probs with `MANTISSA` bits."""
    if values.dtype != np.float32:
        return values.astype(np.uint8)
    cut = 23 - MANTISSA
    bits = values.view(np.uint32) + np.uint32(1 << (cut - 1))
    return (bits & ~np.uint32((1 << cut) - 1)).view(np.float32)


def main() -> None:
    """Write the rollouts of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--last-sync", type=int, default=15, help="step before which the weights are sent a last time")
    options = parser.parse_args()
    np.savez_compressed(options.output, **run(options.seed, options.steps, options.last_sync))


if __name__ == "__main__":
    main()
