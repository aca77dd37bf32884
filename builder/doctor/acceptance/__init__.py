"""The acceptance run: every kind of engine built, run and compared on a machine with a GPU, step by step."""
