"""What a run tells: its metrics, trackers, run.json and model card."""
