"""Checks that this machine can build and run engines, and the acceptance run on a GPU."""
