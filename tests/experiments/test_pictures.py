"""The committed features of logs of pictures: the first cause of each fault, and no verdict on healthy ones."""

import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "pictures"))

from score_pictures import CAUSES, LOGS, first_causes

RATES = ("1e-5", "5e-5", "4e-4")


def test_nine_of_ten_causes_and_no_false_verdict():
    right, total, healthy = Counter(), Counter(), []
    for dimensions, _, kind, causes, verdict in first_causes():
        if kind not in CAUSES:
            healthy.append((verdict, causes))
            continue
        total[dimensions, kind] += 1
        right[dimensions, kind] += bool(causes) and causes[0] in CAUSES[kind]

    assert {total[768, kind] for kind in CAUSES} == {10}
    assert {total[65_536, kind] for kind in CAUSES} == {10}
    assert [key for key, count in total.items() if right[key] < 0.9 * count] == []
    assert len(healthy) >= 50
    assert set(healthy) == {("healthy", ())}


def test_other_models_have_the_same_causes():
    """A UNet with DDIM's schedule, and a Wan. Weak guidance looks like another precision in 2 of 10 logs."""
    right, total, verdicts = Counter(), Counter(), Counter()
    for _, _, kind, causes, verdict in first_causes(LOGS.with_name("other_pictures.npz")):
        if kind not in CAUSES:
            verdicts[verdict] += 1
            continue
        total[kind] += 1
        right[kind] += bool(causes) and causes[0] in CAUSES[kind]

    assert total == {kind: 5 if kind == "shift" else 10 for kind in CAUSES}
    misses = {kind: total[kind] - right[kind] for kind in CAUSES if total[kind] - right[kind]}
    assert misses == {"guidance": 1, "guidance lost": 2, "schedule": 1}
    assert verdicts == {"healthy": 40}


def test_other_sizes_and_learning_rates_have_the_same_causes():
    """32 pictures in each step, and all learning rates; one picture in 8 with another prompt, of 32 and of 96."""
    right, total = Counter(), Counter()
    for _, _, setting, causes, verdict in first_causes(LOGS.with_name("size_logs.npz")):
        total[setting] += 1
        wanted = CAUSES.get(setting.partition(" @ ")[0])
        right[setting] += verdict == "healthy" if wanted is None else causes[0] in wanted
    faults = ("guidance lost", "prompts @ 4 x 8", "prompts @ 12 x 8", *[f"stale @ {rate}" for rate in RATES])
    assert total == dict.fromkeys(("healthy bf16", "healthy fp8", *faults), 7)
    assert right == total
