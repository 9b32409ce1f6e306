"""A survivor writes a dead rank's share of the last step."""
