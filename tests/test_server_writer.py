"""What stands between requests and the batch: whose turn it is, who gives up, and what is kept for slow readers."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from foredraft.contracts import StepRecord
from foredraft.server.answers import Choice
from foredraft.server.dialects import Dialect
from foredraft.server.parts import Splitter
from foredraft.server.processors import Logprobs
from foredraft.server.writer import BusyError, Event, Job, Writer
from foredraft.text import TextStream


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
        ended = list(self.lanes)
        for lane in ended:
            lane.seq.finish, lane.ended = "eos", True
            self.leave(lane)
        return ended


@pytest.fixture
def writer():
    batch = Full()
    made = Writer(batch, most_at_once=1, most_waiting=1)
    yield made
    for _ in range(9):
        batch.allowed.release()
    made.close(5.0)


def job(prepared="text", told=None):
    return Job(prepared, [].append if told is None else told.append)


def until(holds):
    for _ in range(500):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it took too long")


def test_a_text_that_cannot_begin_does_not_end_the_writing(writer):
    broken, sound = [], []
    writer.submit([job("broken", broken)])
    until(lambda: broken)
    assert isinstance(broken[0].failure, RuntimeError)
    writer.submit([job("text", sound)])
    writer.batch.allowed.release()
    until(lambda: sound)
    assert [event.finish for event in sound] == ["eos"]
    assert len(broken) == 1


def test_a_text_that_nobody_waits_for_makes_room_at_once(writer):
    writer.submit([job()])
    until(lambda: writer.running == 1)
    waiting = job()
    writer.submit([waiting])
    with pytest.raises(BusyError):
        writer.submit([job()])
    writer.cancel(waiting)
    writer.submit([job()])


def speech_of(tokenizer):
    """Of a model that marks neither thoughts nor calls."""
    unmarked = Splitter(Dialect(None, None), None, thinking=False, parallel=True)
    none = frozenset()
    return SimpleNamespace(
        stream=lambda: (TextStream(tokenizer), none), splitter=lambda: unmarked, unsearched=lambda _: none
    )


def test_an_answer_that_nobody_takes_keeps_no_whole_rows_of_log_probabilities():
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(f"{token} " for token in ids))
    kept = Logprobs(2, SimpleNamespace(decode_bytes=lambda ids: f"{ids[0]} ".encode()))
    choice = Choice(speech_of(tokenizer), (), kept, None, asyncio.Event())
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 100, generator=generator) for _ in range(50)]
    for number, row in enumerate(rows):
        kept(torch.tensor([[1]]), row)
        choice.receive(Event((StepRecord((number,), 0, 0, (None,), {}),)))
    assert not kept._rows
    for number, (row, told) in enumerate(zip(rows, choice.take().tokens, strict=True)):
        expected = row[0].log_softmax(dim=-1)
        assert (told.token.text, told.token.logprob) == (f"{number} ", pytest.approx(float(expected[number])))
        assert [token.text for token in told.top] == [f"{token} " for token in expected.topk(2).indices.tolist()]


def test_an_answer_that_cannot_be_decoded_fails_alone():
    choice = Choice(speech_of(SimpleNamespace()), (), None, None, asyncio.Event())
    choice.receive(Event((StepRecord((1,), 0, 0, (None,), {}),)))
    with pytest.raises(AttributeError, match="decode"):
        choice.take()
