"""Certificates of a test's own, and servers behind TLS."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteStream
from anyio.streams.tls import TLSListener
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.redis.servers import HOST, Running, Servers, free_port, running_servers


@dataclass
class Certificates:
    """A throw-away authority, and what it signed for a server and a client."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """One for everybody: signed for this host."""
        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
        begins = ends - datetime.timedelta(days=2)

        def signed(name: str, key: Any, issuer: x509.Name, by: Any, *, authority: bool) -> x509.Certificate:
            builder = x509.CertificateBuilder(
                issuer_name=issuer,
                subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
                public_key=key.public_key(),
                serial_number=x509.random_serial_number(),
                not_valid_before=begins,
                not_valid_after=ends,
            )
            builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            # From Python 3.13 on, clients refuse certificates without these.
            of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
            builder = builder.add_extension(of_issuer, critical=False)
            own_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
            builder = builder.add_extension(own_key, critical=False)
            may = dict.fromkeys(
                ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
            )
            usage = x509.KeyUsage(
                digital_signature=True, key_cert_sign=authority, encipher_only=False, decipher_only=False, **may
            )
            builder = builder.add_extension(usage, critical=True)
            if not authority:
                names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))])
                builder = builder.add_extension(names, critical=False)
            return builder.sign(by, hashes.SHA256())

        root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        root = signed(
            "authority",
            root_key,
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]),
            root_key,
            authority=True,
        )
        own = signed("redis", key, root.subject, root_key, authority=False)
        made = cls(folder / "ca.pem", folder / "own.pem", folder / "key.pem")
        made.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))
        made.certificate.write_bytes(own.public_bytes(serialization.Encoding.PEM))
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return made

    @property
    def query(self) -> str:
        """What a URL says of them."""
        return f"ssl_ca_certs={self.authority}&ssl_certfile={self.certificate}&ssl_keyfile={self.key}"


@asynccontextmanager
async def terminator(port: int, certificates: Certificates, front: int) -> AsyncIterator[None]:
    """Takes TLS off at the port `front`, before a server that knows none, as is done for those."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.authority))
    context.load_cert_chain(certificates.certificate, certificates.key)
    context.verify_mode = ssl.CERT_REQUIRED

    async def serve(outer: ByteStream) -> None:
        async def forward(source: ByteStream, target: ByteStream) -> None:
            async for data in source:
                await target.send(data)
            group.cancel_scope.cancel()

        try:
            async with outer, await anyio.connect_tcp(HOST, port) as inner, anyio.create_task_group() as group:
                group.start_soon(forward, outer, inner)
                group.start_soon(forward, inner, outer)
        except* (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            pass

    listener = TLSListener(
        await anyio.create_tcp_listener(local_host=HOST, local_port=front), context, standard_compatible=False
    )
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield
        group.cancel_scope.cancel()


@asynccontextmanager
async def behind_tls(version: str, certificates: Certificates) -> AsyncIterator[str]:
    """The address of a server that speaks TLS and wants a client's certificate."""
    async with running_servers(version) as servers:
        if int(version[0]) >= 7:
            port = free_port()
            server = await servers.start(
                url=f"rediss://{{host}}:{{port}}?{certificates.query}",
                port=port,
                settings=[
                    ("port", 0),
                    ("tls-port", port),
                    ("tls-cert-file", certificates.certificate),
                    ("tls-key-file", certificates.key),
                    ("tls-ca-cert-file", certificates.authority),
                ],
            )
            yield server.address
        else:
            # This build has no TLS.
            server = await servers.start()
            front = free_port()
            async with terminator(server.port, certificates, front):
                yield f"{HOST}:{front}"


@asynccontextmanager
async def named_by_tls(
    servers: Servers, certificates: Certificates
) -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    """Starts servers which sentinels and clusters name to clients by an address that speaks TLS: the server's own, or
    that of the terminator before a server without TLS. The address is the `front` of each.
    """
    own = int(servers.version[0]) >= 7
    async with AsyncExitStack() as before:

        async def start(*first: str, **more: Any) -> Running:
            port = free_port()
            front = port if own else free_port()
            settings: dict[str, Any] = {name.replace("_", "-"): value for name, value in more.items()}
            url = ""
            if own:
                url = f"rediss://{{host}}:{{port}}?{certificates.query}"
                settings |= {
                    "port": 0,
                    "tls-port": port,
                    "tls-cert-file": certificates.certificate,
                    "tls-key-file": certificates.key,
                    "tls-ca-cert-file": certificates.authority,
                    "tls-replication": "yes",
                    "tls-cluster": "yes",
                }
            elif "cluster-enabled" in settings:
                settings |= {"cluster-announce-port": front, "cluster-announce-bus-port": port + 10_000}
            server = await servers.start(*first, url=url, port=port, settings=[*settings.items()])
            if not own:
                await before.enter_async_context(terminator(port, certificates, front))
            server.front = f"{HOST}:{front}"
            return server

        yield start
