"""Types that cross a boundary: requests, typed events, messages to the engine, plugins."""
