"""Time `rollcorr confirm`, and score it: a real small model, one live fault for each kind of variant, and none.

    python benchmarks/confirm.py [--rows 8] [--tokens 128]
    python benchmarks/confirm.py --live 3       # logs of each fault of experiments/diagnosis/live_faults.py instead

The model is stories260K, a small pretrained Llama (vocabulary 512). The sampler computes in bfloat16, the trainer in
float32. Faults lie in what the sampler does, in the prompt that it is given, or in how the trainer scores. The model
has no tokenizer, so the chat template is that of a tokenizer whose words are the ids. For each case this prints the
verdict, the share of the excess that the named variant removes, the next best share, and the processor time of all
variants of all rows in one thread. Logs of live faults are of seed 9101, each with the weights of its trainer.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "experiments" / "diagnosis")]

import live_faults  # noqa: E402
from small_model import load_model  # noqa: E402
from stories import load_stories  # noqa: E402

from rollcorr.config import SamplingSpec  # noqa: E402
from rollcorr.confirm import confirm  # noqa: E402
from rollcorr.engines import GenerationSettings, TransformersEngine, measure_null, score_responses  # noqa: E402
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter  # noqa: E402

BOS = 1
OPEN, CLOSE = (300, 301), (302,)
"""Ids before and after the text of the chat template."""
EVALUATED = "trainer: evaluation mode, one row at a time"
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
    "chat template": lambda prompts: [[BOS, *OPEN, *prompt[1:], *CLOSE] for prompt in prompts],
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


def tokenizer_of_ids():
    """A tokenizer whose words are ids, with BOS and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{n}>": n for n in range(512)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<1> $A", special_tokens=[("<1>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<1>", unk_token="<0>")
    before, after = (" ".join(f"<{n}>" for n in ids) for ids in ((BOS, *OPEN), CLOSE))
    tokenizer.chat_template = f"{before} {{{{ messages[0]['content'] }}}} {after}"
    return tokenizer


def expected_cause(case):
    """The cause that `confirm` must name; None for none."""
    # Rounding the log-softmax changes this model less than the bfloat16 sampler differs.
    if case in ("none", "bfloat16 log-softmax"):
        return None
    if case == "dropout":
        return EVALUATED
    # The log records the temperature of both sides, and the trainer scores without it.
    return {"temperature 0.8": "trainer: temperature 1"}.get(
        case, f"{'trainer' if case in SCORES else 'sampler'}: {case}"
    )


def planted_cases(arguments, folder):
    """Yield the name, the log, the model and the expected cause of each case of this file."""
    model = load_stories()
    draw = np.random.default_rng(0)
    prompts = [[BOS, *draw.integers(259, 512, size=3).tolist()] for _ in range(4 * arguments.rows)]
    for name in ("none", *SAMPLERS, *CONTEXTS, *SCORES):
        sampling = SamplingSpec(**{"logprobs": "processed", **SAMPLERS.get(name, {})})
        settings = GenerationSettings(
            max_new_tokens=arguments.tokens, pad_token_id=0, eos_token_id=0, sampling=sampling
        )
        log = folder / f"{name}.parquet"
        with RolloutLogWriter(log) as writer:
            writer.write(RolloutBatch.from_rows(list(rows_of(model, prompts, settings, name))))
        yield name, log, model, expected_cause(name)


def live_cases(arguments, folder):
    """Yield the same of each live fault. Of these, BOS, and passes of the trainer, have a variant."""
    model = load_model()
    run, null = live_faults.Run(model, seed=9101), defaultdict(lambda: SimpleNamespace(k3=math.nan))
    for fault in live_faults.faults_of("model"):
        (folder / fault).mkdir()
        for number in range(arguments.live):
            entry = live_faults.write_fault(folder, run, fault, number, null, sampler="model")
            case = live_faults.FAULTS[fault](run, number, entry.engine)
            at_trainer = fault == "dropout" or entry.detail.startswith("trainer")
            cause = {"no_bos": "sampler: BOS"}.get(fault, EVALUATED if at_trainer else None)
            yield f"{entry.path} {entry.engine}", folder / entry.path, case.trainer, cause


def main() -> None:
    """Print a line per case; exit with 1 if a verdict is wrong, or removes less than 90 % or than another variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows to score (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response (default 128)")
    parser.add_argument("--live", type=int, metavar="N", help="score N logs of each live fault")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    print(f"{'case':34s} {'CPU s':>6s} {'removed':>8s} {'next':>6s}  verdict")
    named = right = cases = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, log, model, cause in (live_cases if arguments.live else planted_cases)(arguments, Path(folder)):
            start = time.process_time()
            result = confirm(log, model, tokenizer=tokenizer_of_ids(), rows=arguments.rows)
            seconds = time.process_time() - start

            # The named variant is first, or the plain scores of the trainer.
            shares = next((dict(side.removed) for side in result.sides.values() if side.removed), {})
            best = shares.pop("plain" if result.cause == EVALUATED else next(iter(shares), None), math.nan)
            others = max(shares.values(), default=math.nan)
            cases += 1
            named += result.cause is not None
            right += result.cause == cause and (cause is None or (best >= 0.9 and best >= others))
            best, others = ("" if math.isnan(share) else f"{share:.1%}" for share in (best, others))
            print(f"{name:34s} {seconds:6.1f} {best:>8s} {others:>6s}  {result.verdict}", flush=True)
    print(f"{right} of {cases} right, {named} named")
    raise SystemExit(int(right < cases))


if __name__ == "__main__":
    main()
