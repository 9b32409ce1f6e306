"""`make gpu-check`: on a machine with a GPU, run the tests marked `gpu`, then measure.

Everything is done in parts, each in processes of its own and within a time of its own. What a part
has found is stored at once: a part that hangs, fails or no longer fits costs only itself.
"""
