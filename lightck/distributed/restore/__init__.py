"""All ranks choose one snapshot to restore, and send it to ranks that lack it."""
