"""A policy small enough to sample from in milliseconds."""

from rollcorr.train.grpo.policy import Policy, make_tiny_policy


def make_micro_policy() -> Policy:
    return make_tiny_policy(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
