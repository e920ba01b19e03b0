"""What a draft model foresees, and whether asking it is worth its time."""

import numpy as np

from foredraft.contracts import Budget
from foredraft.control.trial import Trial
from foredraft.model.candidates import Imitation
from foredraft.model.foresight import Foresight
from foredraft.model.growth import GrowthRules
from support.clock import Clock
from support.tiny_models import tiny_draft_model


def test_nothing_is_foreseen_of_ids_that_the_model_does_not_have():
    foresight = Foresight(tiny_draft_model(), GrowthRules(), Imitation(), 64)
    assert foresight.grow(np.array([1, 1000], np.int64), Budget(8, 8)) is None
    foresight.keep((1, 2))


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
