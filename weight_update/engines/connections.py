"""Connections to one host, kept between calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies
from urllib3 import HTTPResponse, Timeout

from weight_update.options import HttpOptions

# An update asks three things at once.
_KEPT = 4


class Connections(HTTPAdapter):
    """Asks routes below one URL; nothing is asked twice, and no redirect is followed.

    What requests makes of a call takes several times as long as the call itself, so the adapter
    only opens the pool of connections, by the options' authority and proxies, and that is asked.
    Nothing else is let in from the environment: no netrc entries, which would replace the bearer
    key, and no certificate bundles, which would replace the options'.

    Args:
        url: What all routes begin with.
        options: TLS and proxies.
    """

    def __init__(self, url: str, options: HttpOptions) -> None:
        super().__init__(pool_maxsize=_KEPT)
        self._url = url
        self._verify = options.ca_file or options.tls_verify
        self._proxies = get_environ_proxies(url) if options.use_proxies else {}
        self._opened: tuple[Any, str] | None = None

    def ask(
        self,
        method: str,
        route: str,
        body: bytes | None,
        headers: Mapping[str, str],
        limits: Timeout,
    ) -> HTTPResponse:
        """Sends one request and reads the whole answer.

        Raises:
            urllib3.exceptions.HTTPError: There was none.
            requests.RequestException: The URL, or the proxy's, leads nowhere.
        """
        pool, base = self._opened or self._open()
        answer: HTTPResponse = pool.urlopen(
            method,
            f"{base}{route}",
            body=body,
            headers=headers,
            timeout=limits,
            retries=False,
            redirect=False,
            assert_same_host=False,
        )
        return answer

    def close(self) -> None:
        """Closes the connections; the next call opens others."""
        self._opened = None
        super().close()  # type: ignore[no-untyped-call]

    def _open(self) -> tuple[Any, str]:
        """The pool, and how it is told the URL: as a path, or whole by a proxy."""
        request = requests.Request("GET", self._url).prepare()
        pool = self.get_connection_with_tls_context(request, self._verify, self._proxies)
        self.cert_verify(pool, self._url, self._verify, None)
        opened = self._opened = pool, self.request_url(request, self._proxies).rstrip("/")
        return opened
