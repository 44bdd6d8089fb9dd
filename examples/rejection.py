"""Why a batch loses tokens: what each criterion rejects, what it alone rejects, and where they overlap.

python examples/rejection.py
"""

import torch

from rollcorr import RolloutCorrectionConfig, correct

config = RolloutCorrectionConfig(
    rollout_rs="token_k1,seq_mean_k3",
    rollout_rs_threshold="0.5_2.0,0.05",  # ρ of a token in [0.5, 2]; mean k3 of a sequence at most 0.05
    rollout_token_veto_threshold=1e-4,
)
log_ratio = torch.tensor(
    [
        [0.1, -0.1, 0.0, 0.1],  # close: kept
        [0.9, 0.0, 0.0, 0.0],  # one token outside the band, and the mean k3 is 0.14: both criteria
        [0.5, -0.5, 0.5, -0.5],  # every token inside the band, the mean k3 is 0.13: seq_mean_k3 alone
        [0.0, 0.0, 0.0, -12.0],  # one token that the trainer all but excludes: all three
    ]
)
rollout_log_prob = torch.full_like(log_ratio, -2.0)
correction = correct(rollout_log_prob + log_ratio, rollout_log_prob, torch.ones_like(log_ratio), config)

print(correction.loss_mask.int())
print("sequences kept:", correction.sequence_kept.tolist())
metrics = correction.metrics(prefix="")
print(f"all reject {metrics['rollout_rs_masked_fraction']:.4f} of the tokens,", end=" ")
print(f"more than one {metrics['rollout_rs_overlap_fraction']:.4f}")
for criterion in config.criteria:
    rejected, alone = (metrics[f"rollout_rs_{criterion.name}_{what}_fraction"] for what in ("masked", "alone"))
    print(f"{criterion.name:12} rejects {rejected:.4f} of the tokens, {alone:.4f} alone")
print(f"veto         rejects {metrics['rollout_is_veto_fraction']:.4f} of the sequences")
