"""How the threads of a pass wait for each other while other processes want their cores.

A thread that spins for one that another process has preempted takes its core from it as well, and both wait. So on a
busy machine the threads of uncompiled passes sleep, and compiled passes of two threads have one, with the same bits. On
an idle machine waking threads doubles the time of a pass, so they spin. docs/results/log.md has the figures.

GNU OpenMP reads its environment once, but its threads sleep after 100 turns instead of 300,000 while there are more of
them than processors (its manual, GOMP_SPINCOUNT): a team that does nothing changes how the others wait. Does not depend
on what a pass computes.
"""

import ctypes
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ATTRIBUTE = "_foredraft_waiting"  # of a model's input embeddings: the `Waiting` of its passes
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # with which a user says how threads wait
_SHORTEST, _LONGEST = 0.25, 8.0  # seconds of processor time until the next look (chosen)
_BUSY = 100
"""Interruptions by other processes, per second of processor time of threads that spin: 200 beside one or two busy
processes on two processors."""


class Waiting:
    """Chooses how the threads of this process wait; `threads` returns how many a pass has.

    Nothing is changed if the environment says how they wait, if a pass has one thread, or without GNU OpenMP. `usage`
    returns the seconds of processor time and the interruptions of this process so far.

    Passes of several threads run one after the other, as what a pass puts into the model (`tapped_states`,
    `replaced_attention`, the layers of recurrent states) is that pass's own; whoever puts it there holds `lock`.
    """

    def __init__(self, threads: Callable[[], int], usage: Callable[[], tuple[float, int]] | None = None) -> None:
        self._library, self._threads = ctypes.CDLL(None), threads
        known = hasattr(self._library, "GOMP_parallel") and hasattr(self._library, "omp_set_max_active_levels")
        self._is_free = known and not any(name in os.environ for name in _SETTINGS)
        self._usage = _usage if usage is None else usage
        self._last, self._until_look = self._usage(), _SHORTEST
        self.lock = threading.RLock()
        self._wake: weakref.finalize[[], Waiting] | None = None  # ends the team that does nothing

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # copies and pickles of a model are other models, whose passes wait by themselves

    @property
    def busy(self) -> bool:
        """Whether other processes want the cores."""
        return self._wake is not None

    @contextmanager
    def one_pass(self, *, compiled: bool) -> Iterator[None]:
        """Look whether the machine is busy, from time to time, and let a compiled pass have one thread if it is."""
        with self.lock:
            threads = self._threads()
            if self._is_free and threads > 1:
                self._look()
            alone = compiled and self.busy and threads == 2  # of more threads, one might take longer than all
            levels = self._library.omp_get_max_active_levels() if alone else 0
            if alone:
                self._library.omp_set_max_active_levels(0)
            try:
                yield
            finally:
                if alone:
                    self._library.omp_set_max_active_levels(levels)

    def _look(self) -> None:
        """Let the threads spin or sleep.

        As threads that sleep are hardly interrupted, they spin again from time to time; if the machine is still busy
        then, they sleep twice as long as before.
        """
        seconds, interruptions = self._usage()
        passed = seconds - self._last[0]
        if passed < (self._until_look if self.busy else _SHORTEST):
            return
        rate, self._last = (interruptions - self._last[1]) / passed, (seconds, interruptions)
        if self._wake is not None:
            self._wake()
            self._wake, self._until_look = None, min(2 * self._until_look, _LONGEST)
        elif rate > _BUSY:
            ended = threading.Event()
            team = threading.Thread(target=_idle, args=(self._library, ended), name="foredraft-idle", daemon=True)
            team.start()
            self._wake = weakref.finalize(self, ended.set)
        else:
            self._until_look = _SHORTEST


def waiting_of(model: Any, new: Waiting) -> Waiting:
    """Return how the passes of a model wait, all targets of it or of a wrapper of it alike: `new` if nothing is set."""
    own = vars(model.get_input_embeddings())
    if own.get(_ATTRIBUTE, own) is None:  # of a copied model
        own.pop(_ATTRIBUTE, None)
    waiting: Waiting = own.setdefault(_ATTRIBUTE, new)
    return waiting


def _idle(library: ctypes.CDLL, ended: threading.Event) -> None:
    """Keep an OpenMP thread more than there are processors, asleep; they end with the calling thread."""
    nothing = ctypes.cast(library.free, ctypes.c_void_p)  # of no pointer
    library.GOMP_parallel(nothing, None, ctypes.c_uint((os.cpu_count() or 1) + 1), ctypes.c_uint(0))
    ended.wait()


def _usage() -> tuple[float, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nivcsw
