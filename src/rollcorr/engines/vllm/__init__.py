"""vLLM engines: offline in a worker process, or behind its server."""
