"""The pretrained model of the tests equals its description, at both head sizes."""

import torch
from stories import load_stories, load_stories_with_wide_heads


@torch.no_grad()
def test_padding_the_heads_with_zeros_leaves_the_function_as_it_is():
    ids = torch.randint(512, (2, 200), generator=torch.Generator().manual_seed(0))
    narrow, wide = (model(ids).logits for model in (load_stories(), load_stories_with_wide_heads(32)))
    torch.testing.assert_close(wide, narrow, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_it_is_a_trained_model():
    """It is far more certain of its own most likely text than a guess among 512 tokens."""
    model = load_stories()
    text = model.generate(torch.tensor([[1]]), max_new_tokens=100, do_sample=False, pad_token_id=0)
    log_prob = model(text).logits.log_softmax(-1)[:, :-1].gather(-1, text[:, 1:, None])
    assert log_prob.mean() > -1.5
