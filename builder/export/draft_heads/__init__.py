"""Heads that draft: small models that continue a target's text from its hidden states."""
