"""Input samples from files, Python loaders and text."""
