"""Several engines: routers, nodes, shards and containers."""
