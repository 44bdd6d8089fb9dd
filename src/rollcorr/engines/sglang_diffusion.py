"""SGLang-Diffusion as an engine, over `POST /rollout/generate`: one request per picture, MessagePack back.

Tests use answers that SGLang's own rollout step and serializer produced (tests/engines/recordings); no test has run a
server. The engine updates no weights: load them into the server yourself (`/update_weights_from_disk`), and set
`version`.

Source: sgl-project/sglang, `multimodal_gen/runtime/entrypoints/post_training`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollcorr.engines.base import EngineAnswerError
from rollcorr.engines.completions import reading
from rollcorr.engines.diffusion_engine import DiffusionRollout, DiffusionSettings, build_rollout
from rollcorr.engines.row_seeds import row_seed
from rollcorr.engines.transport.http import JsonClient
from rollcorr.engines.transport.msgpack_body import parse_msgpack

# Largest difference between σ of the server and of the settings: rounding of float32.
SIGMA_TOLERANCE = 1e-5


class SglangDiffusionEngine:
    """Engine that samples pictures with an SGLang-Diffusion server; a `DiffusionEngine`.

    Args:
        url: the server's address, for instance "http://localhost:30000".
        settings: with the trainer's schedule; the server's σ must equal it.
        version: of the weights that the server has.
        true_cfg: send γ as `true_cfg_scale`, which Qwen-Image reads, instead of `guidance_scale`.
        **client: options of `JsonClient`, such as `timeout`, `headers` or `max_answer_bytes`.

    Raises:
        ImportError: httpx is not installed.
        ValueError: an option is out of range.
    """

    engine = "sglang-diffusion"

    def __init__(
        self,
        url: str,
        settings: DiffusionSettings,
        *,
        version: int = 0,
        true_cfg: bool = False,
        **client: Any,  # noqa: ANN401 (options of JsonClient)
    ) -> None:
        self.settings, self.version, self.true_cfg = settings, version, true_cfg
        self._client = JsonClient(url, parse=parse_msgpack, **client)

    def sample(self, prompts: Sequence[str], windows: Tensor, *, seed: int) -> DiffusionRollout:
        """Sample one trajectory per prompt; see `DiffusionEngine.sample`. Windows may have holes.

        Args:
            prompts: B texts.
            windows: rising step numbers, (B, W).
            seed: seeds the noise.

        Raises:
            EngineUnavailableError: no server answers.
            EngineAnswerError: the server refused, or its answer does not fit the request.
        """
        settings = self.settings
        scale = "true_cfg_scale" if self.true_cfg else "guidance_scale"
        bodies = [
            {
                "prompt": prompt,
                "seed": row_seed(seed, row) >> 32,  # 31 bits
                "height": settings.height,
                "width": settings.width,
                "num_inference_steps": settings.num_steps,
                "num_outputs_per_prompt": 1,
                scale: settings.guidance_scale,
                "rollout": True,
                "rollout_sde_type": "sde",
                "rollout_noise_level": settings.noise_level,
                "rollout_log_prob_no_const": False,
                "rollout_debug_mode": True,  # returns the means
                "rollout_return_dit_trajectory": True,
                "rollout_sde_step_indices": window,
            }
            for row, (prompt, window) in enumerate(zip(prompts, windows.tolist(), strict=True))
        ]
        return read_rollouts(
            self._client.post_all("/rollout/generate", bodies), windows, settings, version=self.version
        )


def read_rollouts(
    answers: Sequence[Any], windows: Tensor, settings: DiffusionSettings, *, version: int = 0
) -> DiffusionRollout:
    """Parse the answers of `/rollout/generate`, one per prompt, after MessagePack or JSON is unpacked.

    Args:
        answers: lists of one response.
        windows: the requested step numbers, (B, W).
        settings: settings of the request.
        version: version of the weights.

    Raises:
        EngineAnswerError: a field is missing, or does not fit the request.
    """
    rows = []
    for row, answer in enumerate(answers):
        with reading(f"picture {row} is no answer of /rollout/generate", answer):
            (response,) = answer
            path, debug = response["dit_trajectory"], response["rollout_debug_tensors"]
            found = [path["latents"], path["sigmas"], response["rollout_log_probs"], debug["rollout_prev_sample_means"]]
            rows.append([read_tensor(value) for value in found])

    # Columns of the window, from trajectories of all steps: x before step i is entry i, x after it entry i + 1.
    wanted = torch.tensor(settings.sigmas, dtype=torch.float32, device="cpu")
    count = settings.num_steps
    for row, (latents, sigmas, log_probs, means) in enumerate(rows):
        lengths = (len(latents) - 1, len(sigmas) - 1, len(log_probs), len(means))
        if set(lengths) != {count} or not torch.allclose(sigmas.float(), wanted, rtol=0, atol=SIGMA_TOLERANCE):
            raise EngineAnswerError(
                f"picture {row}: latents, sigmas, log-probs and means of {lengths} steps, sigmas {sigmas.tolist()}; "
                f"expected {count} steps and the trainer's sigmas {list(settings.sigmas)}"
            )

    has_holes = bool((windows.diff(dim=1) > 1).any())
    paths = list(zip(windows, rows, strict=True))
    return build_rollout(
        settings,
        windows,
        [torch.cat([latents[window], latents[window[-1:] + 1]]) for window, (latents, *_) in paths],
        torch.stack([log_probs[window] for window, (_, _, log_probs, _) in paths]),
        following=[latents[window + 1] for window, (latents, *_) in paths] if has_holes else None,
        means=torch.stack([means[window] for window, (_, _, _, means) in paths]),
        final=torch.stack([latents[-1].float() for latents, *_ in rows]),
        version=version,
    )


def read_tensor(value: Mapping[str, Any]) -> Tensor:
    """Return a serialized tensor: safetensors with one tensor, in bytes or base64."""
    from safetensors.torch import load

    data = value["data"]
    (tensor,) = load(data if isinstance(data, bytes) else base64.b64decode(data, validate=True)).values()
    return tensor
