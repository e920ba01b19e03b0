"""What a draft model foresees, as rows, and whether asking it is worth its time."""

import numpy as np
import pytest

from foredraft.contracts import Budget
from foredraft.control.trial import Trial
from foredraft.model.candidates import Imitation
from foredraft.model.foresight import Foresight, paths_of
from foredraft.model.growth import GrowthRules
from test_conformance import tiny_draft_model


def grown(ids=(1, 2, 3), levels=3):
    foresight = Foresight(tiny_draft_model(), GrowthRules(3, 0.05, 0.0, levels), Imitation(), 64)
    return foresight.grow(np.array(ids, np.int64), Budget(64, 8))


def test_paths_hold_all_the_probability_of_the_graphs_nodes():
    found = grown()
    graph, size = found.graph, found.graph.size
    paths, mass = paths_of(found, 5)
    assert paths.shape == (size, 5)
    assert (mass >= 0).all()
    children = graph.parents[:size] < 0
    assert mass.sum() == pytest.approx(graph.score[:size][children].sum(), rel=1e-5)
    for node in range(size):
        path = [token for token in paths[node].tolist() if token >= 0]
        assert path[-1] == graph.tokens[node]
        below = [n for n in range(size) if paths[n, : len(path)].tolist() == path]
        assert mass[below].sum() == pytest.approx(float(graph.score[node]), rel=1e-4)


def test_paths_are_cut_at_the_rows_end():
    paths, mass = paths_of(grown(), 2)
    assert paths.shape[1] == 2
    assert (paths[:, 0] >= 0).all()
    assert mass.sum() == pytest.approx(paths_of(grown(), 5)[1].sum())


def test_nothing_is_foreseen_of_ids_that_the_model_does_not_have():
    foresight = Foresight(tiny_draft_model(), GrowthRules(), Imitation(), 64)
    assert foresight.grow(np.array([1, 1000], np.int64), Budget(8, 8)) is None
    foresight.keep((1, 2))


class Clock:
    """Seconds that pass as they are told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(trial, clock, steps, seconds, tokens):
    """How often the costly way was taken; it takes `seconds[1]` a step and writes `tokens[1]`."""
    taken = 0
    for _ in range(steps):
        mode = int(trial.begins())
        clock.now += seconds[mode]
        trial.ends(tokens[mode])
        taken += mode
    return taken


def test_what_writes_more_a_second_is_kept():
    clock = Clock()
    assert run(Trial(clock), clock, 400, (1.0, 2.0), (1, 3)) > 370
    assert 8 <= run(Trial(clock), clock, 400, (1.0, 2.0), (1, 1)) < 30


def test_what_changes_is_noticed():
    clock = Clock()
    trial = Trial(clock)
    assert run(trial, clock, 300, (1.0, 2.0), (1, 1)) < 25
    run(trial, clock, 600, (1.0, 2.0), (1, 6))
    assert run(trial, clock, 100, (1.0, 2.0), (1, 6)) > 90


def test_a_clock_that_jumps_is_not_believed():
    clock = Clock()
    trial = Trial(clock)
    run(trial, clock, 50, (1.0, 2.0), (1, 3))
    trial.begins()
    clock.now += 1e6
    trial.ends(1)
    trial.begins()
    clock.now -= 5e5
    trial.ends(1)
    trial.ends(3)  # nothing had begun
    assert run(trial, clock, 60, (1.0, 2.0), (1, 3)) > 54
