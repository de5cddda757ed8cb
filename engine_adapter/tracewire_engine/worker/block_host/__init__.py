"""The worker's side of blocks that run in processes of their own."""
