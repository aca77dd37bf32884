"""KV-cache conversion: decoders that come as ONNX get the caches that engines generate with."""
