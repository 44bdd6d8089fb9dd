"""How engines are reached: JSON over HTTP, JSON over pipes, and weights in a folder."""
