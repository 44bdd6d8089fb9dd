"""Samplers behind one protocol: token ids in, tokens with log-probs out."""
