"""vLLM behind its HTTP server: token ids in, token ids with log-probs out.

`/inference/v1/generate` (`--enable-scale-out`) accepts and returns token ids, kept sets and weight versions. Every
server has `/v1/completions`, which accepts token ids as well. The engine chooses by the server's list of paths.

Plain HTTP cannot transfer weights. A server in development mode (`VLLM_SERVER_DEV_MODE=1`) that was started with this
package's worker extension reads them from a shared folder. For any other server an update raises an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rollcorr.config.checks import check_integer
from rollcorr.engines.base import EngineAnswerError, EngineError, GenerationSettings, WeightSyncError
from rollcorr.engines.completions import check_log_prob, reading
from rollcorr.engines.remote_engine import ServerOptions
from rollcorr.engines.vllm.answers import VllmBase, choice_of_text, prompt_log_probs
from rollcorr.engines.vllm.weight_receiver import WORKER_EXTENSION

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

# Paths that a server needs for weight updates.
FOR_UPDATES = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")


@dataclass(frozen=True, kw_only=True)
class VllmServerOptions(ServerOptions):
    """Options of `VllmServerEngine`, in addition to `ServerOptions`.

    Attributes:
        served_model: the model's name on the server; optional. Defaults to the first that the server lists.
        sampling_mask: whether the server was started with `--return-sampling-mask`.
    """

    served_model: str | None = None
    sampling_mask: bool = False


class VllmServerEngine(VllmBase):
    """Engine that samples with a running vLLM server.

    The server's `--logprobs-mode` decides which log-probs it returns. The engine sends one request at the start whose
    answer shows the mode.

    Args:
        model: the policy that the server runs, verified by the probe.
        settings: sampling settings; see `VllmBase`. Kept sets need `--logprobs-mode processed_logprobs`, and either a
            `--max-logprobs` of 1.5 top_k + 12 or `--return-sampling-mask`.
        options: the server's address and start options.
        version: policy version of `model`.

    Raises:
        ImportError: httpx is not installed.
        TypeError: a number has an invalid type.
        ValueError: a setting is out of range or unsupported, or the server's log-probs are of a different kind.
        EngineUnavailableError: no server answers.
        EngineAnswerError: the server is not a vLLM server.
        WeightSyncError: the server's weights differ from the weights of `model`.
    """

    options: VllmServerOptions

    def __init__(
        self, model: nn.Module, settings: GenerationSettings, options: VllmServerOptions, *, version: int = 0
    ) -> None:
        super().__init__(model, settings, options, version=version, sampling_mask=options.sampling_mask)
        # A process that was killed between pause and resume left the server paused: it answers no request until a load
        # resumes it.
        self._connect(model, options, version, log_probs_per_token=2 * (1 + self._parameters["logprobs"]))
        self._check_log_probs()

    @property
    def _folder(self) -> Path:
        missing = [path for path in FOR_UPDATES if path not in self._paths]
        if self.options.folder is None or missing:
            lacks = f"the server lacks {', '.join(missing)}" if missing else "no folder was given"
            raise EngineError(
                f"this vLLM server takes no weights: {lacks}. Start it with VLLM_SERVER_DEV_MODE=1 and "
                f"--worker-extension-cls {WORKER_EXTENSION}, and give a folder that both sides see"
            )
        return Path(self.options.folder)

    def _read_server_properties(self) -> None:
        """Read the server's paths, version, model and longest sequence."""
        served_model = self.options.served_model
        paths, version, listed = (self._client.get(path) for path in ("/openapi.json", "/version", "/v1/models"))
        with reading(f"{self._client.url} is no vLLM server that serves {served_model or 'a model'}", listed):
            self._paths = set(paths["paths"])
            self.sampling = dataclasses.replace(self.sampling, engine_version=version["version"])
            models = {entry["id"]: entry for entry in listed["data"]}
            self._model = next(iter(models)) if served_model is None else served_model
            longest = models[self._model].get("max_model_len")
            self.max_model_len = None if longest is None else check_integer("max_model_len", longest, at_least=1)

    def _check_log_probs(self) -> None:
        """Check the kind of log-probs by sampling with top-k 1: the processed log-prob is 0, the raw one is not."""
        parameters = {"max_tokens": 1, "top_k": 1, "temperature": 0.5, "logprobs": 0, "ignore_eos": True}
        choice = self._request_choices([self._probe.prompt_ids[0].tolist()], [0], parameters)[0]

        with reading("the server returned no log-prob", choice):
            log_prob = check_log_prob(choice["logprobs"]["content"][0]["logprob"], "the log-prob of the first answer")
        found = "processed" if log_prob == 0 else "raw"
        if found != self.sampling.logprobs:
            raise ValueError(
                f"the server returns {found} log-probs, sampling says {self.sampling.logprobs!r}: start it with "
                f"--logprobs-mode {self.sampling.logprobs}_logprobs, or set logprobs={found!r}"
            )

    def _check_again(self) -> None:
        """Check the kind of log-probs again, because a restarted server may return a different one."""
        try:
            self._check_log_probs()
        except ValueError as error:
            raise EngineAnswerError(f"the server came back with other options: {error}") from error

    def _request_choices(self, prompts: list[list[int]], seeds: list[int], parameters: Mapping[str, Any]) -> list[Any]:
        asked = [{**parameters, "seed": seed} for seed in seeds]
        if GENERATE in self._paths:
            bodies: list[dict[str, Any]] = [
                {"model": self._model, "token_ids": prompt, "sampling_params": fields}
                for prompt, fields in zip(prompts, asked, strict=True)
            ]
            return [_only_choice(answer) for answer in self._post_all(GENERATE, bodies)]

        # Without these the answer is text, and text does not convert back to ids reliably.
        forms = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        bodies = [
            {"model": self._model, "prompt": prompt, **forms, **fields}
            for prompt, fields in zip(prompts, asked, strict=True)
        ]
        return [choice_of_text(_only_choice(answer)) for answer in self._post_all(COMPLETIONS, bodies)]

    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> list[list[Any]]:
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
        """Pause, reload, clear caches of the old weights, and resume. After a failure the server stays paused."""
        # Running responses end on the old weights.
        self._client.post("/pause?mode=wait", {})
        self._client.post("/collective_rpc", {"method": "rollcorr_reload", "args": [str(self._folder.resolve())]})
        answer = self._client.post("/reset_prefix_cache", {})
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightSyncError("weight sync incomplete: the server kept its prefix cache, made by the old weights")
        self._client.post("/update_weight_version", {"new_version": str(version)})
        self._client.post("/resume", {})


def _only_choice(answer: Any) -> Any:  # noqa: ANN401 (unchecked JSON)
    with reading("one choice was asked for, the server sent another answer", answer):
        [choice] = answer["choices"]
        return choice
