"""Costs of passes: measured once a machine, and again if the stored figures cannot be used."""

import itertools
import os
import platform

import pytest

import foredraft.model.cost as cost_module
from foredraft.model.cost import ROWS, measure_cost, measured_cost
from foredraft.model.target import TorchTarget
from support.families import configuration, tiny_model


@pytest.fixture(autouse=True)
def as_usual(monkeypatch):
    """Other tests measure for a shorter time (conftest.py)."""
    monkeypatch.setattr(cost_module, "_MOST_ROUNDS", 12)
    monkeypatch.setattr(cost_module, "_MOST_TRIES", 3)


@pytest.fixture
def target():
    config = configuration("llama")
    config.max_position_embeddings = 1024
    return TorchTarget(tiny_model(config))


@pytest.fixture
def passes(monkeypatch):
    """Replace the clock: a pass takes `seconds` of its rows; return the list of rows timed."""
    timed = []

    def begin(seconds):
        def timed_pass(target, cache, rows, context):
            timed.append(rows)
            return seconds(rows)

        monkeypatch.setattr(cost_module, "_timed_pass", timed_pass)
        return timed

    return begin


def test_figures_are_kept_and_read(target, passes, tmp_path):
    timed = passes(lambda rows: 0.01 + 0.001 * rows)
    measured = measured_cost(target, tmp_path)
    assert measured.rows == ROWS
    assert measured.seconds == pytest.approx([0.01 + 0.001 * rows for rows in ROWS])
    count = len(timed)
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, 0))
    assert measured_cost(target, tmp_path) == measured
    assert len(timed) == count
    assert file.stat().st_mtime > 0, "reading a file marks it as used"


def test_figures_of_a_busy_machine_are_not_kept(target, passes, tmp_path):
    busy = itertools.count()
    passes(lambda rows: 0.01 if rows > 1 else 0.012 + 0.001 / (1 + next(busy)))
    assert measured_cost(target, tmp_path).rows == ROWS
    assert not list(tmp_path.iterdir())
    passes(lambda rows: 0.01)
    measured_cost(target, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_figures_whose_rounds_disagree_are_not_kept(target, passes, tmp_path):
    """Another process takes the processor now and then, so that some row counts look slow."""
    count = itertools.count()
    passes(lambda rows: (0.01 + 0.001 * rows) * (3.0 if next(count) // 7 % 3 == 0 else 1.0))
    measured_cost(target, tmp_path)
    assert not list(tmp_path.iterdir())


def test_figures_of_passes_that_had_fewer_threads_are_not_kept(target, passes, tmp_path, monkeypatch):
    """Beside another process they have one thread, and take as long every time."""
    passes(lambda rows: 0.01 + 0.001 * rows)
    monkeypatch.setattr(type(target.waiting), "busy", True)
    assert measured_cost(target, tmp_path).rows == ROWS
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b'{"rows": [1, 2], "seconds": [1]}', b'{"rows": [1], "seconds": [-1]}',
        b'{"rows": [1, Infinity], "seconds": [1, 2]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_anew_and_replaced(target, passes, tmp_path, content):
    passes(lambda rows: 0.01)
    measured = measured_cost(target, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    assert measured_cost(target, tmp_path) == measured
    assert file.read_bytes() == whole


def test_figures_of_another_machine_are_not_used(target, passes, tmp_path, monkeypatch):
    passes(lambda rows: 0.01)
    measured_cost(target, tmp_path)
    monkeypatch.setattr(platform, "node", lambda: "another")
    passes(lambda rows: 0.02)
    assert measured_cost(target, tmp_path).seconds == pytest.approx([0.02] * len(ROWS))


def test_a_slow_model_is_measured_at_few_row_counts(target, passes):
    passes(lambda rows: 1.0)
    assert measure_cost(target)[0].rows == (1, 16, 64)


def test_proportions_are_right_on_a_machine_that_is_quick_for_a_moment(target, passes):
    count = itertools.count()
    passes(lambda rows: (0.01 + 0.001 * rows) * (1.0 if 150 <= next(count) < 170 else 1.5))
    seconds = measure_cost(target)[0].seconds
    assert [each / seconds[0] for each in seconds] == pytest.approx([(10 + rows) / 11 for rows in ROWS], rel=0.05)
