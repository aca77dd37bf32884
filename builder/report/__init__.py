"""What a run reports: JSON, page, charts, inspection."""
