"""`lightck chaos`: run a job, break it on purpose, and say whether it came back."""
