"""Where the server listens. Light to import: a taken port is known before time is spent on loading."""

import socket

from dcoco.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address. Raises ConfigError where that can't be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise address_error(host, port, error) from error
    return listener


def address_error(host: str, port: int, error: Exception) -> ConfigError:
    """Why the server can't have its address."""
    return ConfigError(f"can't serve at {host}:{port}: {error}; choose another --port or --host")
