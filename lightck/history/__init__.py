"""The history of a run: snapshots that are kept beyond the slots, each as a region of its own."""
