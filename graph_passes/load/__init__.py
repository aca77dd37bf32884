"""From a model file to a normalized graph that patterns can match."""
