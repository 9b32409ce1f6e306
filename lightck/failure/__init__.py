"""The failure path: how failures are noticed, and what is saved then."""
