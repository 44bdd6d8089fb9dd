"""One row of another framework's dump as a row of the log: which values are whose, and where the response begins.

Only what is certain is converted. A row that contradicts the layout in `rollcorr.rollout_log.frameworks` is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollcorr.rollout_log.errors import log_error

Row = Mapping[str, Any]


def prime_rl_row(record: Row, *, file: str, row: int) -> Row:
    """A sequence of prime-rl's token export: prompt and response in one, every list as long as `token_ids`.

    `loss_mask` is true on the trained tokens. Where weights of loss components are recorded, a token was sampled by the
    policy if its weight of rl, or of ref_kl, is not 0. The others, distilled from another model, have no log-prob.

    Raises:
        RolloutLogError: another schema, lists of different lengths, or a value of another type.
    """
    if record.get("schema_version") != 1:
        title = f"a token export of prime-rl of schema {record.get('schema_version')!r:.40}; this release reads 1"
        raise log_error("version", title, fix="upgrade rollcorr", file=file, row=row)

    names = ("token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs", "advantages")
    lists: dict[str, Any] = {name: _list(record, name, file=file, row=row) for name in names}
    for name in ("rl_weights", "ref_kl_weights"):
        # A component that the run does not have is absent, or a list of nulls.
        values = record.get(name)
        if isinstance(values, list) and any(value is not None for value in values):
            lists[name] = values
    _same_length(lists, "token_ids", file=file, row=row)

    trained = lists["loss_mask"]
    sampled = [bool(token) for token in trained]
    if "rl_weights" in lists or "ref_kl_weights" in lists:
        nothing = [None] * len(trained)
        of_rl = [bool(weight) for weight in lists["rl_weights"]] if "rl_weights" in lists else sampled
        of_kl = [bool(weight) for weight in lists.get("ref_kl_weights", nothing)]
        sampled = [token and (rl or kl) for token, rl, kl in zip(sampled, of_rl, of_kl, strict=True)]

    start = trained.index(True) if True in trained else len(trained)
    return {
        "step": record.get("step"),
        "sequence_id": f"{record.get('rank')}/{record.get('export_sequence_idx')}",
        "prompt_ids": lists["token_ids"][:start],
        "response_ids": lists["token_ids"][start:],
        "response_mask": sampled[start:],
        "rollout_log_prob": lists["inference_logprobs"][start:],
        "log_prob": lists["trainer_logprobs"][start:],
        "advantages": lists["advantages"][start:],
    }


def slime_row(sample: Row, names: Mapping[str, str], *, length: str, file: str, row: int) -> dict[str, Any]:
    """A sample of slime: `tokens` are prompt and response, every other list is as long as the response.

    Args:
        sample: field → value; tensors are arrays by now.
        names: column of the log → field.
        length: the field with the length of the response.
        file: for messages.
        row: for messages.

    Raises:
        RolloutLogError: a list does not have the length of the response.
    """
    tokens, count = _list(sample, "tokens", file=file, row=row), sample.get(length)
    if type(count) is not int or not 0 <= count <= len(tokens):
        title = f"{length} is {count!r:.40} for {len(tokens)} tokens of prompt and response"
        raise log_error("length", title, file=file, row=row)

    start = len(tokens) - count
    found: dict[str, Any] = {"prompt_ids": tokens[:start], "response_ids": tokens[start:]}
    columns: dict[str, Any] = {"response_ids": found["response_ids"]}
    for column in ("response_mask", "rollout_log_prob", "old_log_prob", "advantages"):
        if column in names and sample.get(names[column]) is not None:
            columns[column] = _list(sample, names[column], file=file, row=row)
    _same_length(columns, "response_ids", file=file, row=row, names=names)
    found |= columns

    for column in ("kept_ids", "kept_offsets"):
        if sample.get(names[column]) is not None:
            found[column] = _list(sample, names[column], file=file, row=row)
    return found


def skyrl_row(tensors: Mapping[str, np.ndarray], names: Mapping[str, str], *, file: str, row: int) -> dict[str, Any]:
    """One row of SkyRL's training batch.

    The response is the last tokens that `attention_mask` marks, as many as `response_mask` has. The other tensors hold
    the response where `response_mask` is 1, padded on the left.

    Raises:
        RolloutLogError: the response is not in one piece, or longer than the sequence.
    """
    attention, response = tensors["attention_mask"] != 0, tensors["response_mask"] != 0
    tokens, count = tensors["sequences"][attention], int(response.sum())
    places = np.flatnonzero(response)
    in_one_piece = not count or int(places[-1]) - int(places[0]) + 1 == count
    if not in_one_piece or count > len(tokens):
        title = (
            f"response_mask has {count} ones for {len(tokens)} tokens of attention_mask, in one piece: {in_one_piece}"
        )
        fix = "only batches of SkyRL's own generators, where a response is in one piece, can be converted"
        raise log_error("layout", title, fix=fix, file=file, row=row)

    start = len(tokens) - count
    found: dict[str, Any] = {"prompt_ids": tokens[:start], "response_ids": tokens[start:]}
    for column in ("response_mask", "rollout_log_prob", "old_log_prob", "advantages"):
        if names[column] in tensors:
            found[column] = tensors[names[column]][response]
    found["response_mask"] = found["response_mask"] != 0
    return found


def _list(record: Row, name: str, *, file: str, row: int) -> list[Any] | np.ndarray:
    value = record.get(name)
    if isinstance(value, (list, np.ndarray)):
        return value
    raise log_error("type", f"{name} is a {type(value).__name__}, not a list", file=file, row=row)


def _same_length(
    lists: Mapping[str, Sequence[object] | np.ndarray],
    first: str,
    *,
    file: str,
    row: int,
    names: Mapping[str, str] | None = None,
) -> None:
    expected = len(lists[first])
    for name, values in lists.items():
        if len(values) != expected:
            title = f"{(names or {}).get(name, name)} has {len(values)} values for {expected} tokens"
            fix = "the dump contradicts itself; write it again"
            raise log_error("length", title, fix=fix, file=file, row=row)
