"""How the threads of a pass wait: when they change, and what the environment decides. Interruptions are simulated."""

import ctypes
import threading

import pytest
import torch

from foredraft.model.waiting import Waiting

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "GOMP_parallel") or torch.get_num_threads() < 1, reason="needs GNU OpenMP"
)
QUIET, DISTURBED = 10, 250  # interruptions per second of processor time


class Machine:
    """Seconds of processor time and interruptions of a process, advanced by the test."""

    def __init__(self):
        self.used = (0.0, 0)

    def runs(self, waiting, seconds, rate):
        """Run passes of 0.1 seconds, and return the number of those in which threads slept."""
        asleep = 0
        for _ in range(round(seconds * 10)):
            with waiting.one_pass(compiled=False):
                asleep += waiting.busy
                self.used = self.used[0] + 0.1, self.used[1] + rate // 10
        return asleep


@pytest.fixture
def machine(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    return Machine()


def idle_teams():
    return sum(each.name == "foredraft-idle" for each in threading.enumerate())


def test_threads_sleep_while_others_want_the_cores_and_spin_again_afterwards(machine):
    waiting, before = Waiting(lambda: 2, lambda: machine.used), idle_teams()
    assert machine.runs(waiting, 5, QUIET) == 0
    while not waiting.busy:
        machine.runs(waiting, 0.1, DISTURBED)
    assert idle_teams() == before + 1
    machine.runs(waiting, 10, 0)  # threads that sleep are not interrupted
    assert machine.runs(waiting, 10, QUIET) == 0
    for _ in range(100):
        if idle_teams() == before:
            break
        threading.Event().wait(0.05)
    assert idle_teams() == before


def test_a_machine_that_stays_busy_is_looked_at_less_and_less(machine):
    waiting = Waiting(lambda: 2, lambda: machine.used)
    asleep = sum(machine.runs(waiting, 0.1, 0 if waiting.busy else DISTURBED) for _ in range(900))
    assert asleep > 0.9 * 900


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_environment_says_stays(machine, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    waiting = Waiting(lambda: 2, lambda: machine.used)
    machine.runs(waiting, 5, DISTURBED)
    assert not waiting.busy


def test_only_a_compiled_pass_of_two_threads_has_one(machine):
    threads = ctypes.CDLL(None).omp_get_max_active_levels
    usual = threads()
    for count, compiled, expected in ((2, True, 0), (2, False, usual), (4, True, usual), (1, True, usual)):
        waiting = Waiting(lambda count=count: count, lambda: machine.used)
        while count > 1 and not waiting.busy:
            machine.runs(waiting, 0.1, DISTURBED)
        with waiting.one_pass(compiled=compiled):
            assert threads() == expected
        assert threads() == usual
