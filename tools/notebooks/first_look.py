# %% [markdown]
# # A first look
#
# For everyone with ten minutes: what the mismatch between a sampler and a trainer does to importance weights, and what
# a correction does about it. Nothing is downloaded. The notebook is `docs/notebooks/first_look.ipynb`; its outputs are
# those of the committed code.
#
# ## Two policies that should be equal
#
# `make_pair` makes a trainer and a sampler whose logits differ by a little noise, as if the sampler computed in a lower
# precision. A response has 256 tokens.

# %%
import torch

from rollcorr import correct
from rollcorr.simulation import make_pair, sample_rows

pair = make_pair("noise", 0.1, vocabulary=32, length=256)
rows = sample_rows(pair, 512, torch.Generator().manual_seed(0))
print(f"KL per token: {pair.kl:.4f} nats")
print(f"length times KL: {pair.length * pair.kl:.2f}")

# %% [markdown]
# ## Measure
#
# Without options `correct` changes nothing: it measures.

# %%
measured = correct(rows.train_log_prob, rows.rollout_log_prob, rows.mask)
print(measured.summary())

# %% [markdown]
# ## Weights of tokens, and of sequences
#
# A token's weight is π/μ, at most 2. The weight of a sequence is the product of the ratios of its tokens. Even a small
# difference per token becomes a large one over 256 tokens.

# %%
token = correct(rows.train_log_prob, rows.rollout_log_prob, rows.mask, "tis")
sequence = correct(rows.train_log_prob, rows.rollout_log_prob, rows.mask, "seq_tis")
for name, correction in (("token", token), ("sequence", sequence)):
    share = correction.metrics(prefix="")["rollout_is_eff_sample_size"]
    print(f"{name} weights: effective sample size {share:.2f}")

# %%
import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
left.hist(token.weights[rows.mask].numpy(), bins=40)
left.set(title="weights of tokens", xlabel="π/μ, at most 2")
right.hist(sequence.weights[:, 0].numpy(), bins=40)
right.set(title="weights of sequences", xlabel="product of the ratios, at most 2")
plt.show()

# %% [markdown]
# ## The same at other lengths
#
# The effective sample size of token weights does not depend on the length. That of sequence weights is lost as length ×
# KL grows.

# %%
for length in (16, 64, 256, 1024):
    longer = sample_rows(pair.with_length(length), 512, torch.Generator().manual_seed(0))
    sizes = [
        correct(longer.train_log_prob, longer.rollout_log_prob, longer.mask, preset).metrics(prefix="")[
            "rollout_is_eff_sample_size"
        ]
        for preset in ("tis", "seq_tis")
    ]
    print(f"length {length:4}: length x KL {length * pair.kl:5.2f}, token {sizes[0]:.2f}, sequence {sizes[1]:.2f}")

# %% [markdown]
# ## What to do about it
#
# Reject what differs by far, and weight the rest by tokens: the preset `decoupled_k3_rs_token_tis`. Here eight
# responses are broken: their log-probs are shifted by one token. They are rejected, and nothing else is.

# %%
rollout_log_prob = rows.rollout_log_prob.clone()
rollout_log_prob[:8] = rollout_log_prob[:8].roll(1, dims=1)

correction = correct(rows.train_log_prob, rollout_log_prob, rows.mask, "decoupled_k3_rs_token_tis")
print("rejected rows:", (~correction.sequence_kept).nonzero().flatten().tolist())

# %% [markdown]
# Where to go next: [your own training loop](../tutorials/own_loop.md) puts this into a loop, and [Choosing a
# correction](../guides/choosing.md) says which preset when.
