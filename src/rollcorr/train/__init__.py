"""Reference trainers, each readable top to bottom."""
