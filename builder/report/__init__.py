"""Reports of runs: JSON, page, charts, inspection."""
