"""Behavior cloning: demonstrations of an expert whose log-probs nobody recorded.

python examples/behavior_cloning.py
"""

import torch

from rollcorr import PolicyLogProbs, RolloutCorrectionConfig, policy_loss

generator = torch.Generator().manual_seed(0)
expert = torch.tensor([0.7, 0.2, 0.1])
tokens = torch.multinomial(expert, 600, replacement=True, generator=generator).view(100, 6)
response_mask = torch.ones_like(tokens, dtype=torch.bool)
logits = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([logits], lr=1.0)

# Imitation needs no weight: the expectation in −E_expert[log π] is over the data itself. REINFORCE with advantage 1 and
# no importance sampling is that loss; weights π/μ would turn it into an objective of the policy's own samples.
config = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is=None)
advantages = torch.ones(len(tokens))


def cloning_loss() -> torch.Tensor:
    """Return the loss; the policy's own log-probs stand in for the unknown log μ, so every ratio is 1."""
    log_prob = logits.log_softmax(-1)[tokens]
    policies = PolicyLogProbs(log_prob=log_prob, rollout_log_prob=log_prob.detach())
    return policy_loss(policies, advantages, response_mask, config=config, whole_step=True).loss


gradient = torch.autograd.grad(cloning_loss(), logits)[0]
cross_entropy = -logits.log_softmax(-1)[tokens].sum(1).mean()
difference = (gradient - torch.autograd.grad(cross_entropy, logits)[0]).abs().max()
print(f"difference from the gradient of cross-entropy: {difference:.4f}")

for _ in range(60):
    optimizer.zero_grad()
    cloning_loss().backward()
    optimizer.step()
shares = torch.bincount(tokens.flatten(), minlength=3) / tokens.numel()
print("data  ", [round(share, 3) for share in shares.tolist()])
print("policy", [round(share, 3) for share in logits.softmax(-1).tolist()])
