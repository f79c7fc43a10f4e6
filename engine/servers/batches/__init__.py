"""The Batch API: JSONL files of requests, run in the background."""
