"""Frameworks that need lines to log both log-probs: their names for the columns of the log, their dumps, the lines."""

from __future__ import annotations

from rollcorr.rollout_log.framework_form import Dump, Framework, writer_lines

VERL = Framework(
    name="verl",
    version="0.9.1",
    tensors={
        "prompt_ids": "prompts",
        "response_ids": "responses",
        "response_mask": "response_mask",
        "rollout_log_prob": "rollout_log_probs",
        "old_log_prob": "old_log_probs",
        "token_rewards": "token_level_scores",
        "advantages": "advantages",
        "group_id": "uid",
    },
    batch="the DataProto of the trainer",
    dumps=(
        Dump(
            name="generations",
            files="{rollout_data_dir}/{step}.jsonl, {validation_data_dir}/{step}.jsonl",
            setting="trainer.rollout_data_dir, trainer.validation_data_dir",
            form="JSONL",
            recognized_by=frozenset({"input", "output", "score"}),
            fields={"step": "step", "reward": "score", "sequence_id": "request_id"},
            lacks="verl's dump of generations contains text and scores, and no log-prob of a token; no setting of verl "
            "makes it write them",
            layout="text; step, score and request_id are read, and the columns that the lines below add",
        ),
    ),
    needs="set actor_rollout_ref.rollout.calculate_log_probs=True",
    place="verl/trainer/ppo/ray_trainer.py, RayPPOTrainer.fit, above self._log_rollout_data",
    lines="""\
names = {"response_mask": "response_mask", "rollout_log_prob": "rollout_log_probs", "old_log_prob": "old_log_probs"}
reward_extra_infos_dict.update({column: batch.batch[name] for column, name in names.items()})""",
    log="{rollout_data_dir}",
)

TRL = Framework(
    name="TRL",
    version="1.16.0",
    tensors={
        "prompt_ids": "prompt_ids",
        "response_ids": "completion_ids",
        "response_mask": "completion_mask",
        "rollout_log_prob": "sampling_per_token_logps",
        "old_log_prob": "old_per_token_logps",
        "advantages": "advantages",
    },
    batch="the dictionary of GRPOTrainer._generate_and_score_completions",
    further_masks=("tool_mask",),
    dumps=(
        Dump(
            name="completions",
            files="{output_dir}/completions/completions_{step}.parquet",
            setting="log_completions=True",
            form="Parquet",
            recognized_by=frozenset({"step", "prompt", "completion", "advantage"}),
            fields={"step": "step"},
            lacks="TRL's table of completions contains text, rewards and one advantage per row, and no log-prob of a "
            "token; no setting of TRL makes it write them",
            layout="completions: text; only step is read: the file lacks the reward functions' weights",
        ),
    ),
    needs="set use_vllm=True",
    place="your script, in place of trainer.train()",
    lines="""\
from rollcorr import Monitor, RolloutSample
from rollcorr.integrations.trl import attach
with Monitor("run", rollouts=RolloutSample()) as monitor:
    attach(trainer, "measure", monitor=monitor)
    trainer.train()""",
    log="run",
)

AREAL = Framework(
    name="AReaL",
    version="4aef98d (1.0.4)",
    tensors={
        "response_mask": "loss_mask",
        "rollout_log_prob": "logprobs",
        "old_log_prob": "prox_logp",
        "advantages": "advantages",
    },
    dumps=(
        Dump(
            name="rollout",
            files="{log_dir}/{rollout,eval-rollout}/{version}/{task_id}.jsonl",
            setting="rollout.dump_to_file=true",
            form="JSONL",
            recognized_by=frozenset({"task_id", "sample_idx", "head_version", "tail_version"}),
            fields={"reward": "reward"},
            lacks="AReaL's dump of trajectories contains text and rewards, and no log-prob of a token",
            layout="text; only the reward is read",
        ),
    ),
    needs="set actor.recompute_logprob=true or actor.use_decoupled_loss=true",
    place="areal/trainer/ppo/actor.py, PPOActor._compute_advantages, below loss_mask = torch.roll(…)",
    lines=writer_lines(
        "{torch.distributed.get_rank()}_{self.engine.get_version()}",
        "loss_mask",
        'torch.roll(data["logprobs"], shifts=-1, dims=-1)',
        'data["prox_logp"]',
        step="self.engine.get_version()",
    ),
)

ROLL = Framework(
    name="ROLL",
    version="8eb27cc",
    tensors={
        "prompt_ids": "prompts",
        "response_ids": "responses",
        "response_mask": "response_mask",
        "rollout_log_prob": "infer_logprobs",
        "old_log_prob": "old_log_probs",
        "advantages": "advantages",
    },
    dumps=(
        Dump(
            name="rollout_dump",
            files="{rollout_dump_dir}/rollout_dump_data.step_{step}.jsonl",
            setting="rollout_dump_dir: an absolute path",
            form="JSONL",
            recognized_by=frozenset({"global_step", "responses", "scores", "sampling_params"}),
            lacks="ROLL's dump of rollouts contains text and scores, and no log-prob of a token",
        ),
        Dump(
            name="rollout_mock",
            files="{dump_dir}/{train,val}/step_{step}.pkl",
            setting="rollout_mock.enable: true",
            form="pickle",
            recognized_by=frozenset({"roll.distributed.scheduler.protocol.DataProto"}),
            lacks="ROLL's mock of rollouts is from before the training step, and contains no log-prob of the trainer",
        ),
    ),
    needs="set enable_old_logprobs_recompute: true",
    place='roll/pipeline/rlvr/rlvr_pipeline.py, RLVRPipeline.run, above metrics_mgr.add_metric("time/old_log_probs"…)',
    lines=writer_lines(
        "{global_step}",
        'batch.batch["response_mask"][:, 1:]',
        'batch.batch["infer_logprobs"]',
        'batch.batch["old_log_probs"]',
        step="global_step",
    ),
)

OPENRLHF = Framework(
    name="OpenRLHF",
    version="3c3be62 (0.11.0)",
    tensors={
        "response_mask": "action_mask",
        "rollout_log_prob": "rollout_log_probs",
        "old_log_prob": "action_log_probs",
        "advantages": "advantages",
    },
    needs="set --algo.advantage.is_correction_enable",
    place="openrlhf/trainer/ppo_trainer.py, train_step, below experiences = …make_experience_batch(rollout_samples)",
    lines=writer_lines(
        "{global_step}",
        "part.action_mask",
        "part.rollout_log_probs",
        "part.action_log_probs",
        step="global_step",
        each="for part in experiences",
    ),
)

MS_SWIFT = Framework(
    name="ms-swift",
    version="3602360 (4.6.0)",
    tensors={
        "response_mask": "completion_mask",
        "rollout_log_prob": "rollout_per_token_logps",
        "old_log_prob": "old_per_token_logps",
        "advantages": "advantages",
    },
    dumps=(
        Dump(
            name="completions",
            files="{output_dir}/completions.jsonl",
            setting="--log_completions true",
            form="JSONL",
            recognized_by=frozenset({"step", "prompt", "completion", "advantages"}),
            lacks="ms-swift's completions.jsonl contains text, rewards and advantages, and no log-prob of a token",
        ),
        Dump(
            name="completions of Megatron",
            files="{output_dir}/completions.jsonl",
            setting="--log_completions true",
            form="JSONL",
            recognized_by=frozenset({"gen_step", "prompt", "completion"}),
            lacks="ms-swift's completions.jsonl contains text and rewards, and no log-prob of a token",
        ),
    ),
    needs="let vLLM sample",
    place="swift/rlhf_trainers/grpo_trainer.py, GRPOTrainer._postprocess_batch, as its last lines",
    lines=writer_lines(
        "{self.state.global_step}_{self.accelerator.process_index}",
        "part.completion_mask",
        "part.rollout_per_token_logps",
        "part.old_per_token_logps",
        step="self.state.global_step",
        each='for part in (inputs["grpo_batch"] for inputs in batch_encoded_inputs)',
    ),
)

TINKER = Framework(
    name="tinker-cookbook",
    version="9dfcc3a",
    tensors={"response_mask": "mask", "rollout_log_prob": "logprobs", "advantages": "advantages"},
    dumps=(
        Dump(
            name="rollout_summaries",
            files="{log_path}/{iteration}/{split}_rollout_summaries.jsonl",
            setting="rollout_json_export=True",
            form="JSONL",
            recognized_by=frozenset({"iteration", "group_idx", "traj_idx", "sampling_client_step"}),
            fields={"step": "iteration", "group_id": "group_idx", "sequence_id": "traj_idx", "reward": "total_reward"},
            lacks="tinker-cookbook's rollout summaries hold lengths and rewards, and no log-prob of a token",
            layout="one row per trajectory",
        ),
    ),
    place="tinker_cookbook/rl/train.py, compute_full_batch_metrics_and_get_sampling_client, as its first lines",
    lines=writer_lines(
        "{i_batch}",
        'datum.loss_fn_inputs["mask"].to_torch()[None]',
        'datum.loss_fn_inputs["logprobs"].to_torch()[None]',
        "train[None]",
        step="i_batch",
        each="for datum, train in zip(data_D, training_logprobs_D)",
    ),
)
