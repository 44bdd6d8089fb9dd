"""One file for each framework; the framework is imported lazily, there only."""
