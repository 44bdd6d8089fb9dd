"""The program that runs vLLM for `VllmEngine`: `python -m rollcorr.engines.vllm.worker_program`.

`rollcorr.engines.transport.pipes` describes how it is asked.

It holds one offline `vllm.LLM` and answers:

- `start`, with the `engine_args` of `vllm.LLM` and the policy's `version`: vLLM's `version` and `max_model_len`
- `reload`, with a `folder` of safetensors and the policy's `version`: nothing
- `generate`, with `prompts`, `parameters` of `vllm.SamplingParams` and one of `seeds` per prompt: `completions`, in the
  form that `rollcorr.engines.vllm.answers.completion` reads
- `score`, with `rows` of token ids and a `temperature`: `log_probs` of each token but the first of a row

vLLM prints to the standard output as well, so answers go to a copy of its descriptor that nothing else writes to. The
program ends as soon as its input does, whatever it is doing, and takes along the processes that vLLM has started.
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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this is a process of its own already
    "VLLM_NO_USAGE_STATS": "1",
}


class Worker:
    """The questions: each is a method that takes the values and returns the answer."""

    llm: Any = None

    def start(self, engine_args: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Start vLLM."""
        import vllm

        self.llm = vllm.LLM(**engine_args)

        # Answers then name the version of each token.
        self.llm.update_weight_version(str(version))
        config = self.llm.llm_engine.model_config
        return {"version": vllm.__version__, "max_model_len": config.max_model_len}

    def reload(self, folder: str, version: int) -> dict[str, Any]:
        """Load other weights, forget what was cached under the old ones, and name the version."""
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

        # JSON made the ids into text.
        biases = {int(token): bias for token, bias in parameters.get("logit_bias", {}).items()} or None
        sampling = [SamplingParams(**{**parameters, "logit_bias": biases, "seed": seed}) for seed in seeds]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return {"completions": [plain_completion(output.outputs[0]) for output in outputs]}

    def score(self, rows: Sequence[Sequence[int]], temperature: float) -> dict[str, Any]:
        """Log-probs of the tokens of each row after its first, over the whole vocabulary at `temperature`."""
        from vllm import SamplingParams

        # Another temperature needs the log-prob of every token, to normalize again.
        wanted = 0 if temperature == 1 else -1
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=wanted, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
        return {
            "log_probs": [
                tempered(output.prompt_logprobs, row, temperature) for output, row in zip(outputs, rows, strict=True)
            ]
        }


def plain_completion(output: Any) -> dict[str, Any]:  # noqa: ANN401 (vllm.CompletionOutput)
    """A completion of vLLM in the form in which `/inference/v1/generate` sends one."""
    content = [
        {
            "token_id": token,
            "logprob": found[token].logprob,
            "top_logprobs": [{"token_id": other, "logprob": entry.logprob} for other, entry in found.items()],
        }
        for token, found in zip(output.token_ids, output.logprobs or (), strict=False)
    ]

    # Older releases report neither.
    mask, spans = getattr(output, "sampling_mask", None), getattr(output, "weight_versions", None)
    return {
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "logprobs": {"content": content},
        "sampling_mask": None if mask is None else [list(map(int, ids)) for ids in mask.token_ids],
        "weight_versions": spans and [{"version": s.version, "start": s.start, "end": s.end} for s in spans],
    }


def tempered(found_at: Sequence[Any], row: Sequence[int], temperature: float) -> list[float]:
    """log softmax(log p / τ)[y] of each token but the first; at τ = 1 the log-probs themselves.

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
    """Keep the standard streams for the questions and answers, and answer until the process ends."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)

    # Whatever vLLM reads or prints must not touch the questions and answers.
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    questions: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in asked:
            questions.put(line)
        os.killpg(0, signal.SIGKILL)  # the engine is gone, and nobody waits for what vLLM may be computing

    threading.Thread(target=read, daemon=True).start()
    worker = Worker()
    while True:
        question = json.loads(questions.get())
        number, what = question.pop("id"), question.pop("do")
        try:
            answer = getattr(worker, what)(**question)
        except Exception as error:  # the other side reads whatever vLLM raises
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": number, **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
