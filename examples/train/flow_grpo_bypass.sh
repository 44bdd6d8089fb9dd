#!/bin/sh
# Bypass mode: the sampler's log-probs stand in for π_old, which saves the recompute pass, and drifting steps are rejected.
#   sh examples/train/flow_grpo_bypass.sh [dotted.name=value]…
# rollout_is is for diagnostics here: PPO's ratio is the importance ratio already. A warning says so, and another one that
# 0.5_2.0 is out of reach for log-probs averaged over 768 dimensions; algorithm.loss.reduction=sum brings it into reach.
exec ${ROLLCORR:-rollcorr} train "$(dirname "$0")/flow_grpo.yaml" \
  run_dir=runs/flow-grpo-bypass \
  algorithm.rollout_correction.bypass_mode=True \
  algorithm.rollout_correction.rollout_is=sequence \
  algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
  algorithm.rollout_correction.rollout_rs_threshold="0.5_2.0" \
  "$@"
