"""The failure path: what a failure is noticed by, and what is saved then."""
