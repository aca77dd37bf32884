"""Progress, tables, and streams that hostile names cannot disturb."""
