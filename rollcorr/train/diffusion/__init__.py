"""Parts of the Flow-GRPO trainer: models, prompts, rewards, precision, schedules, sampling; all on diffusers classes."""
