"""What shards of a model need besides tensors: who holds what, and how steps reach the ranks."""
