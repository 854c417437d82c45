"""What a run tells: metrics.jsonl, trackers, run.json and the model card."""
