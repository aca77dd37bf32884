"""Compiles the plugin library and keeps it in a cache."""
