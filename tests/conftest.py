"""What every test shares: a cache folder of its own, so that no test reads or writes the user's, and no network."""

import os
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the hub library's import; else unknown names are retried for minutes

import pytest  # as above

from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.cli import screen
from foredraft.model import loading
from support.toys import TOY

screen._PATIENCE = 600.0  # a slow machine says no more than a quick one
loading.smollm2_file = lambda: Path(TOY)  # where a test names no model it writes with the toy, which is quick


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


GROUPS = {"compiled_cache": "compiled", "finished": "cells", "two_workers": "cluster"}
"""Fixtures that take seconds to make, and the groups of tests that share one: each group runs in one process."""


def pytest_itemcollected(item):
    for fixture, group in GROUPS.items():
        if fixture in item.fixturenames:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def compiled_cache(tmp_path_factory):
    """Return a cache folder that holds the compiled forward of `support.llamas`' small model, in two dtypes."""
    import torch

    from foredraft.model.compiled.build import compile_forward
    from support.llamas import small_model

    folder = tmp_path_factory.mktemp("compiled-cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        for dtype in (torch.float32, torch.bfloat16):
            compile_forward(small_model(dtype), folder)
    return folder


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """Return `heads(family, layers)`, the folder of an untrained head behind that many layers of the model."""
    from support.heads import head_folder

    root = tmp_path_factory.mktemp("heads")
    return lambda family, layers: head_folder(family, layers, root / f"{family}-{layers}")
