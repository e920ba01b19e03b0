"""What a machine has, and what a container allows: the last cache, and how many threads torch uses."""

import pytest
import torch

from foredraft.model import machine
from foredraft.model.loading import load_model
from support.toys import TOY


@pytest.fixture
def limit(tmp_path, monkeypatch):
    """The file that limits a container's processors; torch has four threads before, and those it had afterwards."""
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine.limit_threads.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield tmp_path / "cpu.max"
    torch.set_num_threads(before)
    machine.limit_threads.cache_clear()


@pytest.mark.parametrize(
    ("text", "threads"),
    [("max 100000\n", 4), ("800000 100000\n", 4), ("250000 100000\n", 2), ("50000 100000\n", 1), (None, 4)],
)
def test_torch_has_as_many_threads_as_the_container_has_processors(limit, text, threads):
    if text is not None:
        limit.write_text(text)
    machine.limit_threads()
    assert torch.get_num_threads() == threads


def test_threads_that_were_asked_for_are_kept(limit, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    limit.write_text("100000 100000\n")
    machine.limit_threads()
    assert torch.get_num_threads() == 4


def test_loading_a_model_limits_the_threads_once(limit):
    limit.write_text("100000 100000\n")
    load_model(TOY)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(3)
    load_model(TOY)
    assert torch.get_num_threads() == 3, "a number that was chosen afterwards stays"


@pytest.mark.parametrize(("text", "size"), [("32768K\n", 32 << 20), (None, 0)])
def test_the_last_cache_has_the_size_that_the_system_says(text, size, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CACHE", tmp_path / "size")
    if text is not None:
        (tmp_path / "size").write_text(text)
    assert machine.last_cache() == size
