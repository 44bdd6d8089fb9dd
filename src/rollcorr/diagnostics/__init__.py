"""Statistics or a rollout log in; findings, figures and pages out."""
