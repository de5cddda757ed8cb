"""The data that Redis keeps: queues, records, blobs, edits, control streams."""
