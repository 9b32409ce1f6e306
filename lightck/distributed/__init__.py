"""Jobs of several ranks: topology, agreement, and when a snapshot counts for all of them."""
