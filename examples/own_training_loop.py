"""A GRPO loop of your own: one correction for the batch, two optimizer steps on it, micro-batches in each.

python examples/own_training_loop.py
"""

import torch

from rollcorr import PolicyLogProbs, correct, grpo_advantages, policy_loss

VOCABULARY, WIDTH = 12, 6

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Tanh(), torch.nn.Linear(16, VOCABULARY))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)


def log_probs(tokens: torch.Tensor) -> torch.Tensor:
    """log π of every token but the first, given the one before it: (B, WIDTH)."""
    logits = model(tokens[:, :-1]).log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens from a sampler in bfloat16, and the log-probs that it reports."""
    tokens, reported = torch.zeros(count, 1, dtype=torch.int64), []
    for _ in range(WIDTH):
        with torch.no_grad():
            logits = model(tokens[:, -1]).bfloat16().float().log_softmax(-1)
        drawn = torch.multinomial(logits.exp(), 1)
        tokens = torch.cat([tokens, drawn], dim=1)
        reported.append(logits.gather(-1, drawn))
    return tokens, torch.cat(reported, dim=1)


for step in range(1, 41):
    tokens, rollout_log_prob = sample(32)
    response_mask = torch.ones_like(rollout_log_prob, dtype=torch.bool)
    rewards = (tokens[:, 1:] == 7).float().mean(1)

    # Once for the batch: the trainer's own log-probs, and what becomes of the mismatch.
    with torch.no_grad():
        old_log_prob = log_probs(tokens)
    correction = correct(old_log_prob, rollout_log_prob, response_mask, "decoupled_k3_rs_token_tis")
    advantages = grpo_advantages(rewards, torch.arange(32) // 8, keep=correction.sequence_kept)

    # Two optimizer steps of 16 rows, each in micro-batches of 6, 6 and 4.
    for mini_rows in torch.randperm(32).split(16):
        mini_batch = correction.mini_batch(mini_rows)
        optimizer.zero_grad()
        for rows, part in zip(mini_rows.split(6), mini_batch.split(6), strict=True):
            policies = PolicyLogProbs(
                log_prob=log_probs(tokens[rows]),
                old_log_prob=old_log_prob[rows],
                rollout_log_prob=rollout_log_prob[rows],
            )
            policy_loss(policies, advantages[rows], response_mask[rows], correction=part).loss.backward()
        optimizer.step()

    if step % 10 == 0:
        print(f"step {step}: reward {rewards.mean().item():.2f}")
        print(correction.summary())
