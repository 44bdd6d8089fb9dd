"""Fused twins of core functions: same signature, same result."""
