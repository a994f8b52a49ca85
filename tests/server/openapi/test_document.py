"""The description against the application: every route, field and status, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jsonschema_rs
import pytest
from starlette.routing import Route

from mmserve import errors
from mmserve.config import ServerConfig
from mmserve.errors import RequestError
from mmserve.server.app import create_app
from mmserve.server.chat import parse_chat
from mmserve.server.deadline import FIELD as TIMEOUT
from mmserve.server.errors import ENDINGS
from mmserve.server.openapi import answers, requests
from mmserve.server.openapi.document import PARAMETER, document, named_errors
from mmserve.server.openapi.operations import OPERATIONS
from mmserve.server.responses_request import parse_response_request
from mmserve.server.services import Services
from tests.server.conftest import ADMIN_KEY, KEY, Running, png
from tests.server.fake_engine import FakeEngine, FakeInfo

ROUTES = create_app(FakeEngine(), ServerConfig()).routes
DOCUMENT = document(ROUTES)
BY_METHOD = {
    (method.upper(), path): operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
# Where only the socket speaks, or no route could answer.
NOT_OF_A_ROUTE = {405: "a method that no operation has"}


def test_every_method_of_every_route_is_described_and_nothing_else() -> None:
    served = {
        (method, PARAMETER.sub(r"{\1}", route.path))
        for route in ROUTES
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    heads = {("HEAD", path) for method, path in served if method == "GET"}
    assert set(BY_METHOD) == served - heads
    assert heads <= served, "the description says that HEAD is answered as GET is"
    assert set(OPERATIONS) == set(BY_METHOD)


def test_operations_have_names_of_their_own_and_say_what_they_do() -> None:
    names = [operation["operationId"] for operation in BY_METHOD.values()]
    assert len(set(names)) == len(names)
    assert all(operation["description"] for operation in BY_METHOD.values())


def schemas(value: Any) -> Iterator[Any]:
    """Every schema of a document, and every part of one."""
    if isinstance(value, dict):
        yield value
        for part in value.values():
            yield from schemas(part)
    elif isinstance(value, list):
        for part in value:
            yield from schemas(part)


def test_every_schema_is_one_and_every_reference_leads_to_one_that_is_used() -> None:
    named = DOCUMENT["components"]["schemas"]
    for name, schema in named.items():
        jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
        assert name in {*requests.SCHEMAS, *answers.SCHEMAS}
    assert not set(requests.SCHEMAS) & set(answers.SCHEMAS)
    used = {each["$ref"].rpartition("/")[2] for each in schemas(DOCUMENT) if "$ref" in each}
    assert used == set(named)


class Body(dict[str, Any]):
    """Remembers which of its fields somebody asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)


def test_a_parser_reads_the_fields_that_are_described_whatever_the_others_say() -> None:
    services = cast(Services, SimpleNamespace(info=FakeInfo()))
    chat = Body({"messages": [{"role": "user", "content": "x"}]})
    parse_chat(chat, services)
    response = Body({"input": "x"})
    parse_response_request(response, services.info)
    for body, schema in ((chat, requests.CHAT), (response, requests.RESPONSE)):
        assert body.read | {TIMEOUT} == set(schema["properties"])


WRONG = ["x", [0], ["x"], {"a": {}}, 10**400, -0.5, True, 0]  # somewhere


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(value)[:9])
def test_a_field_that_is_not_as_described_is_refused_and_one_that_is_may_be_taken(
    path: str, body: dict[str, Any], value: Any, module_server: Running
) -> None:
    schema = {"ResponseRequest": requests.RESPONSE}.get(_body(path), requests.CHAT)
    with httpx.Client(base_url=module_server.url) as http:
        for name, field in schema["properties"].items():
            whole = {**field, "components": DOCUMENT["components"]}
            if jsonschema_rs.Draft202012Validator(whole).is_valid(value):
                continue
            answer = http.post(
                path, json={**body, name: value}, headers={"authorization": f"Bearer {KEY}"}
            )
            assert answer.status_code in (400, 404), (name, answer.text)


def _body(path: str) -> str:
    content = BY_METHOD["POST", path]["requestBody"]["content"]
    return str(content["application/json"]["schema"]["$ref"].rpartition("/")[2])


def test_every_named_error_has_a_status_that_is_described() -> None:
    described = {
        int(status) for operation in BY_METHOD.values() for status in operation["responses"]
    }
    raised = {error.status for error in named_errors()} | set(ENDINGS.values())
    assert raised - set(NOT_OF_A_ROUTE) <= described
    assert described - {200} <= raised | {500}, "a status that nothing raises"


def test_every_code_of_a_named_error_is_in_the_table_of_the_documents() -> None:
    told = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
    codes = {error.code for error in named_errors()} | set(ENDINGS)
    assert {code for code in codes if f"`{code}`" not in told} == set()


ERRORS = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, RequestError)
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("seam", ["prepare", "submit"])
def test_whatever_the_engine_refuses_is_described_where_it_is_asked(
    error: type[RequestError], seam: str, launch: Callable[..., Running]
) -> None:
    server = launch(api_keys=(KEY,), admin_keys=(ADMIN_KEY,))
    more: Any = {"retry_after_s": 1.5} if error is errors.OverloadedError else {}

    def refuse(*_: Any, **__: Any) -> Any:
        raise error("no", **more)

    setattr(server.engine, seam, refuse)
    http = server.http()
    asked = [
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}),
        http.post("/v1/responses", json={"input": "x"}),
    ]
    if seam == "prepare":
        asked.append(http.post("/v1/responses/input_tokens", json={"input": "x"}))
        file = {"file": ("x.png", png())}
        asked.append(http.post("/v1/files", files=file, data={"purpose": "vision"}))
    assert {answer.status_code for answer in asked} == {error.status}
    # That each is described is the witness's to say, when the server stops.


def test_a_description_is_read_with_a_key_and_names_the_keys_that_routes_need(
    module_server: Running,
) -> None:
    answer = module_server.http().get("/openapi.json")
    assert answer.json() == DOCUMENT
    needs = {
        path: next(iter(operation["security"][0])) if operation["security"] else None
        for (_, path), operation in BY_METHOD.items()
    }
    assert needs["/health"] is None and needs["/v1/models"] == "key"
    assert needs["/metrics"] == needs["/v1/kv/view"] == "admin_key"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "x", ""])
def test_a_body_of_another_type_is_refused(module_server: Running, kind: str) -> None:
    http = module_server.http()
    for (method, path), operation in BY_METHOD.items():
        if "requestBody" not in operation or "{" in path:
            continue
        key = ADMIN_KEY if path == "/v1/kv" else KEY
        headers = {"content-type": kind, "authorization": f"Bearer {key}"}
        answer = http.request(method, path, content=b"{}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            415,
            "unsupported_media_type",
        ), path


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", None])
def test_json_in_other_spellings_and_without_a_type_is_taken(
    module_server: Running, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = module_server.http().post("/v1/responses", content=b'{"input":"x"}', headers=headers)
    assert answer.status_code == 200


def test_a_refused_method_is_told_all_that_the_path_has(module_server: Running) -> None:
    http = module_server.http()
    for path, methods in DOCUMENT["paths"].items():
        key = ADMIN_KEY if path in ("/metrics",) or path.startswith("/v1/kv") else KEY
        answer = http.put(path, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 405
        allowed = {method.upper() for method in methods}
        allowed |= {"HEAD"} if "GET" in allowed else set()
        assert set(answer.headers["allow"].split(", ")) == allowed


def test_what_a_query_or_a_form_says_twice_is_refused(module_server: Running) -> None:
    http = module_server.http()
    ids = {"id": http.post("/v1/responses", json={"input": "x"}).json()["id"]}
    for (_, path), operation in BY_METHOD.items():
        for parameter in operation["parameters"]:
            name, schema = parameter["name"], parameter["schema"]
            if parameter["in"] != "query" or schema.get("type") == "array":
                continue
            value = schema.get("enum", [str(schema.get("minimum", "x"))])[0]
            answer = http.get(path.format(**ids), params=[(name, value)] * 2)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), path
    for name, value in (("purpose", "user_data"), ("expires_after[seconds]", "3600")):
        fields = [("purpose", (None, "user_data"))] * (name != "purpose")
        form: Any = [("file", ("x", b"text")), *fields, *[(name, (None, value))] * 2]
        answer = http.post("/v1/files", files=form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
