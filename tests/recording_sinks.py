"""Sinks for tests: one that records its calls, and one that raises in a method of choice."""

ERRORS = (RuntimeError("a bug"), ConnectionError("the server is away"), SystemExit(3))


class Recording:
    """A sink that records the steps with their metrics, and when it was closed."""

    def __init__(self):
        self.calls = []

    @property
    def steps(self):
        """The numbers of the steps, then "closed"."""
        return [call if call == "closed" else call[0] for call in self.calls]

    def write(self, step, metrics):
        self.calls.append((step, metrics))

    def close(self):
        self.calls.append("closed")


class Broken(Recording):
    """A sink that raises in one of its methods; in `write` at one step."""

    def __init__(self, method, error, *, step=1):
        super().__init__()
        self.method, self.error, self.step = method, error, step

    def write(self, step, metrics):
        super().write(step, metrics)
        if self.method == "write" and step == self.step:
            raise self.error

    def flush(self):
        if self.method == "flush":
            raise self.error

    def close(self):
        super().close()
        if self.method == "close":
            raise self.error
