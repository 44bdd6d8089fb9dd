"""CTranslate2 engine: samples in process in C++, with int8 or int16 weights.

The policy is converted from the live module and sampled on a CPU by kernels that share no code with torch. So the
mismatch between sampler and trainer is real: different code, rounding and summation order.

CTranslate2 returns log softmax(logits) at temperature 1 over the full vocabulary, for any sampling settings: "raw".
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rollcorr.config.checks import check_choice, check_integer
from rollcorr.engines.base import (
    Engine,
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    GenerationSettings,
    Rollout,
    TokenBatch,
    check_prompts,
    check_weight_sync,
    refuse_settings,
)
from rollcorr.engines.completions import Completion, rollout_from_completions
from rollcorr.engines.gathered_policy import gather_policy
from rollcorr.engines.response_scoring import copied_model, make_probe, score_probe, vocabulary_size

ComputeType = Literal["int8", "int16", "float32"]
COMPUTE_TYPES = ("int8", "int16", "float32")

# Largest value of `weight_bits`.
MOST_BITS = 8

# Tolerance, in nats, between the float32 sampler and the float32 policy on the probe.
SYNC_TOLERANCE = 1e-4

# CTranslate2 treats this seed as a request for a random one.
UNSEEDED = 0xFFFFFFFF

# Sampling settings that CTranslate2 lacks, or includes in its raw log-probs.
NOT_SUPPORTED = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
)
_SEED_LOCK = threading.Lock()  # CTranslate2 has one seed for the process


class CTranslate2Engine(Engine):
    """Engine that samples with CTranslate2 from a converted copy of `model`.

    The engine keeps the converted model as float32 bytes. Every call of `generate` loads them again in `compute_type`
    (4 to 40 ms for a million parameters), because a sampler of CTranslate2 reads its seed only once. The library has
    one seed per process, so the draws of a row depend on its batch.

    Args:
        model: a causal language model of `transformers` that CTranslate2 can convert (Llama, Qwen3, …); it is copied,
            never changed.
        settings: sampling settings. Temperature, top-k and top-p change the choice and not the log-probs;
            `check_compatible` checks whether raw log-probs fit them. A setting in `NOT_SUPPORTED` raises.
        version: policy version of `model`.
        compute_type: precision of the weights and of the products with them.
        weight_bits: bits, 2 to 8, to round the weight matrices to before the conversion, see `rounded_to_bits`: a
            larger mismatch than from `compute_type`, for experiments; optional. Defaults to no rounding.
        batch_size: rows per batch of sampling or scoring; optional. Defaults to all rows.
        threads: threads of one generation; 0 uses the default of CTranslate2.

    Raises:
        ImportError: ctranslate2 is not installed.
        TypeError: a number has an invalid type.
        ValueError: a setting is out of range or unsupported, or this kind of model cannot be converted.
        WeightSyncError: the converted model's log-probs differ from the policy's.
    """

    row_seeds = False

    def __init__(
        self,
        model: nn.Module,
        settings: GenerationSettings,
        *,
        version: int = 0,
        compute_type: ComputeType = "int8",
        weight_bits: int | None = None,
        batch_size: int | None = None,
        threads: int = 0,
    ) -> None:
        check_choice("compute_type", compute_type, COMPUTE_TYPES)
        if weight_bits not in (None, *range(2, MOST_BITS + 1)):
            raise ValueError(f"weight_bits must be 2 to {MOST_BITS}, or None for no rounding; got {weight_bits!r}")
        if batch_size is not None:
            check_integer("batch_size (None for all)", batch_size, at_least=1)
        if settings.sampling.logprobs != "raw":
            raise ValueError(
                f"logprobs={settings.sampling.logprobs!r}: the ctranslate2 engine returns raw log-probs only; set "
                "logprobs='raw' (at temperature 1 without truncation they are the same)"
            )
        refuse_settings(
            settings.sampling,
            NOT_SUPPORTED,
            "the ctranslate2 engine, which lacks it or would count it in log-probs called raw",
        )

        # Import late: the package is an optional dependency.
        try:
            import ctranslate2
        except ImportError as error:
            raise ImportError(
                "the ctranslate2 engine needs ctranslate2: pip install 'rollcorr[ctranslate2]'"
            ) from error
        self._package: Any = ctranslate2

        self.settings = settings
        self.sampling = dataclasses.replace(
            settings.sampling, engine="ctranslate2", engine_version=self._package.__version__, policy_version=version
        )
        self.compute_type = compute_type
        self.weight_bits = weight_bits
        self.batch_size = batch_size
        self.threads = check_integer("threads", threads, at_least=0)
        self.vocabulary_size = vocabulary_size(model)
        self.device = next(model.parameters()).device

        self._probe = make_probe(model)
        self._files: dict[str, bytes] = {}
        self.update_weights(model, version=version)

    def generate(self, prompts: Sequence[Sequence[int]], *, seed: int, first_row: int = 0) -> Rollout:
        """Sample one response per prompt. Sets CTranslate2's own seed and keeps torch's random state.

        Each batch contains prompts of one length. In a mixed batch CTranslate2 feeds the longer prompts token by token,
        and if the shortest has a single token, it returns those tokens as if it had drawn them (4.8.5).

        Args:
            prompts: token ids of B non-empty prompts. The engine adds no token in front of them.
            seed: random seed; its sum with `first_row` is taken modulo 2³² − 1, the range of CTranslate2's seed.
            first_row: index of the first prompt in the global batch.

        Raises:
            ValueError: a prompt is empty, or has an id outside the vocabulary.
            EngineUnavailableError: CTranslate2 failed.
            EngineAnswerError: a returned value is not a log-prob.
        """
        check_prompts(prompts, vocabulary_size=self.vocabulary_size)

        # A sampler reads the seed when it is loaded, so seed and load need a common lock.
        completions: dict[int, Completion] = {}
        with _SEED_LOCK, _translate_exceptions():
            self._package.set_random_seed((seed + first_row) % UNSEEDED)
            self._generator = self._load(self.compute_type, self._files)
            for rows in _rows_by_length(prompts, self.batch_size or len(prompts)):
                completions |= zip(rows, self._sample([prompts[row] for row in rows]), strict=True)

        return rollout_from_completions(
            prompts,
            [completions[row] for row in range(len(prompts))],
            sampling=self.sampling,
            pad_token_id=self.settings.pad_token_id,
            vocabulary_size=self.vocabulary_size,
            device=self.device,
        )

    def score(self, tokens: TokenBatch) -> Tensor:
        """Compute log-probs of response tokens in this engine's precision, at the sampling temperature, (B, T) float32.

        Needs memory for the logits of `batch_size` rows. Positions outside the response mask are 0.

        Raises:
            EngineUnavailableError: CTranslate2 failed.
        """
        return self._score(self._generator, tokens, self.sampling.temperature)

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Convert the weights of `model` and verify them on a probe batch.

        The converted bytes are loaded in float32 and compared with `model` in float32: the rounding of int8, 0.1 to
        0.7 nats on a probe, would hide a stale parameter. The sampler then loads the same bytes.

        Raises:
            WeightSyncError: the log-probs differ; the engine keeps its previous weights and version.
        """
        model = gather_policy(model, device="cpu")
        copy = self._copy_to_cpu(model)
        files = self._convert_model(copy)
        expected = score_probe(model, self._probe, dtype=torch.float32, rounding=self._round_weight)
        with _translate_exceptions():
            exact = self._load("float32", files)
            got = self._score(exact, self._probe.to("cpu"), 1.0)
            check_weight_sync(got, expected.to("cpu"), tolerance=SYNC_TOLERANCE)
            self._generator = exact if self.compute_type == "float32" else self._load(self.compute_type, files)

        # The update is complete only here; a failure above leaves the previous weights in place.
        self._model, self._files = copy, files
        self.sampling = dataclasses.replace(self.sampling, policy_version=version)

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return the current parameters by name, float32 on the CPU, before any rounding; tied ones once."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore weights from `export_weights`, and verify them as in `update_weights`.

        Args:
            weights: name → parameter, each in the shape that it has in the model.
            version: version of these weights, recorded in rollouts.
        """
        # The current model stays unchanged until the new weights are verified.
        model = self._copy_to_cpu(self._model)
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        self.update_weights(model, version=version)

    def _copy_to_cpu(self, model: nn.Module) -> nn.Module:
        """Copy the model to the CPU with float32 parameters, for any dtype and device of the policy."""
        return _copy_with_weights(model, lambda p: p.detach().to("cpu", torch.float32, copy=True)).to("cpu").eval()

    def _round_weight(self, weight: Tensor) -> Tensor:
        return weight if self.weight_bits is None else rounded_to_bits(weight, self.weight_bits)

    def _convert_model(self, model: Any) -> dict[str, bytes]:  # noqa: ANN401 (a transformers model)
        """Return the files of a CTranslate2 model directory, float32, by name.

        Each token's name is its number. So the result does not depend on a tokenizer, and the conversion renames no id.
        """
        from ctranslate2.converters import TransformersConverter

        end = str(self.settings.eos_token_id)
        names = SimpleNamespace(
            bos_token=end,
            eos_token=end,
            unk_token=end,
            pad_token=end,
            get_vocab=lambda: {str(token): token for token in range(self.vocabulary_size)},
        )

        # The converter modifies the module, so it gets a separate module with the same tensors.
        shell = _copy_with_weights(model, lambda p: self._round_weight(p.detach()))
        with tempfile.TemporaryDirectory(prefix="rollcorr-ctranslate2-") as directory, _freeze_older_objects():
            model.config.save_pretrained(directory)

            # The module is in memory, so the converter reads only its configuration from a directory.
            converter = TransformersConverter(directory)
            converter.load_model = lambda *_, **__: shell
            converter.load_tokenizer = lambda *_, **__: names
            output = Path(converter.convert(str(Path(directory) / "converted")))
            return {path.name: path.read_bytes() for path in output.iterdir()}

    def _load(self, compute_type: str, files: dict[str, bytes]) -> Any:  # noqa: ANN401 (lazy package)
        return self._package.Generator(
            "policy",
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,  # with a second worker the draws would depend on thread timing
            intra_threads=self.threads,
            files=files,
        )

    def _sample(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """Return one completion per prompt; the step callback and the final answer must agree."""
        reported: list[list[tuple[int, float | None]]] = [[] for _ in prompts]

        def listen(step: Any) -> bool:  # noqa: ANN401 (lazy package)
            reported[step.batch_id].append((step.token_id, step.log_prob))
            return False

        # The final answer has one score per response; only the callback reports one per token.
        results = self._generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            include_prompt_in_result=False,
            max_length=self.settings.max_new_tokens,
            end_token=[self.settings.eos_token_id],
            return_end_token=True,
            return_scores=True,
            sampling_temperature=self.sampling.temperature,
            sampling_topk=max(self.sampling.top_k, 0),
            sampling_topp=self.sampling.top_p,
            callback=listen,
        )

        for row, (result, steps) in enumerate(zip(results, reported, strict=True)):
            if result.sequences_ids[0] != [token for token, _ in steps]:
                raise EngineAnswerError(
                    f"row {row}: CTranslate2 returned {result.sequences_ids[0]} and scored {[t for t, _ in steps]}"
                )
        return [
            Completion(
                token_ids=[token for token, _ in steps],
                log_probs=[log_prob for _, log_prob in steps],
                raw_log_probs=[log_prob for _, log_prob in steps],
            )
            for steps in reported
        ]

    def _score(self, generator: Any, tokens: TokenBatch, temperature: float) -> Tensor:  # noqa: ANN401 (lazy package)
        prompts, responses = tokens.to("cpu").unpadded()
        log_prob = torch.zeros(tokens.response_ids.shape, device="cpu")
        size = self.batch_size or len(tokens)
        for start in range(0, len(tokens), size):
            rows = range(start, min(start + size, len(tokens)))
            with _translate_exceptions():
                logits = torch.from_numpy(np.array(generator.forward_batch([prompts[r] + responses[r] for r in rows])))

            # The logits at a token predict the next one.
            for row in rows:
                first, last = len(prompts[row]) - 1, len(prompts[row]) + len(responses[row]) - 1
                scores = (logits[row - start, first:last] / temperature).log_softmax(-1)
                chosen = torch.tensor(responses[row], dtype=torch.int64, device="cpu")[:, None]
                log_prob[row, : len(chosen)] = scores.gather(-1, chosen).squeeze(-1)
        return log_prob.to(tokens.response_ids.device)


def rounded_to_bits(weight: Tensor, bits: int) -> Tensor:
    """Round each row of a matrix to 2^bits − 1 evenly spaced values: s · round(w / s), s = max|w| / (2^(bits − 1) − 1).

    Args:
        weight: a parameter. Only a matrix is rounded: norm scales and biases are few and have a large effect, so
            quantizing engines keep their precision as well.
        bits: 2 to `MOST_BITS`.

    Returns:
        A new tensor of the same shape and dtype. A row of zeros stays zero.
    """
    if weight.dim() != 2:
        return weight.clone()
    largest = weight.abs().amax(dim=1, keepdim=True)
    spacing = largest / (2 ** (bits - 1) - 1)
    steps = (weight / spacing.masked_fill(largest == 0, 1.0)).round()
    return steps * spacing


def _rows_by_length(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield row indices of prompts of equal length, at most `size` at a time, in order of first appearance."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    for rows in by_length.values():
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


@contextlib.contextmanager
def _translate_exceptions() -> Iterator[None]:
    """Raise CTranslate2's exceptions as `EngineUnavailableError`, inside the `with` block."""
    try:
        yield
    except EngineError:
        raise
    except RuntimeError as error:
        raise EngineUnavailableError(f"CTranslate2 failed: {error}") from error


def _copy_with_weights(model: nn.Module, weight: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy the model and replace each parameter by `weight(parameter)`; tied ones stay tied."""
    # deepcopy looks each parameter up by its id, so all uses of a tied one get the same new parameter.
    parameters = {id(p): nn.Parameter(weight(p), requires_grad=False) for p in model.parameters()}
    return copied_model(model, parameters)


@contextlib.contextmanager
def _freeze_older_objects() -> Iterator[None]:
    """Keep older objects out of the garbage collections that the converter runs for each layer (0.1 s, not 2 s)."""
    if gc.get_freeze_count():  # already frozen elsewhere, and unfreezing would undo that
        yield
        return

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
