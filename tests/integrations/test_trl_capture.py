"""`attach(…, keep_rollouts=DIRECTORY)`: what TRL's generation batches leave on disk."""

import errno
import logging

import pytest
import torch
from faulty_disk import Faults, faulty_disk
from trl_stand_in import StandInTrainer, recorded_batch

from rollcorr import read_rollout_log
from rollcorr.integrations.trl import attach
from rollcorr.monitor.capture import RolloutCapture

PROMPTS = {"prompt_ids": torch.tensor([[0, 0, 5], [7, 8, 9]]), "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1]])}


def trained(trainer, folder, steps=3, **options):
    capture = RolloutCapture(folder, **options)
    attach(trainer, "measure", keep_rollouts=capture).train(steps)
    assert capture.flush()
    capture.close()
    return list(read_rollout_log(folder))


def test_each_generation_batch_is_a_step(tmp_path):
    found = trained(StandInTrainer(), tmp_path / "ring")
    batch = recorded_batch()
    assert len(found) == 3
    for part in found:
        assert len(part) == len(batch["completion_mask"])
        assert part.has("rollout_log_prob")
        assert part.has("old_log_prob")
        assert part.has("response_ids")


@pytest.mark.parametrize("number", [0, errno.ENOSPC])
def test_the_training_is_the_same_without_a_capture(tmp_path, number):
    """With a disk that takes all, and with one that is full from the second call on."""
    with_capture, without = StandInTrainer(), StandInTrainer()
    faults = Faults(number, first=2 if number else 0, count=10**6)
    with faulty_disk(tmp_path, faults):
        faults.happen = True
        capture = RolloutCapture(tmp_path / "ring")
        attach(with_capture, "measure", keep_rollouts=capture).train(3)
        assert capture.flush() is not bool(number)
        faults.happen = False
        capture.close()
    attach(without, "measure").train(3)
    assert with_capture.state.log_history == without.state.log_history


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    capture = RolloutCapture(tmp_path / "file")
    with caplog.at_level(logging.ERROR):
        attach(StandInTrainer(), "measure", keep_rollouts=capture).train(2)
        capture.close()
    assert caplog.text.count("rollouts are not kept") == 1


def test_prompts_are_kept_without_padding(tmp_path):
    for name, options, expected in (("with", {}, [[5], [7, 8, 9]]), ("without", {"prompts": False}, None)):
        capture = RolloutCapture(tmp_path / name, **options)
        capture.add(torch.ones(2, 3), {"prompt_ids": PROMPTS["prompt_ids"]}, prompt_mask=PROMPTS["prompt_mask"])
        capture.step()
        capture.close()
        (found,) = read_rollout_log(tmp_path / name)
        if expected is None:
            assert not found.has("prompt_ids")
        else:
            assert [list(ids) for ids in found.objects("prompt_ids")] == expected
