"""docs/protocol.md against the program.

Property: every struct and field that can travel between a client and the broker, every limit and every error code is on the page,
with the type and the default that the program has. Tolerance: none. Reason: clients in other languages are written from the page.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from msgspec import inspect

from geist_pool import errors, protocol
from geist_pool.broker.books import REMEMBERED, MachineConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_protocol", DOCS / "make_protocol.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_what_the_program_makes_of_it(maker: ModuleType) -> None:
    page = (DOCS / "protocol.md").read_text()
    assert maker.fill(page) == page, "run python docs/make_protocol.py"


def test_every_struct_has_its_part_and_its_heading(maker: ModuleType) -> None:
    page = (DOCS / "protocol.md").read_text()
    found = maker.structs()
    assert {"Generate", "GenerateChunk", "SpaceStats", "SavedInfo", "ErrorBody"} <= set(found)
    for name in [*found, *maker.SHARED.values(), "limits", "errors", "bytes"]:
        assert page.count(f"<!-- make {name} -->") == 1, name
    for name in (name for name in found if f"(#{name.lower()})" in page):
        assert f"# {name}\n" in page, f"a link to {name} leads nowhere"
    for request in (cls for cls in found.values() if cls.__struct_config__.tag_field == "op"):
        assert f"### {request.__struct_config__.tag}\n" in page, request


def test_every_field_limit_and_code_is_named(maker: ModuleType) -> None:
    page = (DOCS / "protocol.md").read_text()
    for cls in maker.structs().values():
        part = maker.part(cls.__name__)
        shared = "".join(maker.part(page_name) for base, page_name in maker.SHARED.items() if f"[{page_name}]" in part)
        for field in inspect.type_info(cls).fields:
            assert f"| `{field.encode_name}` |" in part + shared, (cls, field.name)
    for limit in msgspec.structs.fields(protocol.Limits):
        assert f"| `{limit.name}` | {limit.default} |" in page
    for code in set(errors.CODES) - maker.LOCAL_CODES:
        assert f"| `{code}` |" in page


def test_words_are_of_fields_that_exist(maker: ModuleType) -> None:
    fields = {
        f"{base.__name__}.{field.encode_name}"
        for cls in maker.structs().values()
        for base in cls.__mro__
        for field in (inspect.type_info(cls).fields)
        if field.name in getattr(base, "__annotations__", {})
    }
    assert set(maker.WORDS) <= fields


def test_what_is_remembered_is_what_the_page_says() -> None:
    page = " ".join((DOCS / "protocol.md").read_text().split())
    books = {field.name: field.default for field in msgspec.structs.fields(MachineConfig)}
    assert (books["remember_s"], books["remember_replies"], books["remember_bytes"]) == (60.0, 512, 32 << 20)
    assert "for a minute, and as long as no more than 512 answers of 32 MiB" in page
    named = page[page.index("After it was answered,") : page.index("are answered again")]
    assert set(re.findall(r"`([a-z.]+)`", named)) == {op.__struct_config__.tag for op in REMEMBERED}
