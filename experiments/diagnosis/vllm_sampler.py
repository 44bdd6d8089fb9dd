"""vLLM on the CPU as the sampler of live faults: an engine serves many logs, and its weights are replaced between them.

`make .venv-vllm/.installed` makes the environment, and its Python runs `live_faults.py --engine vllm`. An engine starts
from random weights, gets those of a log in place, as in a training run, and must then score a probe as the model does.
So a fault in a log is the one that was asked for.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from small_model import Responses, first_token, score, stop_tokens
from torch import Tensor, nn
from wide_heads import with_wide_heads

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the models are local folders
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: nothing to start beside it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set unless they have a value already."""

BLOCK = 32
"""Tokens of a block of vLLM's cache, the fewest that it takes on the CPU; it finds whole blocks of a prompt again."""

BATCHED = 16_384
"""Tokens of one forward pass: all prompts of a log. With seeds, vLLM on the CPU fails where it must cut a prompt."""

SMALLEST_HEAD = 32
"""vLLM's attention on the CPU takes heads of this size or more."""

DTYPES = {"vllm_bf16": torch.bfloat16, "vllm_fp32": torch.float32}
NOISE_FLOOR = {torch.bfloat16: 0.5, torch.float32: 5e-4}
"""Largest difference between vLLM and the model on the probe, nats."""

MOST_ENGINES = 4


class VllmSampler:
    """Engines of vLLM, one per precision and rotary base, started when they are first asked for."""

    def __init__(self) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-sampler-")
        self._engines = dict[tuple[str, float], Any]()

    def sample(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        engine: str,
        tokens: int,
        seed: int,
        temperature: float = 1.0,
        cache_model: nn.Module | None = None,
    ) -> Responses:
        """Draw one response per prompt, as `small_model.sample` does.

        Args:
            model: the weights and the rotary base to sample with; a low-rank adapter is merged.
            prompts: token ids, B rows, none empty.
            engine: a name of `DTYPES`.
            tokens: length of the longest response.
            seed: of the draws.
            temperature: divides the logits; the log-probs are those of the divided ones.
            cache_model: a fault: vLLM sees the prompts under these weights first, and keeps its prefix cache when it
                gets those of `model`.

        Raises:
            RuntimeError: vLLM does not compute what the model does, or no prompt was found in the old cache.
        """
        if cache_model is not None:
            self._load(cache_model, engine)
            self._generate(model, prompts, engine=engine, tokens=1, seed=seed, temperature=temperature)
        self._load(model, engine, forget=cache_model is None)

        outputs = self._generate(model, prompts, engine=engine, tokens=tokens, seed=seed, temperature=temperature)
        if cache_model is not None and not any(output.num_cached_tokens for output in outputs):
            raise RuntimeError(f"vLLM found no prompt in its cache: none has {BLOCK + 1} tokens or more")

        completions = [output.outputs[0] for output in outputs]
        return Responses(
            [list(completion.token_ids) for completion in completions],
            [
                [float(found[token].logprob) for token, found in zip(c.token_ids, c.logprobs, strict=True)]
                for c in completions
            ],
        )

    def close(self) -> None:
        """End the engines, and remove the folder of their weights."""
        for key in list(self._engines):
            self._end(key)
        self._folder.cleanup()

    def _generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        engine: str,
        tokens: int,
        seed: int,
        temperature: float,
    ) -> list[Any]:
        from vllm import SamplingParams

        common = {"ignore_eos": True, "stop_token_ids": list(stop_tokens(model)), "detokenize": False}
        parameters = [
            SamplingParams(max_tokens=tokens, temperature=temperature, logprobs=0, seed=1_000 * seed + row, **common)
            for row in range(len(prompts))
        ]
        rows = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs: list[Any] = self._engine(model, engine).generate(rows, parameters, use_tqdm=False)
        return outputs

    def _load(self, model: nn.Module, engine: str, *, forget: bool = True) -> None:
        """Give the engine these weights, and require that it has them."""
        llm, dtype = self._engine(model, engine), DTYPES[engine]
        llm.collective_rpc("rollcorr_reload", args=(str(self._checkpoint(model, engine)),))
        if forget and not llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache")

        probe = torch.randint(
            model.config.vocab_size, (2, 24), generator=torch.Generator("cpu").manual_seed(0), device="cpu"
        ).tolist()
        difference = (self._scored(llm, model, probe) - _scored(model, probe, dtype)).abs().max().item()
        if not difference <= NOISE_FLOOR[dtype]:
            raise RuntimeError(
                f"vLLM and the model differ by {difference:.3g} nats on a probe: a weight did not arrive"
            )

    def _scored(self, llm: Any, model: nn.Module, probe: list[list[int]]) -> Tensor:  # noqa: ANN401 (vllm.LLM)
        from vllm import SamplingParams

        opening = first_token(model)
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        rows = [{"prompt_token_ids": [opening, *ids]} for ids in probe]
        outputs = llm.generate(rows, parameters, use_tqdm=False)
        found = [output.prompt_logprobs[1:] for output in outputs]
        return torch.tensor(
            [
                [at[token].logprob for at, token in zip(row, ids, strict=True)]
                for row, ids in zip(found, probe, strict=True)
            ],
            device="cpu",
        )

    def _engine(self, model: nn.Module, engine: str) -> Any:  # noqa: ANN401 (vllm.LLM)
        key = (engine, rope_theta(model))
        if key not in self._engines:
            if len(self._engines) == MOST_ENGINES:
                self._end(next(iter(self._engines)))
            self._engines[key] = self._started(model, engine)

        # The one that was used last goes last.
        self._engines[key] = self._engines.pop(key)
        return self._engines[key]

    def _started(self, model: nn.Module, engine: str) -> Any:  # noqa: ANN401 (vllm.LLM)
        import vllm

        from rollcorr.engines.vllm.weight_receiver import WORKER_EXTENSION

        return vllm.LLM(
            model=str(self._checkpoint(model, engine)),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=str(DTYPES[engine]).removeprefix("torch."),
            load_format="dummy",  # each weight must come with the first load
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            block_size=BLOCK,
            max_num_batched_tokens=BATCHED,
            max_model_len=model.config.max_position_embeddings,
            enforce_eager=True,
            disable_log_stats=True,
            worker_extension_cls=WORKER_EXTENSION,
        )

    def _end(self, key: tuple[str, float]) -> None:
        self._engines.pop(key).llm_engine.engine_core.shutdown()

    def _checkpoint(self, model: nn.Module, engine: str) -> Path:
        """The model as a folder of `transformers` that vLLM takes."""
        folder = Path(self._folder.name) / engine
        with_wide_heads(model, SMALLEST_HEAD).to(DTYPES[engine]).save_pretrained(folder)
        return folder


@cache
def vllm_sampler() -> VllmSampler:
    """The engines of this process; they end with it."""
    sampler = VllmSampler()
    atexit.register(sampler.close)
    return sampler


def _scored(model: nn.Module, probe: list[list[int]], dtype: torch.dtype) -> Tensor:
    """The probe as the model scores it in a precision."""
    rounded = with_wide_heads(model, SMALLEST_HEAD).to(dtype)
    return torch.tensor(score(rounded, [[first_token(model)]] * len(probe), probe), device="cpu")


def rope_theta(model: nn.Module) -> float:
    """The base of a model's rotary embedding."""
    parameters = getattr(model.config, "rope_parameters", None) or {"rope_theta": model.config.rope_theta}
    return float(parameters["rope_theta"])
