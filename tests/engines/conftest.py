"""What the tests of engines share."""

import pytest
from micro_policy import make_micro_policy

from rollcorr.train.grpo.policy import Policy

pytest.register_assert_rewrite("engine_contract")  # no test file by its name


@pytest.fixture
def micro_policy() -> Policy:
    return make_micro_policy()
