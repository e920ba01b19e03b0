"""What stands between requests and the batch: whose turn it is, who gives up, and what is kept for slow readers."""

import threading
from types import SimpleNamespace

import pytest
import torch

from foredraft.server.processors import Logprobs
from foredraft.server.writer import BusyError, Job, Writer


class Lane:
    def __init__(self):
        self.records, self.failure, self.ended = [], None, False
        self.seq = SimpleNamespace(finish=None)


class Full:
    """A batch that refuses some texts, and steps only when it is allowed to."""

    def __init__(self):
        self.allowed = threading.Semaphore(0)
        self.lanes = []

    def __contains__(self, lane):
        return lane in self.lanes

    def join(self, prepared):
        if prepared == "broken":
            raise RuntimeError("no drafter can be opened")
        self.lanes.append(Lane())
        return self.lanes[-1]

    def leave(self, lane):
        self.lanes.remove(lane)

    def step(self):
        self.allowed.acquire()
        for lane in list(self.lanes):
            lane.seq.finish, lane.ended = "eos", True
            self.leave(lane)
            yield lane


@pytest.fixture
def writer():
    told = []
    batch = Full()
    made = Writer(batch, told.extend, most_at_once=1, most_waiting=1)
    made.told, made.batch = told, batch
    yield made
    for _ in range(9):
        batch.allowed.release()
    made.close(5.0)


def job(prepared="text"):
    return Job(prepared, lambda _event: None)


def until(holds):
    for _ in range(500):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it took too long")


def test_a_text_that_cannot_begin_does_not_end_the_writing(writer):
    broken, sound = job("broken"), job()
    writer.submit([broken])
    until(lambda: writer.told)
    assert isinstance(writer.told[0][1].failure, RuntimeError)
    writer.submit([sound])
    writer.batch.allowed.release()
    until(lambda: len(writer.told) == 2)
    assert (writer.told[1][0], writer.told[1][1].finish) == (sound, "eos")


def test_a_text_that_nobody_waits_for_makes_room_at_once(writer):
    writer.submit([job()])
    until(lambda: writer.running == 1)
    waiting = job()
    writer.submit([waiting])
    with pytest.raises(BusyError):
        writer.submit([job()])
    writer.cancel(waiting)
    writer.submit([job()])


def test_log_probabilities_of_many_positions_keep_no_whole_rows():
    kept = Logprobs(2, SimpleNamespace(decode=lambda ids: ids[0]))
    generator = torch.Generator().manual_seed(0)
    ids, rows = [1], [torch.randn(1, 100, generator=generator) for _ in range(50)]
    for number, row in enumerate(rows):
        kept(torch.tensor([ids]), row)
        ids.append(number)
    assert len(kept._settled) == len(rows) - 1  # all but the last, of which there is one row
    for number, row in enumerate(rows):
        told, expected = kept.take(number), row[0].log_softmax(dim=-1)
        assert told.logprob == pytest.approx(float(expected[number]))
        assert [token for token, _ in told.top] == expected.topk(2).indices.tolist()
