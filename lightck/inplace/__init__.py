"""Recovery in place: ranks that live stay inside their collective until a replacement joins."""
