"""``weight-update doctor`` and TLS: what is wrong on the way is named with its remedy."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from .kit import Ended, run

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


class NotFound(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_OPTIONS = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A server with a certificate of its own making, which has no routes."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, certificate
        server.shutdown()


def problem(ended: Ended) -> str:
    (found,) = ended.json["problems"]
    return f"{found['what']} -> {found['remedy']}"


def test_an_unknown_certificate_asks_for_its_authority(secured: tuple[int, Path]) -> None:
    ended = run("doctor", "--server", f"https://127.0.0.1:{secured[0]}", "--json")
    assert "CERTIFICATE_VERIFY_FAILED" in problem(ended)
    assert "--ca-file" in problem(ended)


def test_a_named_authority_is_used(secured: tuple[int, Path]) -> None:
    port, certificate = secured
    url = f"https://127.0.0.1:{port}"
    ended = run("doctor", "--server", url, "--ca-file", certificate, "--json")
    assert "no SGLang server and no vLLM server answers here" in problem(ended)


def test_plain_http_to_a_tls_server_is_told_to_try_https(secured: tuple[int, Path]) -> None:
    ended = run("doctor", "--server", f"http://127.0.0.1:{secured[0]}", "--json")
    assert "https://" in problem(ended)
