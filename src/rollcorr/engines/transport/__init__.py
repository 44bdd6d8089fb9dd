"""Transport to engines: JSON over HTTP, JSON over pipes to a worker process, and weights in a folder."""
