"""vLLM offline: `vllm.LLM` in a process of its own, which may run another Python environment.

vLLM pins its own torch and takes over the process that it runs in, so it gets one for itself (`vllm_worker.py`).
Prompts and answers go through pipes as JSON; weights go through a temporary folder as a checkpoint.

vLLM starts from random weights and gets the policy's by the same update that later ones come by. An update that would
leave a parameter behind, such as the output head of a model with tied embeddings, then fails at the start, where it is
off by nats, and not some day above the noise floor.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import nn

from rollcorr.config import SamplingSpec
from rollcorr.config.checks import check_choice, check_integer, check_number
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.transport.worker import WorkerProcess
from rollcorr.engines.vllm.shared import EXTENSION, Dtype, VllmBase

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
"""Arguments of `vllm.LLM` that the engine sets itself."""


class VllmEngine(VllmBase):
    """Sample with vLLM in a worker process.

    Args:
        model: a causal language model of `transformers` that vLLM knows; it is written to a folder, never changed.
        sampling: how to draw tokens. `logprobs` is "raw" or "processed"; processed ones come with kept sets when
            anything truncates, and then top_k must be on.
        max_new_tokens: longest response, at least 1.
        eos_token_id: ends a response and belongs to it; other end tokens of the checkpoint do not count.
        pad_token_id: fills rows.
        version: policy version of `model`.
        dtype: precision that vLLM computes in.
        python: interpreter of an environment with vLLM and rollcorr.
        engine_args: further arguments of `vllm.LLM`, such as `max_model_len`, `tensor_parallel_size`, or
            `return_sampling_mask` on a GPU.
        env: environment variables for the worker, such as `VLLM_CPU_KVCACHE_SPACE`.
        update: "reload" loads new weights in place; "restart" starts vLLM anew for each update, for models that it
            cannot reload.
        timeout: seconds for one answer: sampling a batch, or loading weights.
        start_timeout: seconds to start vLLM.
        restarts: how often in one call a worker that died or hung is started anew and asked again.
        sync_tolerance: largest difference between vLLM and policy on the probe, nats; None for `NOISE_FLOOR`.

    Raises:
        TypeError: a number is of the wrong type.
        ValueError: a setting is out of range, unsupported, or the engine's own.
        EngineUnavailableError: vLLM does not start.
        WeightSyncError: it does not compute what the policy computes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sampling: SamplingSpec,
        max_new_tokens: int,
        eos_token_id: int,
        pad_token_id: int,
        version: int = 0,
        dtype: Dtype = "bfloat16",
        python: str = sys.executable,
        engine_args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        update: Literal["reload", "restart"] = "reload",
        timeout: float = 1800.0,
        start_timeout: float = 900.0,
        restarts: int = 1,
        sync_tolerance: float | None = None,
    ) -> None:
        engine_args = dict(engine_args or {})
        super().__init__(
            model,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            version=version,
            dtype=dtype,
            sync_tolerance=sync_tolerance,
            sampling_mask=bool(engine_args.get("return_sampling_mask")),
        )
        own = sorted(set(engine_args) & set(OWN_ARGUMENTS))
        if own:
            raise ValueError(f"engine_args {own} are set by the engine itself; leave them out")
        check_choice("update", update, ("reload", "restart"))
        check_number("timeout", timeout, above=0)
        check_number("start_timeout", start_timeout, above=0)
        check_integer("restarts", restarts, at_least=0)
        self.update = update
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.restarts = restarts
        self._command = [python, "-m", "rollcorr.engines.vllm.worker_process"]
        self._env = dict(env or {})
        self._checkpoint = Path(tempfile.mkdtemp(prefix="rollcorr-vllm-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._checkpoint, ignore_errors=True)
        self._engine_args = {
            "disable_log_stats": True,
            **engine_args,
            "model": str(self._checkpoint),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": dtype,
            "logprobs_mode": f"{sampling.logprobs}_logprobs",
            "max_logprobs": -1,
            "worker_extension_cls": EXTENSION,
        }
        self._worker: WorkerProcess | None = None
        self.update_weights(model, version=version)

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End vLLM and remove the folder with its weights. Also happens when the engine is collected."""
        self._unusable = "it was closed"
        self._abandon()
        self._remove()

    def restart(self) -> None:
        """Start vLLM anew with the weights that sample now, and verify them.

        Raises:
            EngineError: there are no verified weights: the last update failed.
            EngineUnavailableError: vLLM does not start.
            WeightSyncError: it does not compute what it did.
        """
        self._require_weights()
        with self._whole_or_unusable():
            self._abandon()
            self._load(self.weight_version)
            self._verify(self._expected)

    @property
    def _folder(self) -> Path:
        return self._checkpoint

    def _choices(self, prompts: list[list[int]], seeds: list[int]) -> list[Any]:
        question = {"prompts": prompts, "parameters": self._parameters, "seeds": seeds}
        for left in reversed(range(self.restarts + 1)):
            try:
                answer = self._ask("generate", **question)
                break
            except EngineUnavailableError:
                if not left:
                    raise
                self.restart()
        choices = answer.get("completions")
        return choices if isinstance(choices, list) else []

    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        found: list[list[float]] = self._ask("score", rows=rows, temperature=temperature)["log_probs"]
        return found

    def _load(self, version: int) -> None:
        if self._worker is None or not self._worker.alive or self.update == "restart":
            self._abandon()
            self._start(version)
        if self.update == "reload":
            self._ask("reload", folder=str(self._folder), version=version)

    def _start(self, version: int) -> None:
        self._worker = WorkerProcess(self._command, env=self._env, name="vLLM worker")
        load_format = "dummy" if self.update == "reload" else "auto"
        arguments = {**self._engine_args, "load_format": load_format}
        try:
            told = self._worker.ask("start", timeout=self.start_timeout, engine_args=arguments, version=version)
        except EngineAnswerError as error:
            raise EngineUnavailableError(
                f"vLLM did not start: {error}. It runs in {self._command[0]}, which needs vLLM and this package: "
                "pip install 'rollcorr[vllm]'"
            ) from error
        self.max_model_len = told["max_model_len"]
        self.sampling = dataclasses.replace(self.sampling, engine_version=told["version"])

    def _ask(self, what: str, **values: Any) -> dict[str, Any]:  # noqa: ANN401 (any JSON)
        if self._worker is None:
            raise EngineUnavailableError("the vLLM worker is not running")
        return self._worker.ask(what, timeout=self.timeout, **values)

    def _abandon(self) -> None:
        if self._worker is not None:
            self._worker.close(patience=0.0)
            self._worker = None
