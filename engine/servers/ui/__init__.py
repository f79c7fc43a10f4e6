"""The web page: static files in `static/`, and the routes that serve them."""
