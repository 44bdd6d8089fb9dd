"""vLLM-Omni as an engine for pictures, in process: `Omni.generate` with a pipeline that records log-probs.

The pipelines of verl-omni record them; of vLLM-Omni's own (0.32.0rc1) only Bagel's does, in a layout of its own. An
answer has latents, timesteps and log-probs of the window, but no means: the exact KL, and so a null, needs another
engine.

Tests use answers that vLLM-Omni's own output formatter produced (tests/engines/recordings), from trajectories of the
tests.

Source: vllm-project/vllm-omni, `outputs/__init__.py` and `diffusion/output_formatter.py`; verl-project/verl-omni,
`pipelines/sd3_flow_grpo`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollcorr.engines.base import EngineAnswerError
from rollcorr.engines.completions import reading
from rollcorr.engines.diffusion_engine import DiffusionRollout, DiffusionSettings, build_rollout
from rollcorr.engines.row_seeds import row_seed

# Largest relative difference between timesteps of the engine and of the settings: half precision.
TIMESTEP_TOLERANCE = 4e-3


class VllmOmniEngine:
    """Engine that samples pictures with vLLM-Omni; a `DiffusionEngine`.

    Args:
        generate: `Omni.generate` of an `Omni` with such a pipeline.
        settings: with the trainer's schedule; the timesteps of an answer must fit it.
        version: of the weights that the engine has.
        parameters: makes sampling parameters; defaults to vLLM-Omni's `OmniDiffusionSamplingParams`.

    Raises:
        ImportError: vLLM-Omni is not installed.
    """

    engine = "vllm-omni"

    def __init__(
        self,
        generate: Callable[..., Sequence[Any]],
        settings: DiffusionSettings,
        *,
        version: int = 0,
        parameters: Callable[..., Any] | None = None,
    ) -> None:
        if parameters is None:
            from vllm_omni.inputs.data import OmniDiffusionSamplingParams

            parameters = OmniDiffusionSamplingParams
        self.generate, self.settings, self.version, self.parameters = generate, settings, version, parameters

    def sample(self, prompts: Sequence[str], windows: Tensor, *, seed: int) -> DiffusionRollout:
        """Sample one trajectory per prompt; see `DiffusionEngine.sample`.

        Args:
            prompts: B texts.
            windows: rising step numbers, (B, W).
            seed: seeds the noise.

        Raises:
            ValueError: a window has holes, which vLLM-Omni cannot sample.
            EngineAnswerError: an answer does not fit the request.
        """
        if bool((windows.diff(dim=1) != 1).any()):
            raise ValueError("vLLM-Omni samples windows without holes: set rollout.sde_window_spacing to 1")
        settings, size = self.settings, windows.shape[1]
        answers: list[Any] = []
        for row, (prompt, start) in enumerate(zip(prompts, windows[:, 0].tolist(), strict=True)):
            sampling = self.parameters(
                height=settings.height,
                width=settings.width,
                num_inference_steps=settings.num_steps,
                guidance_scale=settings.guidance_scale,
                seed=row_seed(seed, row) >> 32,
                # A range as long as the window leaves one place for it.
                extra_args={
                    "noise_level": settings.noise_level,
                    "sde_type": "sde",
                    "sde_window_size": size,
                    "sde_window_range": (start, start + size),
                    "logprobs": True,
                },
            )
            answers += self.generate({"prompt": prompt}, sampling)
        return read_outputs(answers, windows, settings, version=self.version)


def read_outputs(
    outputs: Sequence[Any], windows: Tensor, settings: DiffusionSettings, *, version: int = 0
) -> DiffusionRollout:
    """Parse vLLM-Omni's `OmniRequestOutput`s, one per prompt.

    Args:
        outputs: with `trajectory_latents` (1, W + 1, …), `trajectory_timesteps` and `trajectory_log_probs` (1, W); the
            leading 1 is optional.
        windows: the requested step numbers, (B, W).
        settings: settings of the request.
        version: version of the weights.

    Raises:
        EngineAnswerError: an output is missing or failed, lacks a field, or its timesteps differ from the schedule.
    """
    rows = []
    for row, output in enumerate(outputs):
        if getattr(output, "error", None):
            raise EngineAnswerError(f"picture {row} failed: {output.error}")
        with reading(f"picture {row} is no output of a pipeline with log-probs", type(output).__name__):
            log_probs = output.trajectory_log_probs.reshape(-1)
            latents, times = output.trajectory_latents, output.trajectory_timesteps.reshape(-1)
            rows.append((latents[0] if len(latents) == 1 else latents, times.float(), log_probs))

    # With a different σ, a step would have a different density.
    wanted = 1000 * torch.tensor(settings.sigmas, dtype=torch.float32, device="cpu")[windows]
    if len(rows) != len(windows):
        raise EngineAnswerError(f"{len(rows)} outputs for {len(windows)} prompts")
    for row, (_, times, _) in enumerate(rows):
        if times.shape != wanted[row].shape or not torch.allclose(times, wanted[row], rtol=TIMESTEP_TOLERANCE):
            raise EngineAnswerError(
                f"picture {row} has timesteps {times.tolist()}; expected {wanted[row].tolist()}, those of steps "
                f"{windows[row].tolist()} in the trainer's schedule"
            )
    return build_rollout(
        settings,
        windows,
        [latents for latents, *_ in rows],
        torch.stack([log_probs for *_, log_probs in rows]),
        version=version,
    )
