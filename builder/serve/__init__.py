"""A server for OpenAI's HTTP API: many requests share the batch of one decoder."""
