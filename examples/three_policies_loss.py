"""The three losses, from the same batch: decoupled PPO, bypass PPO, bypass REINFORCE over micro-batches.

python examples/three_policies_loss.py
"""

import torch

from rollcorr import PolicyLogProbs, RolloutCorrectionConfig, TrainingStep, correct, loss_metrics, policy_loss

generator = torch.Generator().manual_seed(0)
response_mask = torch.arange(32) < torch.randint(4, 33, (8, 1), generator=generator)
rollout_log_prob = -0.5 - 2 * torch.rand(8, 32, generator=generator)  # μ: the sampler
old_log_prob = rollout_log_prob + 0.05 * torch.randn(8, 32, generator=generator)  # π_old: the trainer, at the start
model = torch.nn.ParameterList([torch.zeros(8, 32)])  # a number for each token
drift = model[0]
advantages = torch.randn(8, generator=generator)


def current() -> torch.Tensor:
    """Return log π_θ."""
    return old_log_prob + 0.02 + drift


print("decoupled: w from π_old/μ once per batch, PPO on π_θ/π_old")
config = RolloutCorrectionConfig.decoupled_token_is()
correction = correct(old_log_prob, rollout_log_prob, response_mask, config)
policies = PolicyLogProbs(log_prob=current(), old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
output = policy_loss(policies, advantages, response_mask, config=config, correction=correction)
output.loss.backward()
print(f"  loss {output.loss.item():.4f}, gradient norm {drift.grad.norm().item():.4f}")
print(f"  policy_kl {loss_metrics(output.statistics)['actor/policy_kl']:.4f}")

print("bypass, ppo_clip: PPO on π_θ/μ, which is the importance weight itself; no old_log_prob")
drift.grad = None
config = RolloutCorrectionConfig.bypass_ppo_clip_k3_rs()
policies = PolicyLogProbs(log_prob=current(), rollout_log_prob=rollout_log_prob)
output = policy_loss(policies, advantages, response_mask, config=config, whole_step=True)
output.loss.backward()
print(f"  loss {output.loss.item():.4f}, gradient norm {drift.grad.norm().item():.4f}")
print("  the same as above: w · r = π_θ/μ as long as nothing is clipped, truncated or rejected")

print("bypass, reinforce: −sg(w) log π_θ A, in four micro-batches; what is kept is known after the last")
drift.grad = None
config = RolloutCorrectionConfig.bypass_pg_geo_rs_seq_tis(rs_threshold="0.99_1.03")
with TrainingStep(model, config) as step:
    for start in range(0, 8, 2):
        rows = slice(start, start + 2)
        policies = PolicyLogProbs(log_prob=current()[rows], rollout_log_prob=rollout_log_prob[rows])
        step.backward(step.policy_loss(policies, advantages[rows], response_mask[rows]))
    outcome = step.finish()  # then clip the gradient and step
print(f"  {outcome.kept_fraction:.0%} of the tokens kept, gradient norm {drift.grad.norm().item():.4f}")

drift.grad = None
whole = policy_loss(
    PolicyLogProbs(log_prob=current(), rollout_log_prob=rollout_log_prob),
    advantages,
    response_mask,
    config=config,
    whole_step=True,
)
whole.loss.backward()
print(f"  in one batch the gradient norm is {drift.grad.norm().item():.4f}")
