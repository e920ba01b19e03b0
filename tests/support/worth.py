"""Whether a neural source is asked, as a test says."""

import itertools

from foredraft.control.worth import Worth


def asked(*answers):
    """Let the neural drafter be asked by turns, as `answers` say, and its drafts be compared at each second one."""
    turns, steps = itertools.cycle(answers), itertools.cycle([True, False])

    class Asked(Worth):
        def begins(self):
            super().begins()
            return next(turns)

        @property
        def compares(self):
            return next(steps)

    return Asked
