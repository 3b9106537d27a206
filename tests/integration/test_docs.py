"""The pages for users, run.

Property: every Python block of docs/client.md runs, one after another in one namespace, against a real pool on a tiny hybrid
model; the costs that the page names are those of the models. Tolerance: none. Reason: readers copy what they read.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.engine import Engine, Model
from geist_pool.protocol import Geometry
from geist_pool.store import layout, shm
from geist_pool.supervisor import Supervisor

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = f"docs-{os.getpid()}"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def address(tiny_model: Callable[..., Path], packed_dir: Path, tmp_path: Path) -> Iterator[str]:
    """Of a pool that a client without arguments finds."""
    config = PoolConfig(
        name=NAME,
        model=str(tiny_model("qwen35-tiny")),
        workers=2,
        cache_dir=str(packed_dir),
        memory=64 << 20,
        log_level="error",
        pin_cores=False,
    )
    with tempfile.TemporaryDirectory(prefix="gp-") as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", run)
        patch.setenv("XDG_DATA_HOME", str(tmp_path))
        with Supervisor(config) as pool:
            patch.setenv("GEIST_POOL_ADDRESS", pool.config.address)
            yield pool.config.address
        assert shm.list_objects(store_key(NAME)) == []


def test_every_block_of_the_clients_page_runs(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "client.md").read_text()
    blocks = list(BLOCK.finditer(page))
    assert len(blocks) == page.count("```python") > 12
    namespace: dict[str, object] = {"__name__": "client_page"}
    try:
        for block in blocks:
            line = page.count("\n", 0, block.start(1))
            code = compile("\n" * line + block[1], str(DOCS / "client.md"), "exec")  # so that a traceback names the page's line
            exec(code, namespace)
    finally:
        if "pool" in namespace:
            namespace["pool"].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out.count("\n") > 20


def costs(geometry: Geometry) -> tuple[int, ...]:
    """The columns of the page's table: logits, state, a token, least and most of 50 tokens on a world of 700 or so, all alone."""

    def of(base: int, n: int) -> int:
        blocks = layout.whole_blocks(n) - layout.whole_blocks(base)
        return layout.PAGE + layout.image_bytes(geometry, n) + layout.kv_object_bytes(geometry, blocks)

    on_world = [of(base, base + 50) for base in range(640, 704)]
    fixed = (4 * geometry.n_vocab, geometry.recurrent_bytes, geometry.kv_bytes_per_token)
    return (*fixed, min(on_world), max(on_world), of(0, 750))


def rows() -> dict[str, tuple[int, ...]]:
    page = (DOCS / "client.md").read_text()
    table = page[page.index("<!-- costs -->") : page.index("<!-- costs end -->")]
    found = {}
    for line in table.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if any(cell[:1].isdigit() for cell in cells):
            found[name] = tuple(int(n.replace(",", "")) for cell in cells for n in cell.split(" to "))
    return found


def test_costs_of_the_page_are_the_models(smollm2: Path, packed_dir: Path) -> None:
    with Engine() as engine, Model(engine, smollm2, cache_dir=packed_dir) as model:
        assert costs(model.geometry("f16")) == rows()["SmolLM2-135M"]


def test_costs_of_the_page_follow_from_one_another() -> None:
    """For the model that is not there in every test run: its figures by the formula that holds for the other."""
    for logits, state, token, *rest in rows().values():
        geometry = Geometry(
            header_bytes=layout.PAGE,
            n_vocab=logits // 4,
            recurrent_bytes=state,
            kv_bytes_per_token=token,
            kv_block_bytes=64 * token,
        )
        assert costs(geometry)[3:] == tuple(rest)
    assert set(rows()) == {"SmolLM2-135M", "Qwen3.5-0.8B"}


def test_a_character_costs_what_the_formula_says(address: str, tiny_model: Callable[..., Path], packed_dir: Path) -> None:
    with Engine() as engine, Model(engine, tiny_model("qwen35-tiny"), cache_dir=packed_dir) as model, Client(address) as pool:
        world = pool.create_context("The river rises. " * 12, name="world").context
        for i in range(4):
            one = pool.create_context(f"Guest {i} has " + "a very " * i + "wet hat.", on="world", name=f"guest-{i}").context
            blocks = layout.whole_blocks(one.n_tokens) - layout.whole_blocks(world.n_tokens)
            geometry = model.geometry("f16")
            assert one.bytes == (
                layout.PAGE + layout.image_bytes(geometry, one.n_tokens) + layout.kv_object_bytes(geometry, blocks)
            )
