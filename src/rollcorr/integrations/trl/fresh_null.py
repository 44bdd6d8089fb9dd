"""Measure the null of a TRL run again, right after a weight sync: `attach(…, null_every=N)`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rollcorr.engines.row_seeds import row_seed
from rollcorr.integrations.trl.generation_batch import Trainer, train_or_eval

if TYPE_CHECKING:
    from rollcorr.engines import Rollout

logger = logging.getLogger(__name__)

# Prompts of the batch that the engine answers again.
ROWS = 8


def check_null_every(trainer: Trainer, every: int) -> None:
    """Check that the trainer can measure a null.

    Raises:
        ValueError: `every` is negative; or there is no engine, no Monitor, or an engine that truncates.
    """
    engine = getattr(getattr(trainer, "vllm_generation", None), "engine", None)
    sampling = getattr(engine, "sampling", None)
    if every < 0 or (every and (trainer._monitored_steps is None or sampling is None or sampling.restricts)):
        raise ValueError(
            f"null_every={every} needs a number of steps, attach(engine=…, monitor=…), and an engine without "
            "truncation: the engine samples again for the Monitor's null"
        )


def add_fresh_null(trainer: Trainer, batch: dict[str, Any], score: Callable[[dict[str, Any]], Tensor]) -> None:
    """Sample and score 8 prompts of a batch again for the Monitor's null, if it is due. Never raises.

    Args:
        trainer: the trainer; its engine has the weights of this step.
        batch: TRL's generation batch, with padded prompts.
        score: batch → the trainer's log-probs of its completions, (B, T) nats, without effect on the training.
    """
    every, step = getattr(trainer, "_null_every", 0), int(trainer.state.global_step)
    is_synced = getattr(trainer, "_last_loaded_step", step) == step
    if not (every and is_synced and train_or_eval(trainer) == "train" and step >= trainer._next_null):
        return
    trainer._next_null = step + every

    def score_again(rollout: Rollout) -> Tensor:
        tokens, kind = rollout.tokens, batch["prompt_mask"].dtype
        return score(
            {
                "prompt_ids": tokens.prompt_ids,
                "prompt_mask": tokens.prompt_mask.to(kind),
                "completion_ids": tokens.response_ids,
                "completion_mask": tokens.response_mask.to(kind),
            }
        )

    try:
        from rollcorr.engines import measure_null  # it needs Arrow

        rows = zip(batch["prompt_ids"][:ROWS].cpu(), batch["prompt_mask"][:ROWS].cpu() != 0, strict=True)
        prompts = [ids[inside].tolist() for ids, inside in rows]
        measured = measure_null(
            trainer.vllm_generation.engine,
            prompts,
            seed=row_seed(trainer.args.seed, "null", step),
            first_row=ROWS * trainer.accelerator.process_index,
            score=score_again,
        )
        trainer._monitored_steps.monitor.add(measured)
    except Exception as error:
        logger.error("step %d: the null was not measured again: %r", step, error)
