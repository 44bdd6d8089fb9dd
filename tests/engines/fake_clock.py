"""A clock for waits that passes hours at once."""

import threading
import time


class FakeClock:
    """Seconds that pass only in `sleep`. `alarms`: (second, action) pairs; an action runs once its second is over."""

    def __init__(self):
        self.now = 0.0
        self.alarms = []
        self._lock = threading.Lock()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        with self._lock:
            self.now += seconds
            due = [alarm for alarm in self.alarms if alarm[0] <= self.now]
            self.alarms = [alarm for alarm in self.alarms if alarm[0] > self.now]
            for _, action in due:  # no second passes for any thread meanwhile
                action()
        time.sleep(0)
