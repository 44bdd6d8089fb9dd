"""vLLM: offline in a process of its own, or behind its server."""
