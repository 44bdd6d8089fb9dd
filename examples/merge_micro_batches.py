"""Metrics over micro-batches: merge statistics, then finalise once. Averages of metrics would be wrong.

python examples/merge_micro_batches.py
"""

import torch

from rollcorr import correct, merge_statistics

generator = torch.Generator().manual_seed(0)
rollout_log_prob = -0.5 - torch.rand(12, 64, generator=generator)
train_log_prob = rollout_log_prob + 0.1 * torch.randn(12, 64, generator=generator)
response_mask = torch.arange(64) < torch.randint(1, 65, (12, 1), generator=generator)

parts = [
    correct(train_log_prob[rows], rollout_log_prob[rows], response_mask[rows], "decoupled_seq_is")
    for rows in (slice(0, 2), slice(2, 7), slice(7, 12))
]
merged = merge_statistics(part.statistics for part in parts).metrics()
whole = correct(train_log_prob, rollout_log_prob, response_mask, "decoupled_seq_is").metrics()

for name in ("kl", "chi2_seq", "rollout_is_eff_sample_size", "rollout_is_max"):
    key = f"rollout_corr/{name}"
    averaged = sum(part.metrics()[key] for part in parts) / len(parts)
    print(f"{name:28} whole {whole[key]:.6f}  merged {merged[key]:.6f}  averaged {averaged:.6f}")
    assert abs(merged[key] - whole[key]) < 1e-9
