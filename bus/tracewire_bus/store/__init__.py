"""What Redis keeps: queues, records, blobs, edits, control streams."""
