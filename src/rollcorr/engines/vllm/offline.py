"""vLLM offline: `vllm.LLM` in a worker process, which may use a separate Python environment.

vLLM pins its own torch and changes the process that it runs in, so it runs in a separate one (`worker_program.py`).
Prompts and answers go through pipes as JSON; weights go through a temporary folder as a checkpoint.

vLLM starts from random weights and gets the policy's through the same update as all later ones. If an update misses a
parameter, such as the output head of a model with tied embeddings, the engine then fails at the start, where the
error is several nats. Later the same fault might hide below the noise floor.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from rollcorr.config.checks import check_choice, check_integer, check_number
from rollcorr.config.secrets import redact
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError, GenerationSettings
from rollcorr.engines.remote_engine import RemoteOptions
from rollcorr.engines.transport.pipes import WorkerProcess
from rollcorr.engines.vllm.answers import VllmBase
from rollcorr.engines.vllm.weight_receiver import WORKER_EXTENSION

# Arguments of `vllm.LLM` that the engine sets itself.
OWN_ARGUMENTS = (
    "dtype",
    "generation_config",
    "load_format",
    "logprobs_mode",
    "max_logprobs",
    "model",
    "skip_tokenizer_init",
    "tokenizer",
    "worker_extension_cls",
)


@dataclass(frozen=True, kw_only=True)
class VllmOptions(RemoteOptions):
    """Options of `VllmEngine`, in addition to `RemoteOptions`.

    Attributes:
        python: interpreter of an environment that contains vLLM and rollcorr.
        engine_args: further arguments of `vllm.LLM`, such as `max_model_len`, `tensor_parallel_size`, or
            `return_sampling_mask` on a GPU.
        env: environment variables for the worker, such as `VLLM_CPU_KVCACHE_SPACE`.
        update: "reload" loads new weights in place; "restart" starts vLLM again for each update, for models that it
            cannot reload.
        timeout: seconds for one answer: sampling a batch, or loading weights.
        start_timeout: seconds to start vLLM.
        restarts: maximum number of restarts and retries per call after the worker died or hung.

    Raises:
        TypeError: a value has an invalid type.
        ValueError: a value is out of range, or the engine itself sets an argument in `engine_args`.
    """

    python: str = sys.executable
    engine_args: Mapping[str, Any] = field(default_factory=dict, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    update: Literal["reload", "restart"] = "reload"
    timeout: float = 1800.0
    start_timeout: float = 900.0
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        own = sorted(set(self.engine_args) & set(OWN_ARGUMENTS))
        if own:
            raise ValueError(f"engine_args {own} are set by the engine itself; leave them out")
        redact({"engine_args": self.engine_args, "env": self.env})  # vLLM prints its arguments when it fails
        check_choice("update", self.update, ("reload", "restart"))
        check_number("timeout", self.timeout, above=0)
        check_number("start_timeout", self.start_timeout, above=0)
        check_integer("restarts", self.restarts, at_least=0)


class VllmEngine(VllmBase):
    """Engine that samples with vLLM in a worker process.

    Args:
        model: a causal language model of `transformers` that vLLM supports; saved to a folder, never changed.
        settings: sampling settings; see `VllmBase`.
        options: how to run vLLM.
        version: policy version of `model`.

    Raises:
        TypeError: a number has an invalid type.
        ValueError: a setting is out of range or unsupported.
        EngineUnavailableError: vLLM does not start.
        WeightSyncError: vLLM's log-probs differ from the policy's.
    """

    options: VllmOptions

    def __init__(
        self,
        model: nn.Module,
        settings: GenerationSettings,
        options: VllmOptions = VllmOptions(),
        *,
        version: int = 0,
    ) -> None:
        masked = bool(options.engine_args.get("return_sampling_mask"))
        super().__init__(model, settings, options, version=version, sampling_mask=masked)

        self._checkpoint = Path(tempfile.mkdtemp(prefix="rollcorr-vllm-"))
        self._remove_checkpoint = weakref.finalize(self, shutil.rmtree, self._checkpoint, ignore_errors=True)
        self._worker: WorkerProcess | None = None
        self.update_weights(model, version=version)

    def close(self) -> None:
        """Stop vLLM and remove the folder with its weights. Garbage collection of the engine does the same."""
        super().close()
        self._shut_down_worker()
        self._remove_checkpoint()

    def restart(self) -> None:
        """Restart vLLM with the current weights, and verify them.

        Raises:
            EngineError: there are no verified weights, because the last update failed.
            EngineUnavailableError: vLLM does not start.
            WeightSyncError: vLLM's log-probs changed.
        """
        self._require_weights()
        with self._unusable_on_failure():
            self._shut_down_worker()
            self._load_and_verify(self.weight_version, self._expected)

    @property
    def _folder(self) -> Path:
        return self._checkpoint

    def _request_choices(self, prompts: list[list[int]], seeds: list[int], parameters: Mapping[str, Any]) -> list[Any]:
        request = {"prompts": prompts, "parameters": parameters, "seeds": seeds}
        for restarts_left in reversed(range(self.options.restarts + 1)):
            try:
                return list(self._ask("generate", **request)["completions"])
            except EngineUnavailableError:
                if not restarts_left:
                    raise
                self.restart()
        raise AssertionError("the last round returns or raises")

    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        return list(self._ask("score", rows=rows, temperature=temperature)["log_probs"])

    def _load(self, version: int) -> None:
        # A worker that starts with "auto" reads the folder by itself.
        if self._worker is None or not self._worker.alive or self.options.update == "restart":
            self._shut_down_worker()
            self._start(version)
        if self.options.update == "reload":
            self._ask("reload", folder=str(self._folder), version=version)

    def _start(self, version: int) -> None:
        options = self.options
        command = [options.python, "-m", "rollcorr.engines.vllm.worker_program"]
        self._worker = WorkerProcess(command, env=options.env, name="vLLM worker")

        arguments = {
            "disable_log_stats": True,
            **options.engine_args,
            "model": str(self._folder),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": options.dtype,
            "logprobs_mode": f"{self.sampling.logprobs}_logprobs",
            "max_logprobs": -1,
            "worker_extension_cls": WORKER_EXTENSION,
            # A reload follows immediately, and must load every parameter.
            "load_format": "dummy" if options.update == "reload" else "auto",
        }
        try:
            started = self._worker.ask("start", timeout=options.start_timeout, engine_args=arguments, version=version)
        except EngineAnswerError as error:
            raise EngineUnavailableError(
                f"vLLM did not start: {error}. It runs in {options.python}, which needs vLLM and this package: "
                "pip install 'rollcorr[vllm]'"
            ) from error
        self.max_model_len = started["max_model_len"]
        self.sampling = dataclasses.replace(self.sampling, engine_version=started["version"])

    def _ask(self, what: str, **values: Any) -> dict[str, Any]:  # noqa: ANN401 (any JSON)
        if self._worker is None:
            raise EngineUnavailableError("the vLLM worker is not running")
        return self._worker.ask(what, timeout=self.options.timeout, **values)

    def _shut_down_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
