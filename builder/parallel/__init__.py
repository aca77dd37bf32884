"""Models larger than one GPU: one engine for each rank, collectives between them."""
