"""`rollcorr check`: rollout logs read in parallel, measured, judged."""
