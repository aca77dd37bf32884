"""Drafts: guesses at the next tokens, which one step of the model verifies together. Bundles carry these modules."""
