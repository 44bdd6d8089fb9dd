"""Frameworks with a dump of both log-probs: their names for the columns of the log, and the layout of their dumps."""

from __future__ import annotations

from rollcorr.rollout_log.framework_form import Dump, Framework

PRIME_RL = Framework(
    name="prime-rl",
    version="559b447 (0.8.0)",
    tensors={
        "response_mask": "loss_mask",
        "rollout_log_prob": "inference_logprobs",
        "log_prob": "trainer_logprobs",
        "advantages": "advantages",
    },
    dumps=(
        Dump(
            name="token_exports",
            files="{output_dir}/token_exports/step_{step}/rank_{rank}.jsonl",
            setting="trainer.enable_token_export = true",
            form="JSONL",
            recognized_by=frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}),
            fields={
                "step": "step",
                "sequence_id": "rank, export_sequence_idx",
                "prompt_ids": "token_ids",
                "response_ids": "token_ids",
                "response_mask": "loss_mask, rl_weights, ref_kl_weights",
                "rollout_log_prob": "inference_logprobs",
                "log_prob": "trainer_logprobs",
                "advantages": "advantages",
            },
            layout="prompt and response in one row: the response begins at the first true of loss_mask; tokens with "
            "neither rl nor ref_kl weight (not sampled) are masked; π_old is not logged",
        ),
        Dump(
            name="traces",
            files="{output_dir}/rollouts/step_{step}/{train,eval}/{all,effective}/traces.jsonl",
            setting="always written",
            form="JSONL",
            recognized_by=frozenset({"traces", "env", "errors"}),
            lacks="prime-rl's traces.jsonl contains episodes of the orchestrator, and no log-prob of the trainer",
            instead="set trainer.enable_token_export = true, and read {output_dir}/token_exports/step_*/rank_*.jsonl",
        ),
    ),
)

SLIME = Framework(
    name="slime",
    version="624b824 (0.3.1)",
    tensors={
        "response_mask": "loss_masks",
        "rollout_log_prob": "rollout_log_probs",
        "old_log_prob": "train_log_probs or log_probs",
        "advantages": "advantages",
    },
    batch="rollout_data, and the arguments of --custom-tis-function-path",
    total_lengths="total_lengths",
    dumps=(
        Dump(
            name="train_data",
            files="{dump_details}/train_data/{rollout_id}.pt",
            setting="--dump-details DIR, or --save-debug-train-data PATH",
            form="torch.save",
            recognized_by=frozenset({"tokens", "response_lengths", "loss_masks"}),
            fields={
                "step": "rollout_id",
                "sequence_id": "sample_index",
                "prompt_ids": "tokens",
                "response_ids": "tokens",
                "response_mask": "loss_masks",
                "rollout_log_prob": "rollout_log_probs",
                "old_log_prob": "log_probs",
                "reward": "raw_reward",
                "advantages": "advantages",
                "kept_ids": "rollout_top_p_token_ids",
                "kept_offsets": "rollout_top_p_token_offsets",
            },
            recorded_with={
                "rollout_log_prob": "let the generate function fill Sample.rollout_log_probs, as slime's own does",
                "old_log_prob": "train with a policy loss",
            },
            layout="the last response_lengths tokens are the response; the other columns have its length. With "
            "--use-rollout-logprobs and several updates per rollout, log_probs are π_θ, not π_old",
        ),
        Dump(
            name="rollout_data",
            files="{dump_details}/rollout_data/{rollout_id}.pt",
            setting="--dump-details DIR, or --save-debug-rollout-data PATH",
            form="torch.save",
            recognized_by=frozenset({"tokens", "response_length", "loss_mask"}),
            fields={
                "step": "rollout_id",
                "sequence_id": "index",
                "group_id": "group_index",
                "prompt_ids": "tokens",
                "response_ids": "tokens",
                "response_mask": "loss_mask",
                "rollout_log_prob": "rollout_log_probs",
                "reward": "reward",
                "kept_ids": "rollout_top_p_token_ids",
                "kept_offsets": "rollout_top_p_token_offsets",
            },
            lacks="slime's dump of rollouts contains the sampler's log-probs, and none of the trainer",
            instead="use --dump-details DIR or --save-debug-train-data PATH, and read the train_data files",
            layout="the last response_length tokens are the response; a reward that is a dictionary is not taken",
        ),
    ),
)

SKYRL = Framework(
    name="SkyRL",
    version="a956457 (0.3.0)",
    tensors={
        "response_mask": "loss_mask or response_mask",
        "rollout_log_prob": "rollout_logprobs",
        "old_log_prob": "action_log_probs or old_log_probs",
        "token_rewards": "rewards",
        "advantages": "advantages",
    },
    batch="TrainingInputBatch, and the arguments of a policy loss",
    dumps=(
        Dump(
            name="dumped_data",
            files="{export_path}/dumped_data/global_step_{step}_training_input.pkl",
            setting="trainer.dump_data_batch=true",
            form="pickle",
            recognized_by=frozenset({"sequences", "attention_mask", "response_mask", "loss_mask"}),
            fields={
                "step": "{step} in the name of the file",
                "prompt_ids": "sequences",
                "response_ids": "sequences",
                "response_mask": "loss_mask",
                "rollout_log_prob": "rollout_logprobs",
                "old_log_prob": "action_log_probs",
                "advantages": "advantages",
            },
            recorded_with={
                "rollout_log_prob": "set generator.sampling_params.logprobs=1",
                "old_log_prob": "use a loss or a trainer.algorithm.off_policy_correction that reads π_old; "
                "otherwise SkyRL skips its forward pass",
            },
            layout="tensors of a batch: the response is the last tokens of attention_mask, as many as response_mask "
            "has; other columns are read where response_mask is 1; padding rows are dropped",
        ),
        Dump(
            name="dumped_evals",
            files="{export_path}/dumped_evals/global_step_{step}_evals/*.jsonl",
            setting="trainer.dump_eval_results=true",
            form="JSONL",
            recognized_by=frozenset({"input_prompt", "output_response", "score"}),
            lacks="SkyRL's dump of an evaluation contains text and scores, and no log-prob of a token",
            instead="set trainer.dump_data_batch=true, and read {export_path}/dumped_data/*.pkl",
        ),
    ),
)

NEMO_RL = Framework(
    name="NeMo-RL",
    version="7ea279a",
    tensors={
        "response_mask": "token_mask",
        "rollout_log_prob": "generation_logprobs",
        "old_log_prob": "prev_logprobs",
        "advantages": "advantages",
    },
    batch="train_data of grpo_train",
    further_masks=("sample_mask",),
    dumps=(
        Dump(
            name="train_data",
            files="{log_dir}/train_data_step{step}.jsonl",
            setting="always written, except with env.should_log_nemo_gym_responses=true",
            form="JSONL",
            recognized_by=frozenset({"generation_logprobs", "prev_logprobs", "token_loss_mask", "sample_loss_mask"}),
            fields={
                "step": "{step} in the name of the file",
                "sequence_id": "idx",
                "prompt_ids": "token_ids",
                "response_ids": "token_ids",
                "response_mask": "token_loss_mask, sample_loss_mask",
                "rollout_log_prob": "generation_logprobs",
                "old_log_prob": "prev_logprobs",
                "reward": "filtered_rewards, rewards",
                "advantages": "advantages",
            },
            recorded_with={"old_log_prob": "set loss_fn.force_on_policy_ratio=false: else NeMo-RL logs zeros"},
            layout="each value is a one-item list; a row has input_lengths tokens (prompt, response), then padding; "
            "the response begins at the first 1 of token_loss_mask; a row with sample_loss_mask 0 has no sampled token "
            "and no reward",
        ),
        Dump(
            name="val_data",
            files="{log_dir}/val_data_step{step}.jsonl",
            setting="always written",
            form="JSONL",
            recognized_by=frozenset({"content", "idx"}),
            lacks="NeMo-RL's files of conversations hold text and rewards, and no log-prob of a token",
            instead="read the train_data_step*.jsonl of a GRPO or PPO run",
        ),
    ),
)
