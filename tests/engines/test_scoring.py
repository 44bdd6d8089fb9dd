"""Log-probs of responses: by hand on fixed logits, then the same whatever the padding."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rollcorr.engines.base import TokenBatch, pad_prompts
from rollcorr.engines.response_scoring import score_responses
from rollcorr.train.grpo.policy import make_tiny_policy


class FixedLogits(nn.Module):
    """A vocabulary of two whose odds depend only on the position: the logit of token 1 is its position."""

    def forward(self, *, position_ids, logits_to_keep, **_):
        logits = torch.stack([torch.zeros_like(position_ids), position_ids], dim=-1).float()
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def batch(prompt_ids, prompt_mask, response_ids, response_mask):
    return TokenBatch(
        torch.tensor(prompt_ids),
        torch.tensor(prompt_mask).bool(),
        torch.tensor(response_ids),
        torch.tensor(response_mask).bool(),
    )


def test_log_probs_and_entropies_by_hand():
    tokens = batch([[9, 0, 1]], [[0, 1, 1]], [[1, 0]], [[1, 1]])
    scores = score_responses(FixedLogits(), tokens, temperature=0.5)
    # The first response token is predicted at position 1, the second at position 2; logits are divided by 0.5.
    first, second = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(4))
    torch.testing.assert_close(scores.log_prob, torch.tensor([[math.log(first), math.log(second)]]))
    entropy = [-(p * math.log(p) + (1 - p) * math.log(1 - p)) for p in (first, second)]
    torch.testing.assert_close(scores.entropy, torch.tensor([entropy]))


def test_padding_on_either_side_changes_no_valid_log_prob(micro_policy):
    model = micro_policy.model.eval()
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        torch.randint(256, (2, 5), generator=generator),
        torch.randint(256, (2, 6), generator=generator),
    )
    prompts[1, :2] = 257
    tight = TokenBatch(prompts, prompts != 257, responses, torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool())
    wide = TokenBatch(
        nn.functional.pad(prompts, (3, 0), value=17),
        nn.functional.pad(tight.prompt_mask, (3, 0)),
        nn.functional.pad(responses, (0, 2), value=99),
        nn.functional.pad(tight.response_mask, (0, 2)),
    )
    expected, got = (score_responses(model, tokens).log_prob for tokens in (tight, wide))
    torch.testing.assert_close(got[:, :6][tight.response_mask], expected[tight.response_mask], atol=2e-6, rtol=0)
    alone = score_responses(model, batch([prompts[1, 2:].tolist()], [[1] * 3], [responses[1, :4].tolist()], [[1] * 4]))
    torch.testing.assert_close(expected[1:, :4], alone.log_prob, atol=2e-6, rtol=0)


def test_padding_sends_no_nan_into_the_gradient(micro_policy):
    tokens = batch([[257, 257, 257, 5]], [[0, 0, 0, 1]], [[7, 8, 257]], [[1, 1, 0]])
    scores = score_responses(micro_policy.model, tokens)
    scores.log_prob.masked_fill(~tokens.response_mask, 0.0).sum().backward()
    assert all(p.grad.isfinite().all() for p in micro_policy.model.parameters())


def test_entropy_carries_a_gradient_only_on_request(micro_policy):
    tokens = batch([[5]], [[1]], [[7]], [[1]])
    assert not score_responses(micro_policy.model, tokens).entropy.requires_grad
    assert score_responses(micro_policy.model, tokens, entropy_gradient=True).entropy.requires_grad


def test_a_half_precision_model_still_gets_a_float32_softmax():
    policy = make_tiny_policy(hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    policy.model.bfloat16()
    tokens = batch([[5]], [[1]], [[7]], [[1]])
    assert score_responses(policy.model, tokens).log_prob.dtype == torch.float32


def test_prompts_are_padded_on_the_left():
    ids, mask = pad_prompts([[1], [2, 3]], pad_token_id=9)
    assert ids.tolist() == [[9, 1], [2, 3]]
    assert mask.tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(ValueError, match="every prompt needs at least one token"):
        pad_prompts(prompts, pad_token_id=0)
