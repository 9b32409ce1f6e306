"""A snapshot back into live objects: put together, checked, and filled in."""
