"""Types of the JSON files that runs leave, and their validator."""
