"""Worker program that runs vLLM for `VllmEngine`: `python -m rollcorr.engines.vllm.worker_program`.

`rollcorr.engines.transport.pipes` describes the protocol.

It runs one offline `vllm.LLM` and answers these requests:

- `start`, with the `engine_args` of `vllm.LLM` and the policy's `version`: vLLM's `version` and `max_model_len`
- `reload`, with a `folder` of safetensors and the policy's `version`: an empty answer
- `generate`, with `prompts`, `parameters` of `vllm.SamplingParams` and one of `seeds` per prompt: `completions`, in the
  format of `rollcorr.engines.vllm.answers.completion`
- `score`, with `rows` of token ids and a `temperature`: `log_probs` of each row's tokens after the first

vLLM prints to the standard output as well, so answers go to a private copy of its descriptor. The program ends as soon
as its input does, even during a computation, and kills the processes that vLLM has started.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

# Environment variables that are set unless they have a value already.
DEFAULTS = {
    "HF_HUB_OFFLINE": "1",  # the model is a local folder
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this already is a separate process
    "VLLM_NO_USAGE_STATS": "1",
}


class Worker:
    """Request handlers: each method accepts the JSON fields of a request and returns its answer."""

    llm: Any = None

    def start(self, engine_args: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Start vLLM."""
        import vllm

        self.llm = vllm.LLM(**engine_args)

        # Answers then contain the version of each token.
        self.llm.update_weight_version(str(version))
        config = self.llm.llm_engine.model_config
        return {"version": vllm.__version__, "max_model_len": config.max_model_len}

    def reload(self, folder: str, version: int) -> dict[str, Any]:
        """Load new weights, clear caches of the old ones, and set the version."""
        self.llm.collective_rpc("rollcorr_reload", args=(folder,))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, whose entries are of the old weights: requests still run")
        self.llm.update_weight_version(str(version))
        return {}

    def generate(
        self, prompts: Sequence[Sequence[int]], parameters: Mapping[str, Any], seeds: Sequence[int]
    ) -> dict[str, Any]:
        """Sample a response to each prompt."""
        from vllm import SamplingParams

        # JSON converted the ids to strings.
        biases = {int(token): bias for token, bias in parameters.get("logit_bias", {}).items()} or None
        sampling = [SamplingParams(**{**parameters, "logit_bias": biases, "seed": seed}) for seed in seeds]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return {"completions": [plain_completion(output.outputs[0]) for output in outputs]}

    def score(self, rows: Sequence[Sequence[int]], temperature: float) -> dict[str, Any]:
        """Compute full-vocabulary log-probs of each row's tokens after the first at `temperature`."""
        from vllm import SamplingParams

        # Any other temperature needs the log-prob of every token, to normalize again.
        wanted = 0 if temperature == 1 else -1
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=wanted, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
        return {
            "log_probs": [
                tempered(output.prompt_logprobs, row, temperature) for output, row in zip(outputs, rows, strict=True)
            ]
        }


def plain_completion(output: Any) -> dict[str, Any]:  # noqa: ANN401 (vllm.CompletionOutput)
    """Convert a completion of vLLM to the format of `/inference/v1/generate`."""
    content = [
        {
            "token_id": token,
            "logprob": found[token].logprob,
            "top_logprobs": [{"token_id": other, "logprob": entry.logprob} for other, entry in found.items()],
        }
        for token, found in zip(output.token_ids, output.logprobs or (), strict=False)
    ]

    # Older releases report neither field.
    mask, spans = getattr(output, "sampling_mask", None), getattr(output, "weight_versions", None)
    return {
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "logprobs": {"content": content},
        "sampling_mask": None if mask is None else [list(map(int, ids)) for ids in mask.token_ids],
        "weight_versions": spans and [{"version": s.version, "start": s.start, "end": s.end} for s in spans],
    }


def tempered(found_at: Sequence[Any], row: Sequence[int], temperature: float) -> list[float]:
    """Compute log softmax(log p / τ)[y] of each token but the first; at τ = 1 the log-probs themselves.

    Args:
        found_at: for each token a mapping from ids to entries with a `logprob`; None for the first token.
        row: the tokens.
        temperature: τ.
    """
    scores = []
    for token, found in zip(row[1:], found_at[1:], strict=True):
        log_prob = found[token].logprob / temperature
        if temperature != 1:
            log_prob -= math.log(math.fsum(math.exp(entry.logprob / temperature) for entry in found.values()))
        scores.append(log_prob)
    return scores


def main() -> None:
    """Reserve the standard streams for the protocol, and answer requests until the process ends."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)

    # Other reads and prints of vLLM must not touch the protocol's streams.
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    questions: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in asked:
            questions.put(line)
        os.killpg(0, signal.SIGKILL)  # the engine has exited, so discard any running computation

    threading.Thread(target=read, daemon=True).start()
    worker = Worker()
    while True:
        question = json.loads(questions.get())
        number, what = question.pop("id"), question.pop("do")
        try:
            answer = getattr(worker, what)(**question)
        except Exception as error:  # the engine receives any error of vLLM
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": number, **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
