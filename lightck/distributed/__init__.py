"""Several ranks: who they are, what they agree on, and when a snapshot counts for all of them."""
