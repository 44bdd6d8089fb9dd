"""Self-check of the Triton kernels on a device: compare them with torch before `impl="auto"` uses them.

An untested compiler, driver or chip can break a kernel without an error. So on first use a small fixed probe runs in
both implementations: every layout, dtype and kind of mask, every level of weights, all criteria, and NaN in places that
must not be read.

The verdict is cached across processes: a small JSON file per kind of machine, in
`$XDG_CACHE_HOME/rollcorr/kernels`, by default `~/.cache/rollcorr/kernels`. An unreadable verdict counts as missing, and
one that cannot be written is computed again by the next process: neither raises an error.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import rollcorr
from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.core.metric_registry import CRITERIA, finalize
from rollcorr.kernels.correction.call import Batch, CorrectionOutput
from rollcorr.kernels.correction.torch.blocks import torch_correction
from rollcorr.kernels.correction.triton import triton_correction

Kernel = Callable[..., CorrectionOutput]

SEQUENCES = 7
WEIGHTS_RTOL, METRICS_RTOL, METRICS_ATOL = 3e-6, 1e-5, 1e-6
"""What float32 leaves of agreement: the tolerances of the kernels' own tests."""

_EVERY_CRITERION = {
    "rollout_rs": ",".join(name for name in CRITERIA),
    "rollout_rs_threshold": ",".join("0.3_3.0" if name.endswith("k1") else "2.0" for name in CRITERIA),
    "rollout_token_veto_threshold": 1e-2,
}


class Verdict(NamedTuple):
    """Whether the kernels agree with torch on a machine.

    Attributes:
        agrees: whether the kernels agree with torch.
        reason: what differs or failed; empty if they agree.
        failed: whether they raised an error. It may be transient, so the next process tries again.
    """

    agrees: bool
    reason: str = ""
    failed: bool = False


class Probe(NamedTuple):
    """One batch and one configuration.

    Attributes:
        name: description for the message.
        options: options of the configuration.
        T: tokens of a row. The kernels have four layouts: packed, and rows of full blocks, of a multiple of 16, of any
            length.
        packed: whether the rows are packed into one.
        train, rollout: dtypes of the log-probs.
        mask: dtype of the mask.
        splits: number of programs per sequence.
    """

    name: str
    options: Mapping[str, Any]
    T: int
    packed: bool
    train: torch.dtype
    rollout: torch.dtype
    mask: torch.dtype
    splits: int = 1


_STANDARD = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05}
PROBES = (
    Probe("standard, whole blocks, float32", _STANDARD, 1024, False, torch.float32, torch.float32, torch.bool, 2),
    Probe("standard, rows of 16 n, bfloat16", _STANDARD, 528, False, torch.bfloat16, torch.bfloat16, torch.int64),
    Probe("standard, rows of any length, float16", _STANDARD, 517, False, torch.float16, torch.float16, torch.uint8),
    Probe("standard, packed, float32", _STANDARD, 517, True, torch.float32, torch.float32, torch.bool, 2),
    Probe("metrics, packed, float64", {}, 130, True, torch.float64, torch.float32, torch.float32),
    Probe(
        "every criterion, token weights in a band, float32",
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0", "safety_bound": 10.0, **_EVERY_CRITERION},
        528, False, torch.float32, torch.float32, torch.bool,
    ),
    Probe(
        "every criterion, sequence weights, packed, bfloat16",
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True, **_EVERY_CRITERION},
        517, True, torch.bfloat16, torch.float32, torch.int32,
    ),
    Probe(
        "geometric weights in a band, missing tokens neutral",
        {"rollout_is": "geometric", "rollout_is_threshold": "0.9_1.1", "nonfinite": "neutral"},
        517, False, torch.float32, torch.float32, torch.bool,
    ),
)  # fmt: skip

_verdicts: dict[torch.device, Verdict] = {}
_verdict_lock = threading.Lock()


def is_verified(device: torch.device) -> bool:
    """Return whether the kernels agree with torch on a device. Compiles, runs and waits once; then uses the verdict."""
    verdict = _verdicts.get(device)
    if verdict is None:
        # Stream capture records device work, so a probe would become part of the graph; a later call can run it.
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        verdict = _first_verdict(device)
    return verdict.agrees


def known_verdict(device: torch.device) -> Verdict | None:
    """Return the verdict of this or an earlier process, without running a kernel; `None` if unknown."""
    return _verdicts.get(device) or read_verdict(machine_of(device))


def check_kernels(device: torch.device, kernel: Kernel = triton_correction) -> Verdict:
    """Run every probe with both implementations, and the kernels twice.

    Args:
        device: the device to check.
        kernel: the implementation to compare with torch.

    Returns:
        The verdict, with a description of the first difference, or the error that ended a probe.
    """
    for probe in PROBES:
        try:
            difference = _find_difference(probe, device, kernel)
        except Exception as error:  # a compiler can raise anything, and torch is there to take over
            said = next(iter(str(error).strip().splitlines()), "no message")[:200]
            return Verdict(False, f"{probe.name}: {type(error).__name__}: {said}", failed=True)
        if difference is not None:
            return Verdict(False, f"{probe.name}: {difference}")
    return Verdict(True)


def probe_batch(probe: Probe, device: torch.device) -> Batch:
    """Return the probe's tensors: equal on every machine, with NaN and infinities on both sides of the mask."""
    generator = torch.Generator(device="cpu").manual_seed(7)
    shape = SEQUENCES, probe.T
    rollout = -3.0 * torch.rand(shape, generator=generator, device="cpu")
    train = rollout + 0.3 * torch.randn(shape, generator=generator, device="cpu")
    mask = torch.rand(shape, generator=generator, device="cpu") < 0.8

    # Special values on response tokens: missing on either side, probability zero, and a sentinel.
    accidents = ((0, 3, math.nan, -1.0), (1, 5, -math.inf, -1.0), (2, 7, -1.0, math.inf), (0, 9, -1.0, -math.inf))
    for row, token, log_pi, log_mu in (*accidents, (4, 11, -80.0, -1.0)):
        train[row, token], rollout[row, token], mask[row, token] = log_pi, log_mu, True

    # Two rows in which every token is ordinary, but some weights of the second are beyond their bounds. The token pass
    # has separate code for such blocks.
    mask[5:] = True
    train[5:] = rollout[5:] + (train[5:] - rollout[5:]).clamp(-0.4, 0.4)
    train[6, 50::100] = rollout[6, 50::100] + 1.2

    # One sequence is empty. Masked tokens have NaN and ∞, which must not be read.
    mask[3] = False
    train[~mask], rollout[~mask] = math.nan, math.inf

    cu_seqlens = None
    if probe.packed:
        # Sequences begin at unaligned offsets, and one is empty.
        lengths = torch.tensor([probe.T, 3, 0, probe.T - 40, 37, probe.T * (SEQUENCES - 2)], device="cpu")
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        train, rollout, mask = train.flatten(), rollout.flatten(), mask.flatten()
    return Batch(
        train.to(device, probe.train),
        rollout.to(device, probe.rollout),
        mask.to(device, probe.mask),
        None if cu_seqlens is None else cu_seqlens.to(device),
    )


def _first_verdict(device: torch.device) -> Verdict:
    """Return the verdict of an earlier process, or compute one; warn once if the kernels disagree."""
    with _verdict_lock:
        if device in _verdicts:
            return _verdicts[device]
        machine = machine_of(device)
        verdict = read_verdict(machine)
        if verdict is None:
            with ExitStack() as stack:
                # The check must wait, even if the caller forbids synchronization.
                if device.type == "cuda":
                    stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
                    torch.cuda.set_sync_debug_mode(0)
                verdict = check_kernels(device)
            write_verdict(machine, verdict)
        _verdicts[device] = verdict

    if not verdict.agrees:
        what = "could not be run" if verdict.failed else "do not compute what torch computes"
        warnings.warn(
            f"impl='auto' takes torch on {device}, because the Triton kernels {what} here ({verdict.reason}); please "
            "report it with the output of `rollcorr info`. ROLLCORR_IMPL=torch silences this",
            stacklevel=2,
        )
    return verdict


def _find_difference(probe: Probe, device: torch.device, kernel: Kernel) -> str | None:
    """Return a description of the first difference between the kernels and torch; `None` if they agree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        config = RolloutCorrectionConfig(**probe.options)
    batch = probe_batch(probe, device)
    expected = torch_correction(batch._replace(mask=batch.mask != 0), config)
    actual, again = (kernel(batch, config, splits=probe.splits) for _ in range(2))

    for name in ("loss_mask", "sequence_kept"):
        wrong = getattr(actual, name) != getattr(expected, name)
        if wrong.any():
            return f"{name} differs at {int(wrong.sum())} of {wrong.numel()} places"
    if actual.weights is not None and expected.weights is not None:
        gap = (actual.weights - expected.weights).abs() - WEIGHTS_RTOL * expected.weights.abs() - 1e-12
        if not bool((gap <= 0).all()):
            return (
                f"weights differ at {int((~(gap <= 0)).sum())} of {gap.numel()} tokens, by up to {float(gap.max()):g}"
            )
        if again.weights is None or not torch.equal(actual.weights, again.weights):
            return "two runs give different weights"

    first, second, by_torch = (finalize(x.statistics.read()) for x in (actual, again, expected))
    for name, value in by_torch.items():
        if repr(first[name]) != repr(second[name]):
            return f"two runs give different metrics: {name} is {first[name]!r} and {second[name]!r}"
        # The reciprocal of a mean that may be close to 0 has no digits to compare.
        if name.endswith("max_viable_length"):
            continue
        if not math.isclose(first[name], value, rel_tol=METRICS_RTOL, abs_tol=METRICS_ATOL) and not (
            math.isnan(first[name]) and math.isnan(value)
        ):
            return f"{name} is {first[name]:g}, and {value:g} by torch"
    return None


def machine_of(device: torch.device) -> dict[str, str]:
    """Return the scope of a verdict: device, driver, and versions of torch, Triton and these kernels."""
    machine = {
        "device": device.type,
        "torch": torch.__version__,
        "triton": getattr(sys.modules.get("triton"), "__version__", "none"),
        "rollcorr": f"{rollcorr.__version__}+{_source_digest()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["device"] = f"{properties.name}, {properties.major}.{properties.minor}"
        machine["driver"] = _driver_version()
    return machine


def read_verdict(machine: dict[str, str]) -> Verdict | None:
    """Return the verdict of an earlier process; `None` if missing, damaged, or from another machine."""
    try:
        kept = json.loads(_verdict_path(machine).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return None
    if not isinstance(kept, dict) or kept.get("machine") != machine:
        return None
    agrees, reason = kept.get("agrees"), kept.get("reason")
    return Verdict(agrees, reason) if isinstance(agrees, bool) and isinstance(reason, str) else None


def write_verdict(machine: dict[str, str], verdict: Verdict) -> None:
    """Save a verdict, ignoring an unwritable folder. An incomplete file counts as missing."""
    if verdict.failed:
        return
    content = json.dumps({"machine": machine, "agrees": verdict.agrees, "reason": verdict.reason}, indent=2)
    with suppress(OSError, RuntimeError):
        path = _verdict_path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def _verdict_path(machine: dict[str, str]) -> Path:
    """Return the file of a machine. Raises RuntimeError without a home directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "rollcorr" / "kernels" / f"{name}.json"


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Return a digest of the kernels' source: a checkout changes between two versions, but its version does not."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _driver_version() -> str:
    """Return the driver as its module reports it, else the version that torch was built for."""
    for module in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError):
            return Path(module).read_text(encoding="utf-8").splitlines()[0].strip()
    return f"unknown, for CUDA {torch.version.cuda} or HIP {torch.version.hip}"
