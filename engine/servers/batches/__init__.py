"""The Batch API: runs the requests of a JSONL file in the background."""
