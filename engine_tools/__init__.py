"""What helps to work on the engine and does not serve: checks, comparisons, drawings, scripts."""
