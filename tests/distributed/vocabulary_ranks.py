"""Program of one rank of the vocabulary-parallel tests: the same tokens on all ranks, some rows of the head on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.linear_logprob import linear_log_prob

SIZE, N, D, V = 4, 9, 5, 23
SLICES = {2: (0, 9, V), 4: (0, 6, 7, 15, V)}  # uneven
LOW_IDS = KeptSets.of([[0, 3, 5]] * N)  # so only the first of four ranks has any, except sampled tokens
FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole, entropy, mask": {"entropy": True, "temperature": 0.7, "mask": torch.arange(N) % 4 > 0},
    "whole, entropy of some": {"entropy": torch.arange(N) % 3 == 0, "chunk": 2},
    "kept": {"kept": KeptSets.of([[t, 3 * t % 23, (5 * t + 10) % 23] if t % 4 else [t] for t in range(N)])},
    "kept, low": {"kept": LOW_IDS, "entropy": True, "temperature": torch.linspace(0.5, 2, N)},
    "whole, nothing dropped": {"entropy": torch.arange(N) % 3 == 0, "mask": torch.arange(N) % 4 > 0, "compact": False},
    "kept, nothing dropped": {"kept": LOW_IDS, "entropy": True, "mask": torch.arange(N) % 2 > 0, "compact": False},
    "kept, mass, mask": {"kept": LOW_IDS, "log_kept_mass": True, "mask": torch.arange(N) % 2 > 0},
}
IDS = torch.tensor([0, 3, 5, 1, 22, 3, 0, 8, 16])


def computed(name: str, *, size: int = 1, rank: int = 0, group: Any = None, accumulate: bool = False) -> Any:
    """Return results and gradients, the head's for the rows of this rank; without a group for all rows."""
    generator = torch.Generator().manual_seed(7)
    first, stop = (0, V) if group is None else SLICES[size][rank : rank + 2]
    hidden, weight, bias, upstream = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((N, D), (V, D), (V,), (N,))
    )
    inputs = [x.clone().requires_grad_() for x in (hidden, weight[first:stop], bias[first:stop])]
    into = torch.ones_like(inputs[1]) if accumulate else None
    impl = "reference" if group is None else "auto"
    result = linear_log_prob(
        *inputs[:2], IDS, bias=inputs[2], accumulate_into=into, vocab_group=group, first_id=first, impl=impl,
        **{k: v for k, v in FORMS[name].items() if k != "chunk" or group is not None},
    )  # fmt: skip
    entropy = 0.0 if result.entropy is None else result.entropy.nan_to_num()
    ((result.log_prob + 0.3 * entropy) * upstream).sum().backward()
    gradients = [x.grad for x in inputs]
    return tuple(None if x is None else x.detach() for x in result), [gradients[0], into, *gradients[1:]]


def refused(id_: int, *, size: int, rank: int, group: Any) -> str:
    """Return a rank's error for an id in no slice, and its result for the same id outside the mask."""
    first, stop = SLICES[size][rank : rank + 2]
    ids = IDS.clone()
    ids[4] = id_
    operands = torch.ones(N, D), torch.ones(stop - first, D), ids
    linear_log_prob(*operands, mask=torch.arange(N) != 4, vocab_group=group, first_id=first)
    try:
        linear_log_prob(*operands, vocab_group=group, first_id=first)
    except ValueError as error:
        return str(error)
    return ""


def scenarios(rank: int, groups: dict[int, Any]) -> Iterator[tuple[Any, Any]]:
    for size, group in groups.items():
        for id_ in (-100, V):
            yield (size, id_), refused(id_, size=size, rank=rank % size, group=group)
        for name in FORMS:
            for accumulate in (False, True):
                key = (size, name, accumulate)
                yield key, computed(name, size=size, rank=rank % size, group=group, accumulate=accumulate)


def run(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/init", rank=rank, world_size=SIZE)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.save(dict(scenarios(rank, {2: pairs[rank // 2], 4: dist.group.WORLD})), f"{path}/{rank}.pt")
    dist.destroy_process_group()
