"""Time `rollcorr confirm`, and score it: a real small model, one live fault for each kind of variant, and none.

    python benchmarks/confirm.py [--rows 8] [--tokens 128]

The model is stories260K, a small pretrained Llama (vocabulary 512). The sampler computes in bfloat16, the trainer in
float32. Faults lie in what the sampler does, in the prompt that it is given, or in how the trainer scores. The chat
template is left out, because this model has no tokenizer. For each case this prints the verdict, the share of the
excess that the named variant removes, and the processor time of all variants of all rows in one thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from stories import load_stories  # noqa: E402

from rollcorr.config import SamplingSpec  # noqa: E402
from rollcorr.confirm import confirm  # noqa: E402
from rollcorr.engines import GenerationSettings, TransformersEngine, measure_null, score_responses  # noqa: E402
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter  # noqa: E402

BOS = 1
SAMPLERS = {
    "temperature 0.8": {"temperature": 0.8},
    "repetition penalty 1.1": {"repetition_penalty": 1.1},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 20": {"top_k": 20},
}
"""Case → settings of the sampler."""
CONTEXTS = {
    "BOS": lambda prompts: [prompt[1:] for prompt in prompts],
    "previous row's prompt": lambda prompts: [prompts[-1], *prompts[:-1]],
    "next row's prompt": lambda prompts: [*prompts[1:], prompts[0]],
    "first row's prompt": lambda prompts: [prompts[0]] * len(prompts),
}
"""Case → prompts that the sampler is given."""
SCORES = {
    "logits not shifted": lambda logits: logits.roll(-1, 0),
    "log-probs one token late": lambda logits: logits,
    "bfloat16 log-softmax": lambda logits: logits.bfloat16().log_softmax(-1),
    "dropout": lambda logits: logits,
}
"""Case → logits that the trainer takes the log-softmax of."""


def log_probs_of(model, prompt, response, case):
    """Log π of a response as a trainer with a fault scores it."""
    model.train(case == "dropout")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    model.eval()
    ids = torch.tensor(response)
    values = SCORES.get(case, lambda logits: logits)(logits).log_softmax(-1).gather(-1, ids[:, None])[:, 0].float()
    return (values.roll(1) if case == "log-probs one token late" else values).tolist()


def rows_of(model, prompts, settings, case):
    """Rows that an engine samples and the trainer scores, with the fault of a case."""
    fed = CONTEXTS.get(case, list)(prompts)
    engine = TransformersEngine(model, settings)
    batch = measure_null(engine, fed, seed=1, score=lambda rollout: score_responses(model, rollout.tokens).log_prob)
    for prompt, row in zip(prompts, batch.to_rows(), strict=True):
        scores = log_probs_of(model, prompt, row["response_ids"], case)
        yield {**row, "prompt_ids": prompt, "old_log_prob": scores}


def expected_cause(case):
    """The cause that `confirm` must name; None for none."""
    # Dropout is no variant, and rounding the log-softmax changes this model less than the bfloat16 sampler differs.
    if case in ("none", "dropout", "bfloat16 log-softmax"):
        return None
    # The log records the temperature of both sides, and the trainer scores without it.
    return {"temperature 0.8": "trainer: temperature 1"}.get(
        case, f"{'trainer' if case in SCORES else 'sampler'}: {case}"
    )


def main() -> None:
    """Print a line per case; exit with 1 if a verdict is wrong, or removes less than 90 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows to score (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response (default 128)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_stories()
    draw = np.random.default_rng(0)
    prompts = [[BOS, *draw.integers(259, 512, size=3).tolist()] for _ in range(4 * arguments.rows)]

    print(f"{'sampler':24s} {'CPU s':>6s} {'removed':>8s}  verdict")
    wrong = 0
    for name in ("none", *SAMPLERS, *CONTEXTS, *SCORES):
        sampling = SamplingSpec(**{"logprobs": "processed", **SAMPLERS.get(name, {})})
        settings = GenerationSettings(
            max_new_tokens=arguments.tokens, pad_token_id=0, eos_token_id=0, sampling=sampling
        )
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log.parquet"
            with RolloutLogWriter(log) as writer:
                writer.write(RolloutBatch.from_rows(list(rows_of(model, prompts, settings, name))))
            start = time.process_time()
            result = confirm(log, model, rows=arguments.rows)
            seconds = time.process_time() - start
        best = next((share for side in result.sides.values() for share in side.removed.values()), None)

        wrong += result.cause != expected_cause(name) or (name == "dropout") != ("evaluation mode" in result.verdict)
        wrong += result.cause is not None and not best >= 0.9
        print(f"{name:24s} {seconds:6.1f} {'' if best is None else f'{best:.1%}':>8s}  {result.verdict}")
    raise SystemExit(int(wrong > 0))


if __name__ == "__main__":
    main()
