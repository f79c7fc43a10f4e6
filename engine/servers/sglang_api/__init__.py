"""SGLang's own API: the native form of /generate, and the routes about the server."""
