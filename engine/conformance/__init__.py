"""The conformance kit: what real clients rely on, as rules that any OpenAI-compatible server can be
held to.

`rules/` has one file per topic; a rule is a small function that talks to the server and raises
`RuleFailed` with what it saw. Nothing here knows our own server.
"""
