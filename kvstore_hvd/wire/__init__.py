"""Messages between processes that prove to each other that they belong to the same job.

A connection carries JSON objects over a stream socket. The server speaks first, with a fresh nonce. The client answers
with a nonce of its own, who it is, and the HMAC-SHA256 over all of that with the job's secret. From then on each
direction has its own key, made from the secret and both nonces, and each message is protected together with its number:
what is altered, left out, repeated, put in another order, or sent back to its sender does not verify. The server's
first message says who it is, and proves to the client that it knows the secret too.

Whatever does not verify ends its connection and changes nothing else. Messages are not encrypted: no secrets in them.

Only `connect` waits. Nothing here has threads, or knows what the messages say.
"""

from kvstore_hvd.wire.connection import MAX_MESSAGE, Connection, WireError
from kvstore_hvd.wire.sockets import Address, Listener, connect

__all__ = ["MAX_MESSAGE", "Address", "Connection", "Listener", "WireError", "connect"]
