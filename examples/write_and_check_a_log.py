"""Write a rollout log, then let `rollcorr check` judge it: first a sound one, then one with a wrong temperature.

python examples/write_and_check_a_log.py [DIRECTORY]

It needs pip install 'rollcorr[log]'.
"""

import sys
import tempfile
from pathlib import Path

import torch

from rollcorr import RolloutBatch, RolloutLogWriter, SamplingSpec
from rollcorr.cli import app


def write(path: Path, *, trainer_temperature: float) -> None:
    """Sample 64 responses of 50 tokens at temperature 0.5, and score them at another."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(64, 50, 32, generator=generator)
    sampler = (logits / 0.5).log_softmax(-1)
    ids = torch.multinomial(sampler.exp().flatten(0, 1), 1, generator=generator).view(64, 50)
    rounded = logits + 0.01 * torch.randn(logits.shape, generator=generator)  # other arithmetic
    trainer = (rounded / trainer_temperature).log_softmax(-1)
    with RolloutLogWriter(path, overwrite=True) as log:
        log.write(
            RolloutBatch.from_padded(
                torch.ones(64, 50, dtype=torch.bool),
                response_ids=ids,
                rollout_log_prob=sampler.gather(-1, ids[..., None]).squeeze(-1),
                old_log_prob=trainer.gather(-1, ids[..., None]).squeeze(-1),
                step=0,
                sampling=SamplingSpec(temperature=0.5, logprobs="processed"),
            )
        )


def check(path: Path) -> int:
    """Run `rollcorr check PATH`; exit codes: 0 healthy, 1 unhealthy, 3 not judged, 2 bad input."""
    print(f"$ rollcorr check {path.name}")
    code = app(["check", str(path)], standalone_mode=False)
    print(f"exit code {code}\n")
    return code


directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
write(directory / "sound.parquet", trainer_temperature=0.5)
write(directory / "wrong_temperature.parquet", trainer_temperature=1.0)
assert check(directory / "sound.parquet") == 3  # its weights need a null to be judged
assert check(directory / "wrong_temperature.parquet") == 1
