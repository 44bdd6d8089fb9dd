"""Series of k3 as runs show it: healthy ones, and ones with a fault that begins at a known step."""

import math
import random
from typing import NamedTuple

STEPS = 100
START = 1e-5


class Series(NamedTuple):
    """k3 of each step, and where it goes wrong.

    Attributes:
        k3: by step, from step 1 on.
        onset: the first step that the fault changes; None for a healthy run.
        fivefold: the first step at which k3 without its noise is 5 times its start.
    """

    k3: list
    onset: int | None = None
    fivefold: int | None = None


def healthy(seed):
    """Noise of 5 to 50 % from step to step, a drift by a factor of 2 at most, longer responses, and single spikes."""
    rng = random.Random(seed)
    noise, drift, longer = rng.choice([0.05, 0.1, 0.2, 0.3, 0.5]), rng.uniform(-0.7, 0.7), rng.uniform(0, 0.2)
    spikes = rng.choice([0.0, 0.01, 0.03])
    k3 = []
    for step in range(STEPS):
        x = (drift + longer) * step / STEPS + rng.gauss(0, noise)
        if rng.random() < spikes:
            x += math.log(rng.uniform(5, 50))
        k3.append(START * math.exp(x))
    return Series(k3)


def broken(kind, seed, *, noise=0.1):
    """A run with a fault of that kind."""
    rng = random.Random(f"{kind}/{seed}")
    rate, onset = math.exp(rng.uniform(math.log(0.3), math.log(10))), rng.randint(10, 60)
    doublings = math.log(5) / rng.randint(10, 40)
    power = rng.choice([1, 2])

    def factor(step):
        if kind == "never synced":
            return 1 + rate * (step - 1) ** power
        if kind == "resume":  # the restart at step 60 loads the weights once
            return 1 + rate * (step - 1 if step < 60 else step - 60) ** power
        late = max(0, step - onset + 1)
        return {
            "break": 8.0 if late else 1.0,
            "jump": 400.0 if late else 1.0,
            "slow growth": math.exp(doublings * late),
        }[kind]

    factors = [factor(step) for step in range(1, STEPS + 1)]
    fivefold = next(step for step, value in enumerate(factors, start=1) if value >= 5 * factors[0])
    first = 2 if kind in ("never synced", "resume") else onset
    return Series([START * value * math.exp(rng.gauss(0, noise)) for value in factors], first, fivefold)


def metrics_of(k3):
    """The metrics of a step with that k3."""
    return {
        "token_count": 32_000.0,
        "sequence_count": 64.0,
        "kl": k3,
        "k3_kl": k3,
        "log_ratio_std": math.sqrt(2 * k3),
        "rollout_is_mean": 1.0,
    }
