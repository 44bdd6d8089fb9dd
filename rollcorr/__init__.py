"""Rollout correction for reinforcement learning, for any trainer."""
