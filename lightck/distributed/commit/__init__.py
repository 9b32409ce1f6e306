"""One outcome per step over all ranks: committed by all of them, or aborted."""
