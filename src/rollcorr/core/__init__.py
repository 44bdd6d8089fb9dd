"""Pure tensor functions of the correction: torch and the standard library only; no value is ever read."""
