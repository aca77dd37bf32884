"""A language model with key-value caches: its step, caches, positions, and the check of the export."""
