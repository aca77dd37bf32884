"""From a model to a verified TensorRT engine: targets, pipeline, verification, bundles and the commands."""
