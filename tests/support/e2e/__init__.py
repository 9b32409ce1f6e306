"""Training jobs, and the means to run, kill and resume them."""
