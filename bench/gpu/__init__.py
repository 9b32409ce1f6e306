"""`make gpu-check`: on a machine with a GPU, the tests marked `gpu`, then what it reaches.

Everything is done in parts, each in processes of its own and in a time of its own. What a part has
found is stored at once: one that hangs, fails or no longer fits costs nothing but itself.
"""
