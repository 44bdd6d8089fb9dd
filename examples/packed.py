"""Packed batches: tokens in a row, with the first token of each sequence in `cu_seqlens`. Same numbers as padded.

python examples/packed.py
"""

import torch

from rollcorr import correct

lengths = torch.tensor([5, 0, 3, 8])  # an empty response is fine
padded_mask = torch.arange(8) < lengths[:, None]
generator = torch.Generator().manual_seed(0)
rollout = -0.5 - torch.rand(4, 8, generator=generator)
train = rollout + 0.1 * torch.randn(4, 8, generator=generator)

padded = correct(train, rollout, padded_mask, "decoupled_seq_is_rs")
packed = correct(
    train[padded_mask],  # (N,)
    rollout[padded_mask],
    torch.ones(16, dtype=torch.bool),  # every token was sampled; holes are allowed here too
    "decoupled_seq_is_rs",
    cu_seqlens=torch.tensor([0, 5, 5, 8, 16]),  # (B + 1,)
)

torch.testing.assert_close(packed.weights, padded.weights[padded_mask])
assert torch.equal(packed.loss_mask, padded.loss_mask[padded_mask])
assert torch.equal(packed.sequence_kept, padded.sequence_kept)
print("tokens", packed.loss_mask.numel(), "instead of", padded.loss_mask.numel())
for name, value in packed.metrics(prefix="").items():
    if name in ("sequence_count", "log_ppl_diff", "rollout_is_seq_mean"):
        print(f"{name:20} packed {value:.6f}, padded {padded.metrics(prefix='')[name]:.6f}")
