"""How engines are reached: JSON over HTTP, JSON over pipes to a program, and weights in a folder."""
