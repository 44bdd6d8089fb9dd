"""vLLM behind its HTTP server: token ids in, token ids with log-probs out.

`/inference/v1/generate` (`--enable-scale-out`) takes and gives token ids, kept sets and weight versions;
`/v1/completions`, which every server has, is asked in token ids too. Which one the server has is read from its list of
paths.

Weights cannot go over plain HTTP. A server in development mode (`VLLM_SERVER_DEV_MODE=1`) that was started with this
package's worker extension takes them from a folder that both sides see; any other one is refused an update.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, EngineError, WeightSyncError
from rollcorr.engines.probe import score_probe
from rollcorr.engines.transport.http import JsonClient
from rollcorr.engines.vllm.answers import choice_of_text, prompt_log_probs
from rollcorr.engines.vllm.shared import EXTENSION, Dtype, VllmBase

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
FOR_UPDATES = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
"""What a server must answer to take weights."""


class VllmServerEngine(VllmBase):
    """Sample with a vLLM server that runs already.

    Which log-probs it returns is decided when it is started (`--logprobs-mode`), and checked here by a question whose
    answer tells.

    Args:
        model: the policy that it serves, checked by the probe.
        url: where it is, for instance "http://localhost:8000".
        sampling: how to draw tokens. Kept sets need `--logprobs-mode processed_logprobs` and a `--max-logprobs` of 1.5
            top_k + 12, or `--return-sampling-mask`.
        max_new_tokens: longest response, at least 1.
        eos_token_id: ends a response and belongs to it; other end tokens of the checkpoint do not count.
        pad_token_id: fills rows.
        version: policy version of `model`.
        dtype: precision that the server computes in.
        served_model: its name there; None for the first that the server names.
        folder: where weights are written for the server to read, seen by both under this path; None for a server that
            takes none.
        sampling_mask: the server was started with `--return-sampling-mask`.
        timeout: seconds without a byte of an answer.
        retries: how often a request that failed is sent again.
        concurrency: requests under way at a time.
        headers: sent with each request, such as an API key.
        sync_tolerance: largest difference between server and policy on the probe, nats; None for `NOISE_FLOOR`.

    Raises:
        ImportError: httpx is not installed.
        TypeError: a number is of the wrong type.
        ValueError: a setting is out of range or unsupported, or the server returns other log-probs than it says.
        EngineUnavailableError: no server answers.
        EngineAnswerError: it is no vLLM server.
        WeightSyncError: it serves other weights than those of `model`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        url: str,
        sampling: SamplingSpec,
        max_new_tokens: int,
        eos_token_id: int,
        pad_token_id: int,
        version: int = 0,
        dtype: Dtype = "bfloat16",
        served_model: str | None = None,
        folder: str | Path | None = None,
        sampling_mask: bool = False,
        timeout: float = 1800.0,
        retries: int = 3,
        concurrency: int = 64,
        headers: Mapping[str, str] | None = None,
        sync_tolerance: float | None = None,
    ) -> None:
        super().__init__(
            model,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            version=version,
            dtype=dtype,
            sync_tolerance=sync_tolerance,
            sampling_mask=sampling_mask,
        )
        self._client = JsonClient(url, timeout=timeout, retries=retries, concurrency=concurrency, headers=headers)
        self._close = weakref.finalize(self, self._client.close)
        self._updates_folder = None if folder is None else Path(folder)
        self._meet(served_model)
        self._check_log_probs()
        if self._updates_folder is None:
            self._expected = score_probe(model, self._probe, dtype=self._torch_dtype)
            with self._whole_or_unusable():
                self._verify(self._expected)
        else:
            self._updates_folder.mkdir(parents=True, exist_ok=True)
            self.update_weights(model, version=version)

    def __enter__(self) -> VllmServerEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The server goes on."""
        self._unusable = "it was closed"
        self._close()

    @property
    def _folder(self) -> Path:
        missing = [path for path in FOR_UPDATES if path not in self._paths]
        if self._updates_folder is None or missing:
            lacks = f"the server lacks {', '.join(missing)}" if missing else "no folder was given"
            raise EngineError(
                f"this vLLM server takes no weights: {lacks}. Start it with VLLM_SERVER_DEV_MODE=1 and "
                f"--worker-extension-cls {EXTENSION}, and give a folder that both sides see"
            )
        return self._updates_folder

    def _meet(self, served_model: str | None) -> None:
        """Learn the server's paths, version, model and longest sequence."""
        try:
            self._paths = set(self._client.get("/openapi.json")["paths"])
            engine_version = str(self._client.get("/version")["version"])
            models = {entry["id"]: entry for entry in self._client.get("/v1/models")["data"]}
            self._model = next(iter(models)) if served_model is None else served_model
            self.max_model_len = models[self._model].get("max_model_len")
        except (AttributeError, KeyError, StopIteration, TypeError) as error:
            raise EngineAnswerError(
                f"{self._client.url} is no vLLM server that serves {served_model or 'a model'} "
                f"({type(error).__name__}: {error})"
            ) from error
        self._tokens_in_and_out = GENERATE in self._paths
        self.sampling = dataclasses.replace(self.sampling, engine_version=engine_version)

    def _check_log_probs(self) -> None:
        """Ask for the likeliest token alone: processed log-probs are 0 for it, raw ones are not."""
        parameters = {"max_tokens": 1, "top_k": 1, "temperature": 0.5, "logprobs": 0, "ignore_eos": True}
        choice = self._ask_for([self._probe.prompt_ids[0].tolist()], [0], parameters)[0]
        try:
            found = "processed" if choice["logprobs"]["content"][0]["logprob"] == 0 else "raw"
        except (IndexError, KeyError, TypeError) as error:
            raise EngineAnswerError(f"the server returned no log-prob: {str(choice)[:300]}") from error
        if found != self.sampling.logprobs:
            raise ValueError(
                f"the server returns {found} log-probs, sampling says {self.sampling.logprobs!r}: start it with "
                f"--logprobs-mode {self.sampling.logprobs}_logprobs, or set logprobs={found!r}"
            )

    def _choices(self, prompts: list[list[int]], seeds: list[int]) -> list[Any]:
        return self._ask_for(prompts, seeds, self._parameters)

    def _ask_for(self, prompts: list[list[int]], seeds: list[int], parameters: Mapping[str, Any]) -> list[Any]:
        """One choice a prompt in the form of `/inference/v1/generate`."""
        asked = [{**parameters, "seed": seed} for seed in seeds]
        if self._tokens_in_and_out:
            bodies: list[dict[str, Any]] = [
                {"model": self._model, "token_ids": prompt, "sampling_params": fields}
                for prompt, fields in zip(prompts, asked, strict=True)
            ]
            return [_only_choice(answer) for answer in self._post_all(GENERATE, bodies)]
        forms = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        bodies = [
            {"model": self._model, "prompt": prompt, **forms, **fields}
            for prompt, fields in zip(prompts, asked, strict=True)
        ]
        return [choice_of_text(_only_choice(answer)) for answer in self._post_all(COMPLETIONS, bodies)]

    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        if temperature != 1:
            raise EngineError(
                f"a vLLM server scores at temperature 1, not {temperature:g}: sample at 1, or score with the policy"
            )
        bodies = [{"model": self._model, "prompt": row, "max_tokens": 1, "prompt_logprobs": 0} for row in rows]
        answers = [_only_choice(answer) for answer in self._post_all(COMPLETIONS, bodies)]
        return [prompt_log_probs(answer.get("prompt_logprobs"), row) for answer, row in zip(answers, rows, strict=True)]

    def _post_all(self, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
        try:
            return self._client.post_all(path, bodies)
        except EngineAnswerError as error:
            if "sample logprobs" not in str(error):
                raise
            raise EngineAnswerError(
                f"{error}. Start the server with --max-logprobs {self._parameters['logprobs']}: kept sets of top_k "
                f"{self.sampling.top_k} need that many, for logits that tie are all kept"
            ) from error

    def _load(self, version: int) -> None:
        """Pause, reload, forget what was cached under the old weights, and go on. After a failure it stays paused."""
        self._client.post("/pause?mode=wait", {})
        self._client.post("/collective_rpc", {"method": "rollcorr_reload", "args": [str(self._folder.resolve())]})
        told = self._client.post("/reset_prefix_cache", {})
        if isinstance(told, dict) and told.get("success") is False:
            raise WeightSyncError("weight sync incomplete: the server kept its prefix cache, made by the old weights")
        self._client.post("/update_weight_version", {"new_version": str(version)})
        self._client.post("/resume", {})

    def _abandon(self) -> None:
        """A server is not ours to end: it is left as it is, paused when a load failed."""


def _only_choice(answer: Any) -> Any:  # noqa: ANN401 (whatever the server sent)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineAnswerError(f"one choice was asked for, the server answered {str(answer)[:300]}")
    return choices[0]
