"""Several frontend processes on one socket: HTTP workers hold the connections, and the main process
has everything else.

Writing a token to its socket costs about as much CPU time as making its text. So the main process
accepts connections and passes each of them to an HTTP worker, which parses HTTP and writes the
answers. Requests cross to the main process as ASGI messages, and the application handles them there
as if the connection were its own. So admission, keys, stores, jobs, metrics and the link to the
engine exist once.
"""
