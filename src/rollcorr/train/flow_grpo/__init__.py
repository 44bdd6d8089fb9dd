"""Parts of the Flow-GRPO trainer: models, prompts, rewards, precision, schedules, sampling; on diffusers' classes."""
