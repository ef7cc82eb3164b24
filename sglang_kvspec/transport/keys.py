"""CURVE keys, which decide what may connect, and addresses that need none."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.auth
from zmq.utils import z85

from sglang_kvspec.core.errors import ConfigError, TransportError

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_KEY_CHARS = 40
_ALLOWED_FOLDER = (
    "allowed: a folder with certificates own.key_secret and peers/*.key in the format of "
    "zmq.auth.create_certificates"
)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """This end's key pair, and the public keys of the ends it talks to: a sender's list of
    receivers, a receiver's one sender. Keys are Z85 text of 40 characters."""

    public: bytes
    secret: bytes = field(repr=False)
    peers: frozenset[bytes]

    def __post_init__(self) -> None:
        for key in (self.public, self.secret, *self.peers):
            if len(key) != _KEY_CHARS:
                raise TransportError(
                    f"a CURVE key must be Z85 text of {_KEY_CHARS} characters, got {len(key)}"
                )
            try:
                z85.decode(key)
            except (KeyError, ValueError):
                raise TransportError("a CURVE key must be Z85 text, got other characters") from None
        if not self.peers:
            raise TransportError("CURVE needs the public key of at least one peer")

    def apply(self, socket: zmq.Socket[bytes], *, is_server: bool) -> None:
        if not zmq.has("curve"):
            raise TransportError(
                "CURVE keys need a libzmq with CURVE, this libzmq was built without"
            )
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        if is_server:
            socket.curve_server = True
            socket.zap_domain = b"kvspec"
            return
        if len(self.peers) != 1:
            raise TransportError(
                f"a receiver needs the key of one sender, got {len(self.peers)} peer keys"
            )
        (socket.curve_serverkey,) = self.peers


def load_keys(flag: str, folder: str) -> CurveKeys:
    """Load own.key_secret and peers/*.key, as zmq.auth.create_certificates() writes them. Raises
    ConfigError, which names `flag`, if they are missing or malformed."""
    own = Path(folder) / "own.key_secret"
    try:
        public, secret = zmq.auth.load_certificate(own)
        peers = [
            zmq.auth.load_certificate(path)[0] for path in sorted(own.parent.glob("peers/*.key"))
        ]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {folder}: {error} ({_ALLOWED_FOLDER})") from None
    if secret is None or not peers:
        missing = f"no secret key in {own.name}" if secret is None else "no peers/*.key"
        raise ConfigError(f"{flag} {folder}: {missing} ({_ALLOWED_FOLDER})")
    try:
        return CurveKeys(public, secret, frozenset(peers))
    except TransportError as error:
        raise ConfigError(f"{flag} {folder}: {error} ({_ALLOWED_FOLDER})") from None


def check_address(address: str, keys: CurveKeys | None, *, bind: bool) -> None:
    """Raise TransportError for an address that is not TCP, or off loopback without keys."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname:
        raise TransportError(f"expected tcp://host:port, got {address!r}")
    if keys is None and not _is_loopback(parts.hostname):
        verb = "listen on" if bind else "connect to"
        raise TransportError(
            f"cannot {verb} {address} without CURVE keys: only loopback addresses need none"
        )


class Gatekeeper:
    """Handler of libzmq's questions (ZAP, RFC 27) whether a CURVE client is one of the peers.
    Without a handler, libzmq admits every client that has the server's public key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        self._allowed = {z85.decode(key) for key in keys.peers}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ADDRESS)

    def serve(self) -> None:
        """Answer the questions that are waiting."""
        while self.socket.poll(0):
            request = self.socket.recv_multipart()
            version, request_id = request[0], request[1]
            is_peer = request[5:6] == [b"CURVE"] and request[6] in self._allowed
            status, text = (b"200", b"OK") if is_peer else (b"400", b"unknown key")
            self.socket.send_multipart([version, request_id, status, text, b"", b""])

    def close(self) -> None:
        self.socket.close(linger=0)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
