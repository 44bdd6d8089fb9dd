"""Three tensors in; weights, a loss mask and metrics out.

python examples/quickstart.py
"""

import torch

from rollcorr import correct

# Two responses. The sampler ran in lower precision: its log-probs differ a little from the trainer's, and once a lot.
train_log_prob = torch.tensor([[-0.9, -1.6, -0.3, -2.1], [-0.7, -4.0, -0.2, 0.0]])
rollout_log_prob = torch.tensor([[-1.0, -1.5, -0.3, -2.0], [-0.7, -1.0, -0.2, 0.0]])
response_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])  # the last zero is padding

correction = correct(train_log_prob, rollout_log_prob, response_mask, "decoupled_k3_rs_token_tis")

print("weights, at most 2")
print(correction.weights)
print("loss mask: the mean k3 of the second response is above 0.01")
print(correction.loss_mask)

metrics = correction.metrics()  # the one transfer from the device
for name in ("kl", "k3_kl", "rollout_is_mean", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction"):
    print(f"{name:28} {metrics[f'rollout_corr/{name}']:8.4f}")
