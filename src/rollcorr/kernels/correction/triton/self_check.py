"""Whether the Triton kernels compute on a device what torch computes there: asked once, before `impl="auto"` uses them.

A compiler, a driver or a chip that nobody tested can make a kernel wrong without an error. So on first use a small
fixed probe runs on both paths: every layout, dtype and kind of mask, every level of weights, all criteria, and NaN
where nothing may be read.

The verdict is kept from one process to the next: a small JSON file for each kind of machine, in
`$XDG_CACHE_HOME/rollcorr/kernels`, by default `~/.cache/rollcorr/kernels`. A verdict that cannot be read is none, and
one that cannot be written is made again by the next process: neither is an error.
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
        agrees: whether they do.
        reason: what differs or failed; empty if they agree.
        failed: whether they could not be run at all. That may pass, so the next process tries again.
    """

    agrees: bool
    reason: str = ""
    failed: bool = False


class Probe(NamedTuple):
    """One batch and one configuration.

    Attributes:
        name: what it is, for the message.
        options: of the configuration.
        T: tokens of a row. The kernels know four layouts: packed, and rows of whole blocks, of a multiple of 16, of any
            length.
        packed: whether the rows are packed into one.
        train, rollout: dtypes of the log-probs.
        mask: dtype of the mask.
        splits: programs for each sequence.
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
_lock = threading.Lock()


def is_verified(device: torch.device) -> bool:
    """Whether the kernels agree with torch on a device. Compiles, runs and waits the first time; then it is known."""
    verdict = _verdicts.get(device)
    if verdict is None:
        # A graph records what runs on the device, and a probe would become part of it; a later call can ask.
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        verdict = _first_verdict(device)
    return verdict.agrees


def known_verdict(device: torch.device) -> Verdict | None:
    """What is known without running anything: from this process, or from an earlier one."""
    return _verdicts.get(device) or read_verdict(machine_of(device))


def check_kernels(device: torch.device, kernel: Kernel = triton_correction) -> Verdict:
    """Run every probe on both paths, the kernels twice.

    Args:
        device: where.
        kernel: what to hold against torch.

    Returns:
        The verdict, with the first difference in words, or the error that ended a probe.
    """
    for probe in PROBES:
        try:
            difference = _difference(probe, device, kernel)
        except Exception as error:  # a compiler can raise anything, and torch is there to take over
            said = next(iter(str(error).strip().splitlines()), "no message")[:200]
            return Verdict(False, f"{probe.name}: {type(error).__name__}: {said}", failed=True)
        if difference is not None:
            return Verdict(False, f"{probe.name}: {difference}")
    return Verdict(True)


def probe_batch(probe: Probe, device: torch.device) -> Batch:
    """The probe's tensors: the same numbers on every machine, with NaN and infinities on both sides of the mask."""
    generator = torch.Generator(device="cpu").manual_seed(7)
    shape = SEQUENCES, probe.T
    rollout = -3.0 * torch.rand(shape, generator=generator, device="cpu")
    train = rollout + 0.3 * torch.randn(shape, generator=generator, device="cpu")
    mask = torch.rand(shape, generator=generator, device="cpu") < 0.8

    # Accidents on response tokens: missing on either side, probability zero, and a sentinel.
    accidents = ((0, 3, math.nan, -1.0), (1, 5, -math.inf, -1.0), (2, 7, -1.0, math.inf), (0, 9, -1.0, -math.inf))
    for row, token, log_pi, log_mu in (*accidents, (4, 11, -80.0, -1.0)):
        train[row, token], rollout[row, token], mask[row, token] = log_pi, log_mu, True

    # Two rows in which every token is ordinary, but some weights of the second are beyond their bounds. The token pass
    # reads such blocks in ways of their own.
    mask[5:] = True
    train[5:] = rollout[5:] + (train[5:] - rollout[5:]).clamp(-0.4, 0.4)
    train[6, 50::100] = rollout[6, 50::100] + 1.2

    # A sequence without a token; and what the mask leaves out is poison, which must not be read.
    mask[3] = False
    train[~mask], rollout[~mask] = math.nan, math.inf

    cu_seqlens = None
    if probe.packed:
        # Sequences begin where no vector load may, and one is empty.
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
    """Read the verdict of an earlier process, or make one; say so once if it is against the kernels."""
    with _lock:
        if device in _verdicts:
            return _verdicts[device]
        machine = machine_of(device)
        verdict = read_verdict(machine)
        if verdict is None:
            with ExitStack() as stack:
                # Allowed to wait, whatever the caller forbade.
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


def _difference(probe: Probe, device: torch.device, kernel: Kernel) -> str | None:
    """What the kernels compute otherwise than torch, in words; None if nothing."""
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
        # The reciprocal of a mean that may be next to nothing has no digits to compare.
        if name.endswith("max_viable_length"):
            continue
        if not math.isclose(first[name], value, rel_tol=METRICS_RTOL, abs_tol=METRICS_ATOL) and not (
            math.isnan(first[name]) and math.isnan(value)
        ):
            return f"{name} is {first[name]:g}, and {value:g} by torch"
    return None


def machine_of(device: torch.device) -> dict[str, str]:
    """What a verdict holds for: device, driver, and versions of torch, Triton and these kernels."""
    machine = {
        "device": device.type,
        "torch": torch.__version__,
        "triton": getattr(sys.modules.get("triton"), "__version__", "none"),
        "rollcorr": f"{rollcorr.__version__}+{_source_digest()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["device"] = f"{properties.name}, {properties.major}.{properties.minor}"
        machine["driver"] = _driver()
    return machine


def read_verdict(machine: dict[str, str]) -> Verdict | None:
    """What an earlier process found, or None: never asked, damaged, or of another machine."""
    try:
        kept = json.loads(_path(machine).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return None
    if not isinstance(kept, dict) or kept.get("machine") != machine:
        return None
    agrees, reason = kept.get("agrees"), kept.get("reason")
    return Verdict(agrees, reason) if isinstance(agrees, bool) and isinstance(reason, str) else None


def write_verdict(machine: dict[str, str], verdict: Verdict) -> None:
    """Keep a verdict, without complaint where there is no place for it. One that breaks off is read as none."""
    if verdict.failed:
        return
    content = json.dumps({"machine": machine, "agrees": verdict.agrees, "reason": verdict.reason}, indent=2)
    with suppress(OSError, RuntimeError):
        path = _path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def _path(machine: dict[str, str]) -> Path:
    """The file of a machine. RuntimeError: there is no home directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "rollcorr" / "kernels" / f"{name}.json"


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """A digest of the kernels' own files: between two versions a checkout changes, and its version does not."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _driver() -> str:
    """The driver as its module reports it, else the version that torch was built for."""
    for module in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError):
            return Path(module).read_text(encoding="utf-8").splitlines()[0].strip()
    return f"unknown, for CUDA {torch.version.cuda} or HIP {torch.version.hip}"
