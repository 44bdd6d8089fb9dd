"""Filtered data: rows that passed a filter are not samples of the sampler.

python examples/filtered_data.py
"""

import torch

from rollcorr import correct

ROWS = 40_000

generator = torch.Generator().manual_seed(0)
sampler, trainer = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
rewards = torch.tensor([0.0, 1.0, 2.0, 4.0])
tokens = torch.multinomial(sampler, ROWS, replacement=True, generator=generator)[:, None]
passed = rewards[tokens[:, 0]] > 0  # the filter: rows without reward are thrown away
exact = (trainer * rewards).sum()
config = {"rollout_is": "sequence", "rollout_is_threshold": 20.0}


def mean_reward(log_mu: torch.Tensor, rows: torch.Tensor) -> float:
    """Return the mean of weight × reward over the given rows."""
    log_pi = trainer.log()[tokens[rows]]
    weights = correct(log_pi, log_mu, torch.ones_like(log_pi), config).weights
    return (weights * rewards[tokens[rows]]).mean().item()


every_row = torch.ones_like(passed)
print(f"exact {exact:.2f}; every row {mean_reward(sampler.log()[tokens], every_row):.2f}")

# The kept rows come from μ(y) / Z with Z, the share that passes; log μ alone leaves the factor 1 / Z in the result.
log_mu = sampler.log()[tokens[passed]]
print(f"kept rows with log μ: {mean_reward(log_mu, passed):.2f}")
log_pass = passed.float().mean().log()
print(f"kept rows with log μ − log Z: {mean_reward(log_mu - log_pass, passed):.2f}")

# No weight restores what can never pass. Here these rows have no reward, so nothing is lost.
lost = trainer[rewards == 0].sum()
print(f"of the trainer's own responses {lost:.0%} never pass")
