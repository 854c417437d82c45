"""The outputs of a run besides weights: metrics.jsonl, trackers, run.json and the model card."""
