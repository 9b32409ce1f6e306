"""The training loop, listened to: steps, instants, what is due, and what became of it."""
