"""A replay buffer: rows of three older policies, each with the log-probs of the policy that sampled it.

python examples/replay_buffer.py
"""

import torch

from rollcorr import correct

LENGTH, ROWS = 4, 20_000

generator = torch.Generator().manual_seed(0)
chances = torch.tensor([0.3, 0.4, 0.45, 0.5])  # of token 1, under policy version 0, 1, 2 and 3
newest = len(chances) - 1

# The buffer keeps tokens, version and log μ of each row: recomputed log-probs would be those of another policy.
versions = torch.arange(newest).repeat_interleave(ROWS)
chance = chances[versions][:, None].expand(-1, LENGTH)
tokens = torch.bernoulli(chance, generator=generator)
rollout_log_prob = torch.where(tokens == 1, chance, 1 - chance).log()
old_log_prob = torch.full_like(tokens, 0.5).log()  # version 3 scores every row
rewards = (tokens.sum(1) == LENGTH).float()  # only a response of ones is correct

# The reward belongs to the whole response, so its weight is the product over all tokens.
mask = torch.ones_like(tokens)
for level in ("token", "sequence"):
    config = {"rollout_is": level, "rollout_is_threshold": 20.0}
    correction = correct(old_log_prob, rollout_log_prob, mask, config)
    weights = correction.weights[:, -1]
    print(f"{level} weights: mean reward {(weights * rewards).mean():.3f}")
print(f"no weights: {rewards.mean():.3f}, exact {0.5**LENGTH:.3f}")

# The older the rows, the fewer of them count.
for version in range(newest):
    rows = versions == version
    part = correct(old_log_prob[rows], rollout_log_prob[rows], mask[rows], config)
    share = part.metrics(prefix="")["rollout_is_eff_sample_size"]
    print(f"staleness {newest - version}: {share:.0%} of the rows are effective")
