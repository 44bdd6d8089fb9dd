"""A small real language model: load it, sample from it token by token, score its responses, and update its weights.

Sampler and trainer are two code paths of one model. The sampler decodes with a key-value cache, in the precision and
with the fault that a scenario asks for. The trainer is float32 and scores a whole sequence in one forward pass. So
every difference in a log is one that an engine could have produced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_MODEL = ROOT / "tests" / "data" / "stories260K"
"""A pretrained Llama of 260 k parameters that the repository holds; tests/data/README.md says where it comes from."""

LEARNING_RATE = 2e-4
"""Of the policy-gradient updates. One update then moves k3 by a few times the noise of bfloat16."""


def load_model(path: Path = DEFAULT_MODEL) -> nn.Module:
    """The model in float32, with its head untied from its embedding, so that either can be stale alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    ).eval()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return model


def first_token(model: nn.Module) -> int:
    """The token that opens a text: BOS where the model has one, else id 0."""
    bos = model.config.bos_token_id
    return 0 if bos is None else int(bos)


def stop_tokens(model: nn.Module) -> tuple[int, ...]:
    """Tokens that end a response. A model of stories ends one by opening the next."""
    ends = {model.config.bos_token_id, model.config.eos_token_id} - {None}
    return tuple(sorted(ends))


@dataclass(frozen=True)
class Responses:
    """What a sampler drew: per row the ids and the log-probs that the sampler itself gave them, in nats."""

    ids: list[list[int]]
    log_prob: list[list[float]]


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    pads_unmasked: bool = False,
    cache_model: nn.Module | None = None,
) -> Responses:
    """Draw one response per prompt, with left padding and a key-value cache, as engines of `transformers` do.

    Args:
        model: the sampler's weights, in any precision.
        prompts: token ids, B rows, none empty.
        tokens: length of the longest response.
        generator: of the draws.
        temperature: divides the logits; the log-probs are those of the divided ones.
        pads_unmasked: a fault: the left pads are attended to, and positions count from them.
        cache_model: a fault: these weights computed the cache of the prompt. None for `model` itself.
    """
    from transformers import DynamicCache

    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device="cpu")
    attention = torch.zeros(len(prompts), width, dtype=torch.int64, device="cpu")
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device="cpu")
        attention[row, width - len(prompt) :] = 1
    if pads_unmasked:
        attention = torch.ones_like(attention)
    positions = (attention.cumsum(1) - 1).clamp(min=0)

    cache = DynamicCache()
    if width > 1:
        (cache_model or model)(
            ids[:, :-1], attention_mask=attention[:, :-1], position_ids=positions[:, :-1], past_key_values=cache
        )

    token, position = ids[:, -1:], positions[:, -1:]
    drawn, log_probs = [], []
    stops = torch.tensor(stop_tokens(model), device="cpu")
    running = torch.ones(len(prompts), dtype=torch.bool, device="cpu")
    for _ in range(tokens):
        answer = model(token, attention_mask=attention, position_ids=position, past_key_values=cache)
        log_prob = functional.log_softmax(answer.logits[:, -1].float() / temperature, dim=-1)
        token = torch.multinomial(log_prob.exp(), 1, generator=generator)
        drawn.append(torch.where(running[:, None], token, -1))
        log_probs.append(log_prob.gather(1, token))

        running &= ~torch.isin(token[:, 0], stops)
        if not running.any():
            break
        attention = functional.pad(attention, (0, 1), value=1)
        position = position + 1

    lengths = (torch.cat(drawn, 1) >= 0).sum(1).tolist()
    ids_of_rows, log_prob_of_rows = torch.cat(drawn, 1).tolist(), torch.cat(log_probs, 1).tolist()
    return Responses(
        [row[:length] for row, length in zip(ids_of_rows, lengths, strict=True)],
        [row[:length] for row, length in zip(log_prob_of_rows, lengths, strict=True)],
    )


def score(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    pads_unmasked: bool = False,
) -> list[list[float]]:
    """Log-probs of the responses under the trainer, in one forward pass over the whole rows, nats.

    With `pads_unmasked`, prompts are padded on the left and the pads are attended to: a fault.
    """
    with torch.no_grad():
        scored = score_padded(model, prompts, responses, temperature=temperature, pads_unmasked=pads_unmasked)
    return [row[: len(response)].tolist() for row, response in zip(scored, responses, strict=True)]


def score_padded(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    pads_unmasked: bool = False,
) -> Tensor:
    """`score` as a (B, T) tensor that carries a gradient; 0 after the end of a response."""
    lead = max(len(prompt) for prompt in prompts) if pads_unmasked else 0
    starts = [lead or len(prompt) for prompt in prompts]
    longest = max(start + len(response) for start, response in zip(starts, responses, strict=True))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device="cpu")
    attention = torch.ones_like(ids) if pads_unmasked else torch.zeros_like(ids)
    for row, (prompt, response, start) in enumerate(zip(prompts, responses, starts, strict=True)):
        ids[row, start - len(prompt) : start + len(response)] = torch.tensor([*prompt, *response], device="cpu")
        attention[row, start - len(prompt) : start + len(response)] = 1

    logits = model(ids, attention_mask=attention).logits.float() / temperature
    log_prob = functional.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    width = max(len(response) for response in responses)
    rows = [
        functional.pad(log_prob[row, start - 1 : start - 1 + len(response)], (0, width - len(response)))
        for row, (response, start) in enumerate(zip(responses, starts, strict=True))
    ]
    return torch.stack(rows)


def make_prompts(model: nn.Module, count: int, *, generator: torch.Generator, longest: int = 40) -> list[list[int]]:
    """Prompts of 4 to `longest` tokens, each opened by BOS: pieces of what the model itself writes."""
    opening = first_token(model)
    texts = sample(model, [[opening]] * count, tokens=longest + 24, generator=generator).ids
    prompts = []
    for text in texts:
        length = int(torch.randint(3, longest, (1,), generator=generator, device="cpu"))
        start = int(torch.randint(0, 24, (1,), generator=generator, device="cpu"))
        piece = [token for token in text[start : start + length] if token not in stop_tokens(model)]
        prompts.append([opening, *(piece or text[:3])])
    return prompts


def train(
    model: nn.Module,
    updates: int,
    *,
    generator: torch.Generator,
    parameters: Sequence[nn.Parameter] | None = None,
    learning_rate: float = LEARNING_RATE,
    rows: int = 16,
    tokens: int = 64,
) -> Iterator[nn.Module]:
    """Yield `model` before and after each of some policy-gradient updates on its own samples.

    The reward is the share of a few tokens, drawn once, in a response: a target that moves the policy as a reward does.
    Advantages are normalized over the batch, and Adam takes the steps.

    Args:
        model: changed in place.
        updates: how many.
        generator: of the prompts, the draws and the reward.
        parameters: what is trained. None for every weight.
        learning_rate: Adam's.
        rows: responses per update.
        tokens: longest response.
    """
    trained = list(model.parameters()) if parameters is None else list(parameters)
    optimizer = torch.optim.Adam(trained, lr=learning_rate, betas=(0.9, 0.95))
    wanted = set(torch.randperm(model.config.vocab_size, generator=generator, device="cpu")[:64].tolist())
    yield model
    for _ in range(updates):
        prompts = make_prompts(model, rows, generator=generator, longest=16)
        responses = sample(model, prompts, tokens=tokens, generator=generator).ids
        share = torch.tensor([sum(id_ in wanted for id_ in row) / len(row) for row in responses], device="cpu")
        advantage = (share - share.mean()) / (share.std() + 1e-6)

        log_prob = score_padded(model, prompts, responses)
        loss = -(advantage[:, None] * log_prob).sum() / sum(len(row) for row in responses)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        yield model


def copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Every linear layer of the blocks, without the head."""
    head = model.get_output_embeddings()
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head]


def rounded(weight: Tensor, *, bits: int, group: int | None = None) -> Tensor:
    """A weight rounded to signed integers of some bits, with one scale per row or per group within a row."""
    largest = 2 ** (bits - 1) - 1
    groups = weight if group is None else weight.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return ((groups / scale).round().clamp(-largest - 1, largest) * scale).reshape(weight.shape)


def quantized(model: nn.Module, *, bits: int, group: int | None = None, activations: bool = False) -> nn.Module:
    """A copy with rounded weights in every linear layer; with `activations`, what enters a layer is rounded too."""
    quantized_model = copied(model)
    for layer in linear_layers(quantized_model):
        size = group if group is None or layer.in_features % group == 0 else 4
        layer.weight.copy_(rounded(layer.weight, bits=bits, group=size))
        if activations:
            layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], bits=bits), *inputs[1:]))
    return quantized_model


def in_float8(model: nn.Module, *, activations: bool) -> nn.Module:
    """A copy whose linear layers hold float8 weights (e4m3, one scale per tensor), and take float8 inputs if asked."""

    def cast(values: Tensor) -> Tensor:
        scale = values.abs().max().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale

    float8_model = copied(model)
    for layer in linear_layers(float8_model):
        layer.weight.copy_(cast(layer.weight))
        if activations:
            layer.register_forward_pre_hook(lambda _, inputs: (cast(inputs[0]), *inputs[1:]))
    return float8_model


@contextmanager
def dropout(model: nn.Module, *, attention: float, residual: float, seed: int) -> Iterator[None]:
    """Score as a trainer that was left in training mode: dropout in the attention and after each block's MLP."""
    attentions = [module for module in model.modules() if hasattr(module, "attention_dropout")]
    for module in attentions:
        module.attention_dropout = attention
        module.train()

    def drop(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return functional.dropout(output, residual, training=True)

    blocks = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    hooks = [block.register_forward_hook(drop) for block in blocks]
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in attentions:
            module.attention_dropout = 0.0
            module.eval()


def with_rope_theta(model: nn.Module, theta: float) -> nn.Module:
    """A copy whose rotary embedding has another base, and whose configuration says so."""
    other = copied(model)
    parameters = getattr(other.config, "rope_parameters", None)  # an attribute of its own before transformers 5
    if parameters is None:
        other.config.rope_theta = theta
    else:
        parameters["rope_theta"] = theta
    for module in other.modules():
        if hasattr(module, "inv_freq"):
            pairs = module.inv_freq.numel()
            exponents = torch.arange(pairs, dtype=torch.float32, device="cpu") / pairs
            module.inv_freq.copy_(theta**-exponents)
    return other


def with_adapter(model: nn.Module, *, rank: int, seed: int) -> tuple[nn.Module, list[nn.Parameter], Callable[[], None]]:
    """A copy with a low-rank adapter on the query and value projections.

    Returns:
        The copy; the adapter's parameters; a function that sets the adapter to zero.
    """
    adapted = copied(model)
    generator = torch.Generator("cpu").manual_seed(seed)
    parameters, added = [], []
    for name, layer in adapted.named_modules():
        if not name.endswith(("q_proj", "v_proj")):
            continue
        down = torch.randn(rank, layer.in_features, generator=generator, device="cpu") / layer.in_features**0.5
        pair = _LowRank(nn.Parameter(down), nn.Parameter(torch.zeros(layer.out_features, rank, device="cpu")))
        nn.utils.parametrize.register_parametrization(layer, "weight", pair)
        parameters += [pair.down, pair.up]
        added.append(pair)

    def zero() -> None:
        for pair in added:
            pair.up.data.zero_()

    return adapted, parameters, zero


class _LowRank(nn.Module):
    """W + up · down, with a scale of 2."""

    def __init__(self, down: nn.Parameter, up: nn.Parameter) -> None:
        super().__init__()
        self.down, self.up = down, up

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 2.0 * self.up @ self.down
