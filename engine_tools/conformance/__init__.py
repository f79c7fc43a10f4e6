"""The conformance kit: rules for what existing clients expect of any OpenAI-compatible server.

`rules/` has one file per topic. A rule is a small function that sends requests to the server and
raises `RuleFailed`, which says what the server did wrong. Nothing here is specific to our own
server.
"""
