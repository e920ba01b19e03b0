"""Whether a slow source is worth its time: the tokens it adds to drafts against its seconds."""

import numpy as np
import pytest

from foredraft.control.worth import Worth
from support.clock import Clock

PASS = 10.0


def scores(*chances):
    return np.array(chances, np.float32)


def run(worth, clock, steps, answer, adds, *, first=None):
    """How often it was used; a draft takes `answer` seconds (the first `first`) and promises `adds` more tokens.

    Without answers a draft of two nodes promises half a token. A step takes a pass of ten seconds besides.
    """
    taken = 0
    for _ in range(steps):
        if worth.begins():
            clock.now += first if first is not None and not taken else answer
            worth.answered()
            worth.compare(scores(0.5 + adds, 0.0), scores(0.5, 0.0))
            taken += 1
        clock.now += PASS
        worth.ends(tokens=2, nodes=2)
    return taken


@pytest.mark.parametrize(("answer", "adds", "asked"), [(1.0, 0.5, True), (4.0, 0.5, False), (1.0, 0.0, False)])
def test_it_is_asked_while_its_tokens_are_worth_more_than_its_seconds(answer, adds, asked):
    """At two tokens a pass of ten seconds, half a token is worth two and a half."""
    clock = Clock()
    taken = run(Worth(clock), clock, 100, answer, adds)
    assert taken == 100 if asked else taken <= 4 + 6  # four tries, and six between rests that double


def test_one_slow_answer_as_the_first_over_a_long_prompt_does_not_decide():
    clock = Clock()
    assert run(Worth(clock), clock, 100, 1.0, 0.5, first=200.0) == 100


def test_a_first_step_that_compiled_something_is_forgotten():
    clock = Clock()
    worth = Worth(clock)
    worth.begins()
    clock.now += 1000 * PASS
    worth.ends(2, 0)
    assert run(worth, clock, 200, 4.0, 0.5) <= 12


def test_a_text_begins_with_what_the_one_before_it_taught():
    clock = Clock()
    before = Worth(clock)
    assert run(before, clock, 100, 4.0, 0.5) > 4
    assert run(before.following(), clock, 40, 4.0, 0.5) <= 1
    assert run(before.following(), clock, 40, 4.0, 0.5) <= 1


def test_what_became_worth_its_time_is_found_again_and_what_is_no_more_is_left():
    clock = Clock()
    worth = Worth(clock)
    run(worth, clock, 100, 1.0, 0.0)
    assert run(worth, clock, 200, 1.0, 0.9) > 130
    assert run(worth, clock, 100, 1.0, 0.0) < 20


def test_a_clock_that_jumps_is_not_believed():
    clock = Clock()
    worth = Worth(clock)
    run(worth, clock, 30, 1.0, 0.5)
    for jump in (1e6, -5e5):
        worth.begins()
        clock.now += jump
        worth.answered()
        worth.ends(1, 0)
    worth.ends(3, 0)  # no step had begun
    assert run(worth, clock, 30, 1.0, 0.5) == 30


def test_a_source_that_never_answers_is_asked_seldom():
    clock = Clock()
    worth, taken = Worth(clock), 0
    for _ in range(100):
        taken += worth.begins()
        clock.now += PASS
        worth.ends(1, 0)
    assert taken <= 4 + 6  # four tries, and six between rests that double
