"""A text that repeats itself, or its prompt, is noticed at each token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foredraft.control.repetition import Repetition


def scanned(prompt, text):
    """The same by looking at all that came before, for each token."""
    whole, run = [-1, -1, *prompt], 0
    for token in text:
        pair = whole[-2:]
        places = [at for at in range(len(whole) - 2) if whole[at : at + 2] == pair]
        run = run + 1 if places and whole[places[-1] + 2] == token else 0
        whole.append(token)
    return run


@given(prompt=st.lists(st.integers(0, 2), max_size=12), text=st.lists(st.integers(0, 2), max_size=30))
def test_the_run_is_that_of_a_scan(prompt, text):
    repetition = Repetition(np.array(prompt, np.int64))
    assert repetition.run == 0
    for start in range(0, len(text), 3):
        repetition.read(text[start : start + 3])
    assert repetition.run == scanned(prompt, text)


def test_a_loop_and_a_copied_prompt_are_runs_and_new_text_is_none():
    repetition = Repetition(np.arange(50))
    repetition.read([20, 21, 22, 23, 24])
    assert repetition.run == 3, "the first two have to be found first"
    repetition.read([7])
    assert repetition.run == 0
    repetition.read([100, 101, 102] * 4)
    assert repetition.run == 7


def test_only_the_end_of_a_long_prompt_is_read():
    prompt = np.arange(10_000)
    early, late = Repetition(prompt), Repetition(prompt)
    early.read([10, 11, 12])
    late.read([9990, 9991, 9992])
    assert (early.run, late.run) == (0, 1)


def test_what_a_text_kept_of_what_was_to_repeat_is_counted_and_old_counts_fade():
    repetition = Repetition(np.array([1, 2, 3, 1, 2, 3]))
    assert (repetition.promised, repetition.kept, repetition.watched) == (0, 0, 0)
    assert repetition.occurred
    repetition.read([1, 2, 9])
    assert repetition.kept == 2
    assert 0 < repetition.promised < 3
    assert not repetition.occurred
    loop, new = Repetition(), Repetition()
    for start in range(0, 1200, 3):
        loop.read([1, 2, 3])
        new.read(range(start, start + 3))
    assert loop.kept >= loop.promised > 0
    assert loop.kept / loop.watched > 0.9
    assert new.kept == new.promised == 0
    for repetition in (loop, new):
        assert repetition.watched < 300
    for start in range(10, 400, 3):
        loop.read(range(start, start + 3))
    assert loop.kept / loop.watched < 0.5
