"""Code that all packages share: files, ONNX Runtime sessions, number formats, errors."""
