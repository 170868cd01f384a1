"""TLS: certificates are checked, against the caller's own authority if one is named."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from weight_update.engines.http import EngineHttp
from weight_update.errors import ConfigurationError, EngineUnreachable
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@dataclass(frozen=True)
class TlsServer:
    url: str
    certificate: Path


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as served:
        served.socket = context.wrap_socket(served.socket, server_side=True)
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield TlsServer(f"https://127.0.0.1:{served.server_port}", certificate)
        served.shutdown()


def get(server: TlsServer, options: HttpOptions) -> int:
    client = EngineHttp(server.url, options)
    return client.call("GET", "/", phase="plan", deadline=Deadline(5)).status_code


def test_an_unknown_certificate_is_refused(server: TlsServer) -> None:
    with pytest.raises(EngineUnreachable, match="certificate") as failure:
        get(server, HttpOptions())

    assert failure.value.engine == server.url


def test_the_callers_own_authority_is_accepted(server: TlsServer) -> None:
    assert get(server, HttpOptions(ca_file=str(server.certificate))) == 200


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_checking_can_be_turned_off(server: TlsServer) -> None:
    assert get(server, HttpOptions(tls_verify=False)) == 200


def test_a_missing_authority_file_is_refused_at_construction_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"no_such_file\.pem"):
        HttpOptions(ca_file="no_such_file.pem")
