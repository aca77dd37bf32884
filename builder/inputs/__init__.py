"""Shapes and values of model inputs."""
