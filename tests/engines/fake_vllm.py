"""A stand-in for the package `vllm`: its calls, answered by transformers. With the flaws that the engine must fix.

`as_package` makes it importable by the real name in another process; `served` is the server around it.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from rollcorr.core.sampling import min_p_support, sequential_support, top_k_support, top_p_support
from rollcorr.engines.vllm.weight_receiver import WeightReloader

__version__ = "0.32.0+fake"


class SamplingParams(SimpleNamespace):
    """Record the arguments."""


class PackedHead:
    """Mimic vLLM's head on the CPU, which computes with a copy made by `process_weights_after_loading`."""

    def __init__(self, head):
        self.quant_method = self
        self.head = head
        head.quant_method, head.tie_weights, head.cpu_linear = self, None, None
        head.forward = lambda hidden: nn.functional.linear(hidden, self.packed)
        self.process_weights_after_loading(head)

    def process_weights_after_loading(self, head):
        self.packed = head.weight.detach().clone()


class Worker(WeightReloader):
    """The part of vLLM's worker that the extension builds on."""

    def __init__(self, model):
        self.model = model

    def get_model(self):
        return self.model

    def reload_weights(self, *, weights_iterator):
        missing, unknown = self.model.load_state_dict(dict(weights_iterator), strict=False)
        assert not unknown
        assert set(missing) <= {"lm_head.weight"}


class LLM:
    """vLLM's offline engine."""

    def __init__(self, *, model, dtype, load_format, logprobs_mode, worker_extension_cls, max_model_len=64, **others):
        from transformers import AutoConfig, AutoModelForCausalLM

        assert others["skip_tokenizer_init"]
        assert others["generation_config"] == "vllm"
        dtype = getattr(torch, dtype)
        if load_format == "dummy":
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).to(dtype)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.uniform_(-1e-3, 1e-3)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        PackedHead(self.model.lm_head)
        self.worker = Worker(self.model)
        self.processed = logprobs_mode == "processed_logprobs"
        self.version = "default"
        config = SimpleNamespace(max_model_len=max_model_len)
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(model_config=config, engine_core=core)

    def collective_rpc(self, method, args=()):
        return [getattr(self.worker, method)(*args)]

    def reset_prefix_cache(self):
        return True

    def update_weight_version(self, version):
        self.version = version

    def generate(self, prompts, sampling, use_tqdm=True):
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        sampling = sampling if isinstance(sampling, list) else [sampling] * len(rows)
        too_long = [len(row) for row in rows if len(row) >= self.llm_engine.model_config.max_model_len]
        if too_long:
            raise ValueError(f"a prompt of {too_long[0]} tokens is longer than the maximum model length")
        outputs = [None] * len(rows)
        for length in sorted({len(row) for row in rows}):
            which = [i for i, row in enumerate(rows) if len(row) == length]
            for i, output in zip(
                which, self._generate([rows[i] for i in which], [sampling[i] for i in which]), strict=True
            ):
                outputs[i] = output
        return outputs

    @torch.no_grad()
    def _logits(self, ids):
        return self.model(input_ids=ids).logits.float()

    def _generate(self, rows, sampling):
        common, ids = sampling[0], torch.tensor(rows)
        generators = [torch.Generator().manual_seed(s.seed) if hasattr(s, "seed") else None for s in sampling]
        prompt_logprobs = [None] * len(rows)
        if hasattr(common, "prompt_logprobs"):
            told = self._logits(ids).log_softmax(-1)
            prompt_logprobs = [_prompt_logprobs(row, table, common) for row, table in zip(rows, told, strict=True)]
        tokens, logprobs = [[] for _ in rows], [[] for _ in rows]
        for _ in range(common.max_tokens):
            logits = self._logits(ids)[:, -1]
            scaled, support = _processed(logits, common)
            drawn_from = scaled.masked_fill(~support, -math.inf).log_softmax(-1)
            told = drawn_from if self.processed else logits.log_softmax(-1)
            step = [_draw(row, generator) for row, generator in zip(drawn_from, generators, strict=True)]
            for i, token in enumerate(step):
                if tokens[i] and tokens[i][-1] in getattr(common, "stop_token_ids", ()):
                    continue
                tokens[i].append(token)
                logprobs[i].append(_top(told[i], token, getattr(common, "logprobs", 0)))
            ids = torch.cat([ids, torch.tensor(step)[:, None]], dim=1)
        return [
            SimpleNamespace(
                prompt_logprobs=prompt_logprobs[i],
                outputs=[
                    SimpleNamespace(
                        token_ids=tokens[i],
                        logprobs=logprobs[i],
                        finish_reason="stop" if len(tokens[i]) < common.max_tokens else "length",
                        sampling_mask=None,
                        weight_versions=[SimpleNamespace(version=self.version, start=0, end=len(tokens[i]))],
                    )
                ],
            )
            for i in range(len(rows))
        ]


def _processed(logits, sampling):
    filters = []
    if getattr(sampling, "min_p", 0) > 0:
        filters.append(lambda z: min_p_support(z, sampling.min_p))
    if getattr(sampling, "top_k", 0) > 0:
        filters.append(lambda z: top_k_support(z, sampling.top_k))
    if getattr(sampling, "top_p", 1) < 1:
        filters.append(lambda z: top_p_support(z, sampling.top_p))
    scaled = logits / getattr(sampling, "temperature", 1.0)
    return scaled, sequential_support(scaled, filters)


def _draw(log_probs, generator):
    return int(torch.multinomial(log_probs.exp(), 1, generator=generator))


def _top(log_probs, token, count):
    """Return the sampled token first, then the likeliest, in vLLM's order."""
    ids = dict.fromkeys([token, *(log_probs.topk(count).indices.tolist() if count else [])])
    return {i: SimpleNamespace(logprob=float(log_probs[i])) for i in ids}


def _prompt_logprobs(row, table, sampling):
    every = range(table.shape[1]) if sampling.prompt_logprobs == -1 else None
    return [None] + [
        {i: SimpleNamespace(logprob=float(table[t, i])) for i in (every or [token])} for t, token in enumerate(row[1:])
    ]


def served(llm):
    """The answers of vLLM's server as a function of (path, body): the status and the JSON."""
    from rollcorr.engines.vllm.worker_program import plain_completion

    def answer(path, body):
        path = path.partition("?")[0]
        if path == "/openapi.json":
            return 200, {"paths": dict.fromkeys(answer.paths)}
        if path not in answer.paths:
            return 404, {"detail": "Not Found"}
        if path == "/version":
            return 200, {"version": __version__}
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "max_model_len": llm.llm_engine.model_config.max_model_len}]}
        if path == "/collective_rpc":
            llm.collective_rpc(body["method"], body["args"])
            return 200, {"results": [None]}
        if path == "/update_weight_version":
            llm.update_weight_version(body["new_version"])
            return 200, {"success": True}
        if path == "/reset_prefix_cache":
            return 200, {"success": llm.reset_prefix_cache()}
        if path in ("/pause", "/resume"):
            answer.is_paused = path == "/pause"
            return 200, {"status": path}
        if answer.is_paused:  # the real one lets the request wait until it is resumed
            return 400, {"error": {"message": "a request while the server is paused never ends", "code": 400}}
        return _sample(llm, plain_completion, path, dict(body), answer.max_logprobs)

    answer.paths = ["/version", "/v1/models", "/v1/completions", "/inference/v1/generate"]
    answer.paths += ["/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    answer.max_logprobs = 64
    answer.is_paused = False
    return answer


def _sample(llm, plain_completion, path, body, max_logprobs):
    assert body.pop("model") == "tiny"
    in_tokens = path == "/inference/v1/generate"
    prompt = body.pop("token_ids" if in_tokens else "prompt")
    fields = body["sampling_params"] if in_tokens else body
    if fields.get("logprobs", 0) > max_logprobs:
        text = f"Requested sample logprobs of {fields['logprobs']}, which is greater than max allowed: {max_logprobs}"
        return 400, {"error": {"message": text, "code": 400}}
    output = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(**fields))[0]
    choice = json.loads(json.dumps(plain_completion(output.outputs[0])).replace("-Infinity", "-9999.0"))
    if in_tokens:
        return 200, {"choices": [{"index": 0, **choice}]}
    content = choice["logprobs"]["content"]
    told = {
        "tokens": [f"token_id:{entry['token_id']}" for entry in content],
        "token_logprobs": [entry["logprob"] for entry in content],
        "top_logprobs": [{f"token_id:{e['token_id']}": e["logprob"] for e in x["top_logprobs"]} for x in content],
    }
    scored = output.prompt_logprobs and [
        found and {str(i): {"logprob": entry.logprob} for i, entry in found.items()} for found in output.prompt_logprobs
    ]
    text = {"index": 0, "token_ids": choice["token_ids"], "finish_reason": choice["finish_reason"], "logprobs": told}
    return 200, {"choices": [{**text, "prompt_logprobs": scored}]}


def as_package(folder):
    """Write this module as package `vllm` into `folder`, for the PYTHONPATH of a second interpreter."""
    Path(folder, "vllm.py").write_text("from fake_vllm import *\nfrom fake_vllm import __version__\n")
    return f"{folder}:{Path(__file__).parent}"
