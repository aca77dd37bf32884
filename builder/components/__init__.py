"""Models of several graphs: parts with a manifest of what flows between them, built and run as one."""
