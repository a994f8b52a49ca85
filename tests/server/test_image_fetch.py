"""Images by URL: off by default; when on, nobody's network can be reached through the server.

Nothing here leaves the machine: public addresses are played by servers on this one.
"""

from __future__ import annotations

import asyncio
import http.server
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmserve.errors import ImageTooLargeError, RequestError
from mmserve.server import image_fetch
from mmserve.server.errors import ImageURLNotAllowedError, InvalidImageURLError
from mmserve.server.image_fetch import ImageFetcher
from tests.server.conftest import Running, eventually, png
from tests.server.far_host import FAR, Dialler, Names, Trap, body, far_host, redirect, trap

DATA = png()
MANY = 1 << 20  # bytes


@pytest.fixture(scope="module")
def nobody() -> Iterator[Trap]:
    with trap() as made:
        yield made


def fetch(fetcher: ImageFetcher, url: str, max_bytes: int = MANY) -> bytes:
    return asyncio.run(fetcher.fetch(url, max_bytes, "p"))


def refused(
    fetcher: ImageFetcher, url: str, kind: type[RequestError], words: str | None = None
) -> None:
    with pytest.raises(kind, match=words) as caught:
        fetch(fetcher, url)
    assert caught.value.param == "p" and caught.value.status == 400
    assert len(caught.value.message) < 400


def asking(port: int, *hosts: str, names: Names | None = None) -> tuple[ImageFetcher, Dialler]:
    """One that finds the server on `port` under every name."""
    dialler = Dialler(port)
    hosts = hosts or ("http://example.org",)
    return ImageFetcher(hosts, resolve=names or Names([FAR]), dial=dialler), dialler


SPELLINGS = [
    *("127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0", "localhost", "LOCALHOST"),
    *("localhost.", "127.0.0.1.", "2130706433", "0x7f000001", "0x7F.0.0.1", "017700000001"),
    *("0177.0.0.1", "127.1", "127.0.1", "0", "00000000", "0x0", "127.0.0.0x1", "127.00.00.01"),
    *("[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
    *("[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]", "[::1%25lo]"),
    *("10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254", "198.18.0.1"),
    *("2852039166", "0xa9fea9fe", "[fd00:ec2::254]", "[::ffff:169.254.169.254]", "224.0.0.1"),
    *("255.255.255.255", "①②⑦.⓪.⓪.①", "127。0。0。1", "127.0.0.1%00.example.org"),
    *("example.org@127.0.0.1", "example.org:80@127.0.0.1", "127.0.0.1\\@example.org", "@127.0.0.1"),
]


@pytest.mark.parametrize("host", SPELLINGS)
def test_no_spelling_of_an_inner_address_is_dialled(nobody: Trap, host: str) -> None:
    """Every host is allowed, at the very port where somebody listens."""
    dialler = Dialler()
    for scheme in ("http", "https"):
        fetcher = ImageFetcher([f"{scheme}://*:{nobody.port}"], dial=dialler)
        refused(fetcher, f"{scheme}://{host}:{nobody.port}/a.png", ImageURLNotAllowedError)
    assert not dialler.dialled and not nobody.visits()


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "file://localhost/etc/passwd", "gopher://127.0.0.1:{port}/_x"),
        *("ftp://127.0.0.1:{port}/a", "dict://127.0.0.1:{port}/a", "unix:///run/docker.sock"),
        *("//127.0.0.1:{port}/", "127.0.0.1:{port}", "/etc/passwd", "", "http://", "data"),
        *("http://example.org\r\nHost: 127.0.0.1:{port}/", "\thttp://127.0.0.1:{port}/"),
    ],
)
def test_nothing_but_plain_http_is_fetched(nobody: Trap, url: str) -> None:
    fetcher = ImageFetcher(["*", "http://*", f"http://*:{nobody.port}"])
    refused(fetcher, url.format(port=nobody.port), ImageURLNotAllowedError)
    assert not nobody.visits()


def test_nothing_is_fetched_where_no_host_is_allowed(nobody: Trap) -> None:
    names = Names([FAR])
    fetcher = ImageFetcher((), resolve=names, dial=(dialler := Dialler()))
    for url in (f"http://127.0.0.1:{nobody.port}/", "https://example.org/a.png", "file:///x", ""):
        refused(fetcher, url, ImageURLNotAllowedError, "addresses are not fetched")
    assert not (names.asked or dialler.dialled or nobody.visits())


def test_a_host_that_is_not_listed_is_not_even_looked_up() -> None:
    names = Names([FAR])
    fetcher = ImageFetcher(["example.org"], resolve=names)
    for url in ("https://evil.net/", "http://example.org/", "https://example.org:8443/"):
        refused(fetcher, url, ImageURLNotAllowedError, "not fetched from")
    assert not names.asked


def test_an_allowed_image_is_fetched() -> None:
    asked: list[http.server.BaseHTTPRequestHandler] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        asked.append(request)
        body(DATA)(request)

    with far_host(answer) as port:
        fetcher, dialler = asking(port)
        assert fetch(fetcher, "http://Example.org./cat.png?size=1#top") == DATA
    assert dialler.dialled == [FAR]
    (request,) = asked
    assert request.path == "/cat.png?size=1"
    assert request.headers["Host"] == "example.org"
    assert not {"cookie", "authorization", "referer"} & {name.lower() for name in request.headers}


def test_a_name_is_looked_up_once_and_its_checked_address_dialled(nobody: Trap) -> None:
    """DNS rebinding: public when it is checked, loopback ever after."""
    names = Names([FAR], ["127.0.0.1"])
    host = f"http://example.org:{nobody.port}"
    with far_host(body(DATA)) as port:
        fetcher, dialler = asking(port, host, names=names)
        assert fetch(fetcher, f"{host}/a.png") == DATA
        assert (names.asked, dialler.dialled) == (["example.org"], [FAR])
        refused(fetcher, f"{host}/a.png", ImageURLNotAllowedError, "public")
    assert dialler.dialled == [FAR] and not nobody.visits()


def test_a_name_with_one_inner_address_among_public_ones_is_refused(nobody: Trap) -> None:
    host = f"http://example.org:{nobody.port}"
    for addresses in ([FAR, "127.0.0.1"], ["::1", FAR], [FAR, "fe80::1%lo"], []):
        fetcher, dialler = asking(nobody.port, host, names=Names(addresses))
        refused(fetcher, f"{host}/a.png", ImageURLNotAllowedError, "public")
        assert not dialler.dialled
    assert not nobody.visits()


@pytest.mark.parametrize(
    "location",
    [
        *("http://127.0.0.1:{port}/", "//127.0.0.1:{port}/", "http://localhost:{port}/"),
        *("http://[::1]:{port}/", "http://2130706433:{port}/", "http://u:p@example.org/"),
        *("http://169.254.169.254/latest/meta-data/", "https://example.org/", "file:///etc/passwd"),
        *(
            "gopher://127.0.0.1:{port}/_x",
            "http://elsewhere.net/",
            "http://[",
            "http://example.org:1/",
        ),
    ],
)
@pytest.mark.parametrize("status", [301, 308])
def test_each_redirect_is_checked_anew(nobody: Trap, location: str, status: int) -> None:
    answer = redirect(location.format(port=nobody.port), status)
    inner = f"http://*:{nobody.port}"  # allowed by name: the address alone is in the way
    with far_host(answer) as port:
        fetcher, dialler = asking(port, "http://example.org", inner, names=None)
        fetcher._network._resolve = _by_name
        refused(fetcher, "http://example.org/a.png", ImageURLNotAllowedError)
    assert dialler.dialled == [FAR] and not nobody.visits()


async def _by_name(host: str, port: int) -> list[str]:
    return [{"example.org": FAR, "localhost": "127.0.0.1"}.get(host, host)]


def test_a_redirect_to_the_same_name_looks_it_up_and_checks_it_again(nobody: Trap) -> None:
    names = Names([FAR], ["127.0.0.1"])
    host = f"http://example.org:{nobody.port}"
    with far_host(redirect("/again.png")) as port:
        fetcher, dialler = asking(port, host, names=names)
        refused(fetcher, f"{host}/a.png", ImageURLNotAllowedError, "public")
    assert dialler.dialled == [FAR] and not nobody.visits()


def test_redirects_are_followed_within_bounds_and_carry_no_cookie() -> None:
    seen: list[str | None] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        seen.append(request.headers.get("Cookie"))
        hops = int(request.path.strip("/"))
        (redirect(f"{hops - 1}") if hops else body(DATA))(request)

    with far_host(answer) as port:
        fetcher, _ = asking(port)
        assert fetch(fetcher, f"http://example.org/{image_fetch.MAX_REDIRECTS}") == DATA
        assert seen == [None] * (1 + image_fetch.MAX_REDIRECTS)
        refused(
            fetcher,
            f"http://example.org/{image_fetch.MAX_REDIRECTS + 1}",
            InvalidImageURLError,
            "leads on",
        )


def test_no_more_than_the_limit_is_read() -> None:
    sent = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            for _ in range(1000):
                request.wfile.write(bytes(100_000))
                sent.append(1)
        except OSError:
            pass

    with far_host(answer) as port:
        fetcher, _ = asking(port)
        with pytest.raises(ImageTooLargeError, match="1 MiB"):
            fetch(fetcher, "http://example.org/", MANY)
    assert len(sent) < 1000


def test_a_server_that_takes_its_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "MAX_SECONDS", 0.3)
    ended = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(MANY))
        request.end_headers()
        try:
            while True:
                request.wfile.write(b"x")
                time.sleep(0.01)
        except OSError:
            ended.append(1)

    with far_host(answer) as port:
        fetcher, _ = asking(port)
        refused(fetcher, "http://example.org/", InvalidImageURLError, "0.3 s")
    assert eventually(lambda: ended)


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda request: request.send_error(404), "answers 404"),
        (lambda request: request.send_error(401), "answers 401"),
        (body(b""), "nothing"),
        (body(DATA, Content_Encoding="gzip"), "packs"),
        (lambda request: request.wfile.write(b"\0\1\2 nonsense\r\n\r\n"), "as one should"),
        (lambda request: None, "as one should"),
        (redirect("http://example.org/\xe9"), "as one should"),
        (body(DATA, Content_Length="99"), "as one should"),
    ],
    ids=["404", "401", "empty", "packed", "nonsense", "silent", "letters", "cut"],
)
def test_an_answer_that_is_no_image_is_a_named_refusal(
    answer: Callable[[Any], None], words: str
) -> None:
    with far_host(answer) as port:
        fetcher, _ = asking(port)
        refused(fetcher, "http://example.org/", InvalidImageURLError, words)


def test_a_name_that_cannot_be_found_and_a_server_that_is_away_are_named_refusals() -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    with far_host(body(DATA)) as port:
        pass
    for resolve in (unknown, Names([FAR])):
        fetcher = ImageFetcher(["http://*"], resolve=resolve, dial=Dialler(port))
        refused(fetcher, "http://example.org/", InvalidImageURLError, "cannot be fetched")


def test_no_proxy_of_the_environment_is_used(nobody: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.port}")
    with far_host(body(DATA)) as port:
        fetcher, _ = asking(port)
        assert fetch(fetcher, "http://example.org/") == DATA
    assert not nobody.visits() and os.environ["http_proxy"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_over_tls_the_name_is_verified_not_the_address(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=example.org", "-addext", "subjectAltName=DNS:example.org"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with far_host(body(DATA), tls=context) as port:
        how: dict[str, Any] = {"resolve": Names([FAR]), "dial": Dialler(port)}
        trusting = ImageFetcher(["*"], trusted=str(certificate), **how)
        assert fetch(trusting, "https://example.org/a.png") == DATA
        refused(trusting, "https://other.org/a.png", InvalidImageURLError)
        refused(ImageFetcher(["*"], **how), "https://example.org/a.png", InvalidImageURLError)


def _ask(running: Running, *urls: str) -> list[Any]:
    http = running.http()
    chat = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts = [{"type": "input_image", "image_url": url} for url in urls]
    return [
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": chat}]}),
        http.post("/v1/responses", json={"input": [{"role": "user", "content": parts}]}),
    ]


def test_both_surfaces_fetch_what_is_allowed_each_time_anew(launch: Callable[..., Running]) -> None:
    """B10: an address is no identity."""
    made = iter([png("one"), png("two"), b"<html>"])
    running = launch(allow_image_hosts=("http://example.org",))
    with far_host(lambda request: body(next(made))(request)) as port:
        running.services.fetcher, _ = asking(port)
        answers = _ask(running, "http://example.org/a.png")
        assert [answer.status_code for answer in answers] == [200, 200]
        shown = [p.data for prompt in running.engine.prompts for m in prompt for p in m.parts]
        assert shown == [png("one"), png("two")]
        answer = _ask(running, "http://example.org/a.png")[0]
    assert answer.json()["error"]["code"] == "unsupported_image_type"


def test_of_too_many_addresses_none_is_fetched(launch: Callable[..., Running]) -> None:
    running = launch(allow_image_hosts=("http://example.org",))
    running.services.fetcher, dialler = asking(1)
    limit = running.engine.info.image_limits.max_images
    for answer in _ask(running, *["http://example.org/a.png"] * (limit + 1)):
        assert answer.json()["error"]["code"] == "too_many_images"
    assert not dialler.dialled


def test_a_wrong_entry_is_refused_at_the_start(launch: Callable[..., Running]) -> None:
    with pytest.raises(ValueError, match="no host such as"):
        launch(allow_image_hosts=("https://example.org/path",))
