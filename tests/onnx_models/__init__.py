"""ONNX models for the tests: hand-made spellings, and exports of small transformers."""
