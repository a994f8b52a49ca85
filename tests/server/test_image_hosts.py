"""What a URL says, whom a list allows, and which addresses are public."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.server.image_hosts import PORTS, is_public, parse_address, parse_allowed

PRIVATE = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1"),
    *("172.31.255.255", "192.168.1.1", "169.254.169.254", "169.254.0.1", "100.64.0.1"),
    *("100.127.255.255", "192.0.0.8", "192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1"),
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "224.0.1.1", "239.1.1.1", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "fe80::1", "fe80::1%eth0"),
    *("fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001::1", "2001:db8::1"),
    *("2002:7f00:1::", "2002:808:808::", "3fff::1", "5f00::1", "100::1", "64:ff9b:1::1"),
    *("64:ff9b::7f00:1", "64:ff9b::169.254.169.254", "2606:4700::1%eth0", "", "localhost"),
]
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # as public as what is inside
PUBLIC = ["93.184.216.34", "8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700:4700::1111"]


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_of_the_open_internet_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [*PUBLIC, "64:ff9b::8.8.8.8"])
def test_an_address_of_the_open_internet_is_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_in_another_protocols_clothes_is_never_more_public(
    inner: ipaddress.IPv4Address,
) -> None:
    number = int(inner)
    mapped = [ipaddress.IPv6Address(prefix | number) for prefix in (0, 0xFFFF << 32)]
    tunnelled = ipaddress.IPv6Address(0x2002 << 112 | number << 80)
    translated = ipaddress.IPv6Address(0x64FF9B << 96 | number)
    assert not any(is_public(str(ip)) for ip in (*mapped, tunnelled))
    assert is_public(str(translated)) == is_public(str(inner))


@given(st.ip_addresses())
def test_what_the_standard_library_calls_private_is_never_public(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    closed = ip.is_private or ip.is_multicast or ip.is_reserved
    assert ip in TRANSLATED or not (is_public(str(ip)) and closed)


@pytest.mark.parametrize(
    "url, said",
    [
        ("https://example.org", ("https", "example.org", 443, "/")),
        ("HTTPS://EXAMPLE.org./a?b#c", ("https", "example.org", 443, "/a?b")),
        ("http://example.org:8080?q=1", ("http", "example.org", 8080, "/?q=1")),
        ("https://[2606:4700::1111]:8443/x", ("https", "2606:4700::1111", 8443, "/x")),
        ("https://93.184.216.34/a%20b", ("https", "93.184.216.34", 443, "/a%20b")),
        ("https://xn--fsq.example/猫.png", ("https", "xn--fsq.example", 443, "/%E7%8C%AB.png")),
        ("https://h/a@b:c", ("https", "h", 443, "/a@b:c")),
    ],
)
def test_a_plain_url_is_read(url: str, said: tuple[str, str, int, str]) -> None:
    address = parse_address(url)
    assert (address.scheme, address.host, address.port, address.target) == said
    assert parse_address(address.url) == address


CRAFTED = [
    *("", "example.org", "//example.org/", "https:/example.org", "https:example.org", "https://"),
    *("file:///etc/passwd", "gopher://example.org:70/_x", "ftp://example.org/a.png", "/etc/x"),
    *("dict://example.org", "jar:http://example.org!/", "ldap://example.org", "unix:/run/x"),
    *("javascript:1", "blob:https://example.org/1", "about:blank", "httpx://example.org"),
    *("https://user@example.org/", "https://user:word@example.org/", "https://@example.org/"),
    *("https://example.org@127.0.0.1/", "https://127.0.0.1#@example.org\n/", "https://a@b@c/"),
    *("https://example.org\\@127.0.0.1/", "https:\\\\example.org", "https://example.org\\x"),
    *("https://example.org /", " https://example.org", "https://example.org/\r\nHost: x", "\0"),
    *("https://example.org/a b", "https://example.org/\ttab", "https://example.org/a\x7f"),
    *("https://example.org:0/", "https://example.org:65536/", "https://example.org:/"),
    *("https://example.org:80:90/", "https://example.org:-1/", "https://example.org:８０/"),
    *(
        "https://ex%61mple.org/",
        "https://127%2e0.0.1/",
        "https://①②⑦.⓪.⓪.①/",
        "https://猫.example/",
    ),
    *("https://127。0。0。1/", "https://example..org/", "https://.example.org/", "https://../"),
    *("https://2130706433/", "https://0x7f000001/", "https://017700000001/", "https://127.1/"),
    *("https://0177.0.0.1/", "https://127.0.0.0x1/", "https://127.0.1/", "https://0/"),
    *("https://0x7f.1/", "https://1.2.3.4.5/", "https://256.0.0.1/", "https://127.00.0.1/"),
    *("https://example.0x7f/", "https://[::1/", "https://::1/", "https://[::1%25eth0]/"),
    *("https://[fe80::1%eth0]/", "https://[127.0.0.1]/", "https://[::g]/", "https://[]/"),
    f"https://{'a' * 64}.org/",
]


@pytest.mark.parametrize("url", CRAFTED)
def test_what_two_programs_might_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        parse_address(url)


@given(
    st.text(alphabet=st.characters(max_codepoint=0x2FF)) | st.from_regex(r"https?://[!-~]{0,40}")
)
def test_any_text_is_an_address_without_a_user_or_none(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert address.scheme in PORTS and 0 < address.port < 65536
    assert address.target.isascii() and address.target.isprintable() and " " not in address.target
    assert not set(address.host) & set("@/\\?#%[] \r\n")
    assert parse_address(address.url) == address


@pytest.mark.parametrize(
    "rule, allowed, refused",
    [
        ("example.org", "https://example.org/x", "https://www.example.org/x"),
        ("example.org", "https://EXAMPLE.ORG./", "https://example.org.evil.net/"),
        ("example.org", "https://example.org:443/", "http://example.org/"),
        ("example.org", "https://example.org/", "https://example.org:8443/"),
        ("*.example.org", "https://a.b.example.org/", "https://example.org/"),
        ("*.example.org", "https://a.example.org/", "https://aexample.org/"),
        ("http://example.org:8080", "http://example.org:8080/", "http://example.org/"),
        ("*", "https://anything.net/", "http://anything.net/"),
        ("http://*", "http://anything.net/", "http://anything.net:81/"),
        ("[2606:4700::1111]", "https://[2606:4700:0::1111]/", "https://[2606:4700::1112]/"),
    ],
)
def test_a_list_names_scheme_host_and_port(rule: str, allowed: str, refused: str) -> None:
    (entry,) = parse_allowed([rule])
    assert entry.allows(parse_address(allowed))
    assert not entry.allows(parse_address(refused))


@pytest.mark.parametrize(
    "text", ["", "ftp://a", "https://", "a/b", "u@a", "a b", "*a", "a.*", "**", "a:0", "127.1"]
)
def test_an_entry_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_allowed([text])
