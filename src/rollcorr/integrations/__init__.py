"""One file or package per framework; the framework is imported lazily, and only there."""
