"""From a Hugging Face directory to ONNX."""
