"""The steps from a request to a verified engine."""
