"""Hugging Face directories with quantized weights, read as the models that they are: one reader per format."""
