"""What a pair of log-probs says about how each side came about."""
