"""The name of a server that a connection asks for, read from the first record of TLS, in which it is not encrypted."""

from __future__ import annotations

import ssl


def server_name(hello: bytes) -> str | None:
    """Return the name that a ClientHello has (RFC 6066, Sect. 3), empty if it has none; None if more must come.

    OpenSSL reads it, and sends nothing.

    Raises:
        ssl.SSLError: it is no ClientHello.
    """
    found: list[str] = []

    def note(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> int:
        found.append(name or "")
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = note
    incoming = ssl.MemoryBIO()
    incoming.write(hello)
    try:
        context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
    except ssl.SSLWantReadError:
        return None
    except ssl.SSLError:
        if not found:
            raise
    return found[0]
