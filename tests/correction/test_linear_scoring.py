"""Log-probs from hidden states equal log-probs from logits for every sampling spec."""

import pytest
import torch

from rollcorr import SamplingSpec
from rollcorr.core.sampling import KeptSets
from rollcorr.correction.scoring import actor_entropy, actor_log_prob, linear_actor_log_prob

ROLLOUT = SamplingSpec(temperature=0.7, top_p=0.9, top_k=3, logprobs="processed", engine="vllm")
SPECS = {
    "raw": SamplingSpec(temperature=0.7, logprobs="raw", engine="vllm"),
    "tempered": SamplingSpec(temperature=0.7, logprobs="tempered", engine="sglang"),
    "replayed": ROLLOUT.for_actor("replay"),
    "kept mass": ROLLOUT.for_actor("kept_mass"),
}
generator = torch.Generator().manual_seed(0)
HIDDEN, HEAD = torch.randn(4, 5, generator=generator), torch.randn(9, 5, generator=generator)
IDS, KEPT, LOG_MASS = torch.tensor([0, 1, 2, 8]), KeptSets.of([[0, 3], [4, 5], [2], [8, 1, 6]]), -torch.rand(4)


@pytest.mark.parametrize("name", SPECS)
def test_scores_equal_those_from_logits(name):
    given = {"kept": KEPT, "log_kept_mass": LOG_MASS}
    logits = HIDDEN @ HEAD.T
    expected = actor_log_prob(logits, IDS, SPECS[name], **given)
    actual = linear_actor_log_prob(HIDDEN, HEAD, IDS, SPECS[name], **given, entropy=True)
    torch.testing.assert_close(actual.log_prob, expected.log_prob)
    assert torch.equal(actual.outside, expected.outside)
    torch.testing.assert_close(actual.entropy, actor_entropy(logits, IDS, SPECS[name], kept=KEPT))


def test_what_the_support_needs_must_be_given():
    with pytest.raises(ValueError, match="support='replayed' needs the engine's kept sets"):
        linear_actor_log_prob(HIDDEN, HEAD, IDS, SPECS["replayed"])
    with pytest.raises(ValueError, match="support='kept_mass' needs log_kept_mass"):
        linear_actor_log_prob(HIDDEN, HEAD, IDS, SPECS["kept mass"])
    with pytest.raises(ValueError, match="support='recomputed' needs logits: use actor_log_prob"):
        linear_actor_log_prob(HIDDEN, HEAD, IDS, ROLLOUT.for_actor("recompute"))
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.1 depends on the tokens before"):
        linear_actor_log_prob(HIDDEN, HEAD, IDS, SamplingSpec(repetition_penalty=1.1, engine="vllm"))
