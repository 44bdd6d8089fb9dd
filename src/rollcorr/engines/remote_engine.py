"""What engines in other processes share: answers become a rollout, weights travel in a folder and are verified.

A weight update goes through a checkpoint in a folder that the engine reads. A probe follows each update: a fixed batch
that engine and policy score, at temperature 1, over the whole vocabulary. Unless they agree to the noise floor, the
engine answers nothing more until an update has succeeded as a whole.

A server may be restarted while a run goes on, and then has lost its weights. Its answers name the weights that they are
from; where they do not, and after every absence, the probe is scored once more. A server that lost the weights gets
them again, and the batch is asked for again.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from rollcorr.config.checks import check_choice, check_integer, check_number
from rollcorr.config.secrets import header_values
from rollcorr.engines.base import (
    Engine,
    EngineAnswerError,
    EngineError,
    EngineRestartedError,
    GenerationSettings,
    Rollout,
    TokenBatch,
    WeightSyncError,
    check_prompts,
    check_weight_sync,
)
from rollcorr.engines.completions import Completion, check_log_prob, check_versions, rollout_from_completions
from rollcorr.engines.response_scoring import make_probe, score_probe, vocabulary_size
from rollcorr.engines.transport import waiting
from rollcorr.engines.transport.weight_folder import checkpoint_weights, read_policy, write_checkpoint
from rollcorr.run_directory.durable_files import disk_failure

if TYPE_CHECKING:
    from rollcorr.engines.transport.http import JsonClient

Dtype = Literal["bfloat16", "float16", "float32"]
Answer = TypeVar("Answer")

# Largest difference, nats, between log-probs of an engine and of transformers in the same precision. It is smaller, in
# proportion, for a policy whose log-probs spread by less than 1 nat: its logits are small, and so is their rounding.
NOISE_FLOOR: Mapping[str, float] = {"bfloat16": 0.5, "float16": 0.1, "float32": 5e-4}

# What one token and its log-prob take in JSON at most, with their names.
BYTES_PER_LOG_PROB = 256


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Options of every engine in another process.

    Attributes:
        dtype: precision that the engine computes in.
        sync_tolerance: largest difference between engine and policy on the probe, nats; None for `NOISE_FLOOR`.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: a value is out of range.
    """

    dtype: Dtype = "bfloat16"
    sync_tolerance: float | None = None

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(NOISE_FLOOR))
        if self.sync_tolerance is not None:
            check_number("sync_tolerance", self.sync_tolerance, above=0)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(RemoteOptions):
    """Options of every engine behind HTTP, beside those of `RemoteOptions`.

    Attributes:
        url: where the server is, for instance "http://localhost:8000".
        folder: where weights for the server are written, at a path that the server reads too. None if the server has
            the policy's weights already and they never change.
        wait_minutes: how long the server may be away before the run gives up: no connection, HTTP 408, 425, 429, 502,
            503 or 504. 0 for no wait.
        deadline_minutes: how long one batch of requests may take, with all its waits and retries.
        timeout: seconds without a byte of an answer. A server may be silent until a response is complete.
        retries: how often a request is sent again after a broken connection, a silence, or another HTTP 5xx.
        max_answer_megabytes: how long one answer may be, unpacked. None for 32, or more where `max_new_tokens` with its
            log-probs needs more.
        concurrency: how many requests are under way at a time.
        headers: sent with each request, such as an API key. They go to no other server: redirects are not followed.
        headers_env: header name → environment variable that holds its value; read when the engine is built.
    """

    url: str = field(repr=False)  # it may hold a password
    folder: str | Path | None = None
    wait_minutes: float = 30.0
    deadline_minutes: float = 120.0
    timeout: float = 1800.0
    retries: int = 3
    max_answer_megabytes: float | None = None
    concurrency: int = 64
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    headers_env: Mapping[str, str] | None = None


class RemoteEngine(Engine, abc.ABC):
    """An engine without the way to reach it, which subclasses give.

    Attributes:
        engine: its name in a `SamplingSpec`.
        title: its name in errors.

    Args:
        model: a causal language model of `transformers`: the policy, and the reference of the first probe.
        settings: how to sample.
        options: precision and tolerance.
        version: policy version of `model`.

    Raises:
        TypeError: `version` is no integer.
        ValueError: `version` is below 0.
    """

    engine: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, model: nn.Module, settings: GenerationSettings, options: RemoteOptions, *, version: int) -> None:
        check_integer("version", version, at_least=0)
        self.settings = settings
        self.options = options
        self.sampling = dataclasses.replace(settings.sampling, engine=self.engine, policy_version=version)
        self.vocabulary_size = vocabulary_size(model)
        self.device = next(model.parameters()).device
        self.max_model_len: int | None = None  # longest prompt and response together, if the engine has a limit

        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._probe = make_probe(model)
        self._expected = torch.empty(0, device="cpu")  # what the weights that sample give to the probe
        self._unusable: str | None = "it holds no verified weights yet"

        # The versions that the engine was given, one after the other. "default" means the first one only until it was
        # given another.
        self._given = [version]
        self._initial_version: int | None = version
        self._server: JsonClient | None = None  # how a server is reached; None for other engines
        self._faults_at_proof = 0  # the server's faults when the weights were last known to be right

    @abc.abstractmethod
    def _complete(self, prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        """One completion per prompt."""

    @abc.abstractmethod
    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> Sequence[Sequence[object]]:
        """Log-probs of the tokens of each row after its first, over the whole vocabulary, unchecked."""

    @abc.abstractmethod
    def _load(self, version: int) -> None:
        """Make the engine hold the weights in `self._folder`, all of them."""

    @property
    @abc.abstractmethod
    def _folder(self) -> Path:
        """The checkpoint of the weights that sample."""

    def _meet(self) -> None:
        """Learn what a server is, also after it was away. It asks for no response."""

    def _check_again(self) -> None:
        """Require that an engine that was away still answers as it was set up to. It may ask for a response."""

    def _abandon(self) -> None:
        """Make sure that weights that may be mixed sample nothing, here or for others."""

    def close(self) -> None:
        """Answer nothing more; a server keeps running."""
        self._unusable = "it was closed"

    def generate(self, prompts: Sequence[Sequence[int]], *, seed: int) -> Rollout:
        """Sample one response per prompt: all of them, or an error and none.

        Args:
            prompts: token ids, B rows, none empty.
            seed: seeds the draws; each row draws with a seed of its own.

        Raises:
            ValueError: a prompt is empty, has an id outside the vocabulary, or leaves no room for `max_new_tokens`.
            EngineUnavailableError: the engine died, or did not answer in time, and neither waits nor retries helped.
            EngineAnswerError: something is missing or no log-prob, or a token is of weights that the engine was not
                given.
            EngineError: the last weight update failed, or the engine was closed.
        """
        self._require_weights()
        rows = [[int(token) for token in prompt] for prompt in prompts]
        check_prompts(rows, vocabulary_size=self.vocabulary_size)
        longest, new = max(map(len, rows)), self.settings.max_new_tokens
        if self.max_model_len is not None and longest + new > self.max_model_len:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens {new} need more than {self.title}'s max_model_len "
                f"{self.max_model_len}: raise max_model_len, or shorten one of them"
            )

        # Another thread may update the weights meanwhile: from here on, its versions are right as well.
        sampling, older = self.sampling, len(self._given) - 1
        seeds = [row_seed(seed, row) for row in range(len(rows))]

        def sample() -> tuple[list[Completion], bool]:
            completions = self._complete(rows, seeds)
            check_versions(completions, self._given[older:], self.title)
            return completions, all(completion.versions is not None for completion in completions)

        with self._saying_where():
            return rollout_from_completions(
                rows,
                self._from_given_weights(sample),
                sampling=sampling,
                pad_token_id=self.settings.pad_token_id,
                vocabulary_size=self.vocabulary_size,
                device=self.device,
            )

    def score(self, tokens: TokenBatch) -> Tensor:
        """Log-probs of response tokens at the sampling temperature, over the whole vocabulary, (B, T) float32.

        Raises: as `generate`.
        """
        self._require_weights()
        temperature = self.sampling.temperature
        if temperature != 1 and self._server is not None:
            raise EngineError(
                f"a {self.title} server scores given tokens at temperature 1, not {temperature:g}: sample at 1, or "
                "score with the policy"
            )
        with self._saying_where():
            return self._from_given_weights(lambda: (self._score(tokens, temperature), False))

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Take over the weights of `model`, rounded to this engine's dtype, and verify them on the probe.

        Args:
            model: the trainer's policy.
            version: number of its weights, which rollouts will carry.

        Raises:
            WeightSyncError: the load failed, or the two sides differ above the noise floor. The engine is unusable
                until an update succeeds.
            EngineUnavailableError: the engine died or did not answer in time. It is unusable as well.
            EngineError: the folder for the weights cannot be written, for instance because the disk is full. The engine
                is unusable as well.
        """
        check_integer("version", version, at_least=0)
        expected = score_probe(model, self._probe, dtype=self._dtype)
        folder = self._folder  # raises if the engine takes no weights, while it can still be used

        with self._whole_or_unusable():
            with _disk_failures_of(folder):
                write_checkpoint(model, folder, dtype=self._dtype)
            self._given.append(version)
            self._initial_version = None
            self._load_and_verify(version, expected)

        self._expected = expected
        self.sampling = dataclasses.replace(self.sampling, policy_version=version)

    def export_weights(self) -> Mapping[str, Tensor]:
        """The weights that sample now, rounded to this engine's dtype, under their names in a checkpoint.

        Raises:
            EngineError: the last weight update failed, or their folder cannot be read.
        """
        self._require_weights()
        folder = self._folder
        with _disk_failures_of(folder):
            return dict(checkpoint_weights(folder))

    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore what `export_weights` returned, and verify it as an update.

        Args:
            weights: name → parameter, each in the shape that it has in the model.
            version: number of these weights, which rollouts will carry.

        Raises:
            WeightSyncError, EngineError: as `update_weights`.
        """
        folder = self._folder
        with _disk_failures_of(folder):
            model = read_policy(folder, weights)
        self.update_weights(model.to(self.device), version=version)

    def _connect(self, model: nn.Module, options: ServerOptions, version: int, *, log_probs_per_token: int) -> None:
        """Give a running server the first weights through its folder; without one verify that it has them already."""
        from rollcorr.engines.transport.http import MAX_ANSWER_BYTES, JsonClient

        longest = max(MAX_ANSWER_BYTES, BYTES_PER_LOG_PROB * self.settings.max_new_tokens * log_probs_per_token)
        if options.max_answer_megabytes is not None:
            longest = int(1e6 * check_number("max_answer_megabytes", options.max_answer_megabytes, at_least=0.001))
        self._client = self._server = JsonClient(
            options.url,
            timeout=options.timeout,
            retries=options.retries,
            wait_minutes=options.wait_minutes,
            deadline_minutes=options.deadline_minutes,
            max_answer_bytes=longest,
            concurrency=options.concurrency,
            headers=header_values(options.headers, options.headers_env),
        )
        # Without a shared folder the server keeps its own weights, which must equal the policy's.
        self._meet()
        if options.folder is not None:
            Path(options.folder).mkdir(parents=True, exist_ok=True)
            self.update_weights(model, version=version)
            return

        self._expected = score_probe(model, self._probe, dtype=self._dtype)
        with self._whole_or_unusable():
            self._verify(self._expected)
        self._faults_at_proof = self._faults

    @property
    def _faults(self) -> int:
        """How often the server failed to answer so far. Whenever this grows, it may have been restarted."""
        return 0 if self._server is None else self._server.faults

    def _from_given_weights(self, ask: Callable[[], tuple[Answer, bool]]) -> Answer:
        """An answer from the weights that this engine was given; a server that lost them gets them again, once.

        Args:
            ask: gives the answer, and whether it names its weights.
        """
        for may_repair in (True, False):
            try:
                answer, names_weights = ask()
                was_away = self._faults != self._faults_at_proof
                if was_away:
                    self._meet()
                    self._check_again()
                if was_away or not (names_weights or self._server is None):
                    self._verify(self._expected)
                self._faults_at_proof = self._faults
                return answer
            except (EngineRestartedError, WeightSyncError) as error:
                keeps_weights = isinstance(self.options, ServerOptions) and self.options.folder is None
                if keeps_weights or not may_repair:
                    raise
                reason = error
            waiting.show_line(
                f"{self.title} lost the weights of version {self.weight_version} ({reason}); they are sent again, and "
                "the batch is asked for again"
            )
            with self._whole_or_unusable():
                self._meet()
                self._load_and_verify(self.weight_version, self._expected)
                self._check_again()  # last: a server that is paused answers nothing until the load has resumed it
        raise AssertionError("the second round returns or raises")

    @contextlib.contextmanager
    def _saying_where(self) -> Iterator[None]:
        """What is wrong with an answer is said with the server that gave it."""
        try:
            yield
        except EngineAnswerError as error:
            if self._server is None or self._server.url in str(error):
                raise
            raise type(error)(f"{error}. This is the answer of {self.title} at {self._server.url}") from error

    def _load_and_verify(self, version: int, expected: Tensor) -> None:
        """Load the checkpoint in the folder; again, if the server was away meanwhile and may have lost it at once."""
        for is_last in (False, True):
            faults = self._faults
            try:
                self._load(version)
                self._verify(expected)
                break
            except (EngineAnswerError, WeightSyncError):
                if is_last or self._faults == faults:
                    raise
        self._faults_at_proof = self._faults

    def _verify(self, expected: Tensor) -> None:
        """Require that the engine scores the probe as expected."""
        tolerance = self.options.sync_tolerance
        if tolerance is None:
            tolerance = NOISE_FLOOR[self.options.dtype] * min(1.0, float(expected.std()))
        check_weight_sync(self._score(self._probe, 1.0), expected, tolerance=tolerance)

    def _score(self, tokens: TokenBatch, temperature: float) -> Tensor:
        prompts, responses = tokens.unpadded()
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]

        found = self._prompt_log_probs(rows, temperature)
        lengths = [len(scores) + 1 for scores in found]
        if lengths != [len(row) for row in rows]:
            raise EngineAnswerError(
                f"{self.title} scored rows of {lengths} tokens, asked for {[len(row) for row in rows]}"
            )

        # Scores begin at the second token of a row, so those of the response begin one place earlier than it does.
        flat = [
            check_log_prob(value, f"the score of token {token} of row {row}")
            for row, (scores, prompt) in enumerate(zip(found, prompts, strict=True))
            for token, value in enumerate(scores[len(prompt) - 1 :])
        ]
        mask = tokens.response_mask
        values = torch.tensor(flat, dtype=torch.float32, device=mask.device)
        return torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, values)

    @contextlib.contextmanager
    def _whole_or_unusable(self) -> Iterator[None]:
        """Nothing samples from weights that an error left half-loaded or unverified."""
        # Set before the load: a second thread, or an interrupt, must find the engine unusable as well.
        self._unusable = "its weights are being loaded"
        try:
            yield
        except BaseException as error:
            self._unusable = f"its weights could not be loaded and verified: {error}"
            self._abandon()
            if isinstance(error, EngineAnswerError):
                raise WeightSyncError(f"weight sync incomplete, {self.title} refused it: {error}") from error
            raise
        self._unusable = None

    def _require_weights(self) -> None:
        if self._unusable is not None:
            raise EngineError(
                f"this {self.title} engine may not be used, {self._unusable}. Call update_weights to try again"
            )


@contextlib.contextmanager
def _disk_failures_of(folder: Path) -> Iterator[None]:
    """A disk that fails is a failure of the engine, which costs a run the step under way and not those before."""
    try:
        yield
    except Exception as error:
        cause = disk_failure(error)
        if cause is None:
            raise
        raise EngineError(
            f"the weights in {str(folder)!r} could not be written or read: {cause.strerror or cause}. Make room there, "
            "or give a folder on another disk"
        ) from error


def row_seed(seed: int, row: int) -> int:
    """A 63-bit seed for one row of a batch, so that equal prompts get different draws."""
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
