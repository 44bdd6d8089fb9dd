"""Base class of engines in other processes: parse answers to a rollout, send weights in a folder, and verify them.

A weight update writes a checkpoint to a folder that the engine reads. A probe follows each update: engine and policy
score a fixed batch at temperature 1 over the full vocabulary. If they differ above the noise floor, the engine raises
on every request until an update has fully succeeded.

A server may restart during a run and lose its weights. Its answers name the version of their weights. If they do not,
and after every outage, the engine scores the probe again. A server that lost the weights gets them again, and the
batch is sent again.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from rollcorr.config.checks import check_choice, check_integer, check_number
from rollcorr.config.secrets import header_values
from rollcorr.engines.base import (
    NOISE_FLOOR,
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
    noise_floor,
)
from rollcorr.engines.completions import Completion, check_log_prob, check_versions, rollout_from_completions
from rollcorr.engines.gathered_policy import gather_policy
from rollcorr.engines.response_scoring import make_probe, score_probe, vocabulary_size
from rollcorr.engines.row_seeds import row_seed
from rollcorr.engines.transport import waiting
from rollcorr.engines.transport.weight_folder import checkpoint_weights, read_policy, write_checkpoint
from rollcorr.run_directory.durable_files import disk_failure
from rollcorr.run_directory.run_lock import RunInUseError, run_lock

if TYPE_CHECKING:
    from rollcorr.engines.transport.http import JsonClient

Dtype = Literal["bfloat16", "float16", "float32"]
Answer = TypeVar("Answer")

# Maximum size in JSON of one token and its log-prob, with their names.
BYTES_PER_LOG_PROB = 256


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Options of every engine in another process.

    Attributes:
        dtype: precision that the engine computes in.
        sync_tolerance: largest difference between engine and policy on the probe, nats. Defaults to `NOISE_FLOOR`.

    Raises:
        TypeError: a value has an invalid type.
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
    """Options of every engine behind HTTP, in addition to `RemoteOptions`.

    Attributes:
        url: the server's address, for instance "http://localhost:8000".
        folder: where weights for the server are written; the server must read the same path. Optional; omit it if
            the server has the policy's weights already and they never change.
        wait_minutes: how long the server may be away before the run fails: no connection, HTTP 408, 425, 429, 502,
            503 or 504. 0 disables the wait.
        deadline_minutes: time limit of one batch of requests, with all its waits and retries.
        timeout: seconds without a byte of an answer. A server may be silent until a response is complete.
        retries: how often a request is sent again after a broken connection, a timeout, or any other HTTP 5xx.
        max_answer_megabytes: size limit of one answer, unpacked. Defaults to 32, or more if `max_new_tokens` needs
            more with its log-probs.
        concurrency: maximum number of concurrent requests.
        headers: sent with each request, such as an API key. No other server receives them: redirects are not followed.
        headers_env: header name → environment variable that contains its value; read when the engine is built.
    """

    url: str = field(repr=False)  # may contain a password
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
    """Base class of engines in another process. Subclasses implement the transport.

    Attributes:
        engine: its name in a `SamplingSpec`.
        title: its name in error messages.

    Args:
        model: a causal language model of `transformers`: the policy, and the reference of the first probe.
        settings: sampling settings.
        options: precision and tolerance.
        version: policy version of `model`.

    Raises:
        TypeError: `version` is not an integer.
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
        self.max_model_len: int | None = None  # limit of prompt and response together; optional

        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._probe = make_probe(model)
        self._expected = torch.empty(0, device="cpu")  # the probe's log-probs under the current weights
        self._unusable: str | None = "it holds no verified weights yet"

        # The versions of all updates, in order. "default" means the initial weights only until the first update.
        self._given = [version]
        self._initial_version: int | None = version
        self._server: JsonClient | None = None  # HTTP client; None without a server
        self._folder_lock = contextlib.ExitStack()  # empty if no other engine can reach the folder
        weakref.finalize(self, self._folder_lock.close)
        self._faults_at_proof = 0  # the server's fault count when the weights were last verified

    @abc.abstractmethod
    def _complete(self, prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        """Return one completion per prompt."""

    @abc.abstractmethod
    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> Sequence[Sequence[object]]:
        """Return the full-vocabulary log-probs of each row's tokens after the first, unchecked."""

    @abc.abstractmethod
    def _load(self, version: int) -> None:
        """Load all weights of `self._folder` into the engine."""

    @property
    @abc.abstractmethod
    def _folder(self) -> Path:
        """Return the path of the checkpoint of the current weights."""

    def _read_server_properties(self) -> None:
        """Read the server's properties at the start and after an outage. Sends no sampling request."""

    def _check_again(self) -> None:
        """Check that an engine still matches its setup after an outage. May send a sampling request."""

    def _shut_down_worker(self) -> None:
        """Shut down the engine's own worker, if it has one: its weights may be partially updated."""

    def close(self) -> None:
        """Reject further requests, and release the folder of a server, which keeps running."""
        self._unusable = "it was closed"
        self._folder_lock.close()

    def generate(self, prompts: Sequence[Sequence[int]], *, seed: int, first_row: int = 0) -> Rollout:
        """Sample one response per prompt. Raises if any response fails.

        Args:
            prompts: token ids of B non-empty prompts.
            seed: random seed; each row gets a seed derived from it.
            first_row: index of the first prompt in the global batch.

        Raises:
            ValueError: a prompt is empty, has an id outside the vocabulary, or leaves no room for `max_new_tokens`.
            EngineUnavailableError: the engine died or timed out after all waits and retries.
            EngineAnswerError: a value is missing or not a log-prob, or a token was sampled from weights that the engine
                never received.
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

        # A concurrent thread may update the weights: later versions are valid as well.
        sampling, older = self.sampling, len(self._given) - 1
        seeds = [row_seed(seed, first_row + row) for row in range(len(rows))]

        def sample() -> tuple[list[Completion], bool]:
            completions = self._complete(rows, seeds)
            check_versions(completions, self._given[older:], self.title)
            return completions, all(completion.versions is not None for completion in completions)

        with self._add_address_to_errors():
            return rollout_from_completions(
                rows,
                self._ask_current_weights(sample),
                sampling=sampling,
                pad_token_id=self.settings.pad_token_id,
                vocabulary_size=self.vocabulary_size,
                device=self.device,
            )

    def score(self, tokens: TokenBatch) -> Tensor:
        """Compute full-vocabulary log-probs of response tokens at the sampling temperature, (B, T) float32.

        Raises: as `generate`.
        """
        self._require_weights()
        temperature = self.sampling.temperature
        if temperature != 1 and self._server is not None:
            raise EngineError(
                f"a {self.title} server scores given tokens at temperature 1, not {temperature:g}: sample at 1, or "
                "score with the policy"
            )
        with self._add_address_to_errors():
            return self._ask_current_weights(lambda: (self._score(tokens, temperature), False))

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Send the weights of `model`, rounded to this engine's dtype, and verify them on the probe.

        Args:
            model: the trainer's policy.
            version: version of its weights, recorded in rollouts.

        Raises:
            WeightSyncError: the load failed, or engine and policy differ above the noise floor. The engine is unusable
                until an update succeeds.
            EngineUnavailableError: the engine died or timed out. It is unusable as well.
            EngineError: the folder for the weights cannot be written, for instance because the disk is full. The engine
                is unusable as well.
        """
        check_integer("version", version, at_least=0)
        model = gather_policy(model, device="cpu")
        expected = score_probe(model, self._probe, dtype=self._dtype)
        folder = self._folder  # raises here, while the engine is still usable, if it does not support updates

        with self._unusable_on_failure():
            with _translate_disk_errors(folder):
                write_checkpoint(model, folder, dtype=self._dtype)
            self._given.append(version)
            self._initial_version = None
            self._load_and_verify(version, expected)

        self._expected = expected
        self.sampling = dataclasses.replace(self.sampling, policy_version=version)

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return the current weights, rounded to this engine's dtype, under their names in a checkpoint.

        Raises:
            EngineError: the last weight update failed, or their folder cannot be read.
        """
        self._require_weights()
        folder = self._folder
        with _translate_disk_errors(folder):
            return dict(checkpoint_weights(folder))

    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore weights from `export_weights`, and verify them as after an update.

        Args:
            weights: name → parameter, each in the shape that it has in the model.
            version: version of these weights, recorded in rollouts.

        Raises:
            WeightSyncError, EngineError: as `update_weights`.
        """
        folder = self._folder
        with _translate_disk_errors(folder):
            model = read_policy(folder, weights)
        self.update_weights(model.to(self.device), version=version)

    def _connect(self, model: nn.Module, options: ServerOptions, version: int, *, log_probs_per_token: int) -> None:
        """Send a running server the first weights through its folder; without a folder verify the server's weights."""
        from rollcorr.engines.transport.http import MAX_ANSWER_BYTES, JsonClient

        max_bytes = max(MAX_ANSWER_BYTES, BYTES_PER_LOG_PROB * self.settings.max_new_tokens * log_probs_per_token)
        if options.max_answer_megabytes is not None:
            max_bytes = int(1e6 * check_number("max_answer_megabytes", options.max_answer_megabytes, at_least=0.001))
        self._client = self._server = JsonClient(
            options.url,
            timeout=options.timeout,
            retries=options.retries,
            wait_minutes=options.wait_minutes,
            deadline_minutes=options.deadline_minutes,
            max_answer_bytes=max_bytes,
            concurrency=options.concurrency,
            headers=header_values(options.headers, options.headers_env),
        )

        self._read_server_properties()
        if options.folder is not None:
            # A second engine would replace weights that this one's server may have to read again.
            try:
                self._folder_lock.enter_context(run_lock(options.folder, kind="weight folder", owner="engine"))
            except RunInUseError as error:
                raise EngineError(str(error)) from error
            try:
                self.update_weights(model, version=version)
            except BaseException:
                self._folder_lock.close()
                raise
            return

        # Without a shared folder the server keeps its own weights, which must equal the policy's.
        self._expected = score_probe(gather_policy(model, device="cpu"), self._probe, dtype=self._dtype)
        with self._unusable_on_failure():
            self._verify_weights(self._expected)
        self._faults_at_proof = self._faults

    @property
    def _faults(self) -> int:
        """Return how often the server failed to answer so far. After an increase it may have been restarted."""
        return 0 if self._server is None else self._server.faults

    def _ask_current_weights(self, ask: Callable[[], tuple[Answer, bool]]) -> Answer:
        """Return an answer from the current weights; send them again, once, to a server that lost them.

        Args:
            ask: callback that returns the answer, and whether the answer has a weight version.
        """
        for may_repair in (True, False):
            try:
                answer, names_weights = ask()
                was_away = self._faults != self._faults_at_proof
                if was_away:
                    self._read_server_properties()
                    self._check_again()
                if was_away or not (names_weights or self._server is None):
                    self._verify_weights(self._expected)
                self._faults_at_proof = self._faults
                return answer
            except (EngineRestartedError, WeightSyncError) as error:
                cannot_send = isinstance(self.options, ServerOptions) and self.options.folder is None
                if cannot_send or not may_repair:
                    raise
                reason = error
            waiting.show_line(
                f"{self.title} lost the weights of version {self.weight_version} ({reason}); they are sent again, and "
                "the batch is asked for again"
            )
            with self._unusable_on_failure():
                self._read_server_properties()
                self._load_and_verify(self.weight_version, self._expected)
                self._check_again()  # last: a paused server does not answer until the load resumes it
        raise AssertionError("the second round returns or raises")

    @contextlib.contextmanager
    def _add_address_to_errors(self) -> Iterator[None]:
        """Add the server's address to errors about its answers, inside the `with` block."""
        try:
            yield
        except EngineAnswerError as error:
            if self._server is None or self._server.url in str(error):
                raise
            raise type(error)(f"{error}. This is the answer of {self.title} at {self._server.url}") from error

    def _load_and_verify(self, version: int, expected: Tensor) -> None:
        """Load the checkpoint in the folder; retry if the server was away meanwhile and may have lost it."""
        for is_last in (False, True):
            faults = self._faults
            try:
                self._load(version)
                self._verify_weights(expected)
                break
            except (EngineAnswerError, WeightSyncError):
                if is_last or self._faults == faults:
                    raise
        self._faults_at_proof = self._faults

    def _verify_weights(self, expected: Tensor) -> None:
        """Check that the engine's scores of the probe match `expected`."""
        tolerance = self.options.sync_tolerance
        if tolerance is None:
            tolerance = noise_floor(expected, self._dtype)
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

        # Scores begin at the second token of a row, so the response's scores begin one place before the response.
        flat = [
            check_log_prob(value, f"the score of token {token} of row {row}")
            for row, (scores, prompt) in enumerate(zip(found, prompts, strict=True))
            for token, value in enumerate(scores[len(prompt) - 1 :])
        ]
        mask = tokens.response_mask
        values = torch.tensor(flat, dtype=torch.float32, device=mask.device)
        return torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, values)

    @contextlib.contextmanager
    def _unusable_on_failure(self) -> Iterator[None]:
        """Mark the engine unusable if the `with` block fails before the weights are verified."""
        # Set before the load: a concurrent thread, or an interrupt, must find the engine unusable as well.
        self._unusable = "its weights are being loaded"
        try:
            yield
        except BaseException as error:
            self._unusable = f"its weights could not be loaded and verified: {error}"
            self._shut_down_worker()
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
def _translate_disk_errors(folder: Path) -> Iterator[None]:
    """Raise disk errors as engine errors: the run loses the current step but no earlier one."""
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
