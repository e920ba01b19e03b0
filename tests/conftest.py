"""What every test shares: a cache folder of its own, so that no test reads or writes the user's, and no network."""

import gc
import os
from itertools import islice
from pathlib import Path

os.environ.pop("COLUMNS", None)  # tables are as wide as where their output is piped
os.environ["HF_HUB_OFFLINE"] = "1"  # read at the hub library's import; else unknown names are retried for minutes

import pytest  # as above

from foredraft import standard_library
from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.cli import screen
from foredraft.model import cost, loading
from foredraft.model.compiled import build
from support.toys import TOY_DRAFT

screen._PATIENCE = 600.0  # a slow machine says no more than a quick one
loading.smollm2_file = lambda: Path(TOY_DRAFT)  # where a test names no model it writes with the quicker toy
# each tokenizer's default table, and store, is built from a twentieth of the files, lest it takes seconds
_documents = standard_library._documents
standard_library._documents = lambda *given: islice(_documents(*given), 0, None, 20)
# most tests need some curve, and beside other tests a measurement of a second would be repeated, and not kept
cost._MOST_ROUNDS, cost._MOST_TRIES = 2, 1
# tests compile many packages, which run a few passes
build.OPTIONS.update({
    "aot_inductor.precompile_headers": True,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.enable_line_tables": False,
})  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def cache_for_the_session(tmp_path_factory):
    """One folder for the session (each worker its own): what is built once is kept until the end."""
    before = os.environ.get(CACHE_VARIABLE)
    folder = tmp_path_factory.mktemp("foredraft-cache")
    os.environ[CACHE_VARIABLE] = str(folder)
    yield folder
    if before is None:
        del os.environ[CACHE_VARIABLE]
    else:
        os.environ[CACHE_VARIABLE] = before


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A cache folder of compiled models that all workers share: a model that several files need is compiled once."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"


LONGEST = (
    "compiled_recurrent", "compiled_kinds", "processors", "batch", "conformance", "windows", "causal_types", "compiled",
    "experts", "server", "wrappers", "train_heads",
)  # fmt: skip
"""The files of tests that take longest: those that compile the same models do not stand beside each other."""


def pytest_collection_modifyitems(items):
    """Run the longest files first, so that no worker waits for another's at the end."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish():
    """Search for garbage less often, and not what was imported and collected: it took a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish():
    """What plugins do at the end may search all objects."""
    gc.unfreeze()


SLOW_FIXTURES = {"compiled_cache", "finished", "cluster"}
"""Those that take seconds to make."""


def pytest_itemcollected(item):
    """What needs a slow fixture is slow."""
    if SLOW_FIXTURES & set(item.fixturenames):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """Return `heads(family, layers)`, the folder of an untrained head behind that many layers of the model."""
    from support.heads import head_folder

    root = tmp_path_factory.mktemp("heads")
    return lambda family, layers: head_folder(family, layers, root / f"{family}-{layers}")
