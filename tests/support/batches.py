"""Texts that are written in a batch, and what transformers writes alone."""

import numpy as np
import torch

from foredraft.api import Generator
from foredraft.contracts import Rows
from foredraft.engine.batch import steps
from foredraft.graph.layout import lay_out_text
from foredraft.sampling import SamplingOptions
from support.families import GREEDY, VOCABULARY
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter, continuation_in


def finish(batch):
    """Write all texts of a batch to their ends."""
    while len(batch):
        batch.step()


def theirs(target, prompt, count):
    """What transformers writes after a prompt, plainly and alone."""
    ids = torch.from_numpy(prompt)[None]
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=[], pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def emitted(run):
    return [token for record in run.records for token in record.emitted]


def in_company(target, prompts, count):
    """What a batch writes, greedily and by random drafts, after the second of three prompts that begin in turn."""
    writer = Generator(target, None, method="none", nodes=8)
    batch, runs = writer.batch(), []
    for prompt in prompts:
        drafter = RandomTreeDrafter(len(prompt), VOCABULARY)
        runs.append(batch.join(writer.begin(prompt, GREEDY, max_new_tokens=count, drafter=drafter)))
        batch.step()
    finish(batch)
    return emitted(runs[1])


def drafters(prompt, text):
    """Right trees and chains, always wrong ones, and random ones, whose nodes are rejected at every position."""
    goes_on = continuation_in(np.append(prompt, text))
    return [
        OracleDrafter(goes_on, 2, VOCABULARY), OracleDrafter(goes_on, 0, VOCABULARY),
        AdversaryDrafter(goes_on, VOCABULARY), RandomTreeDrafter(5, VOCABULARY),
    ]  # fmt: skip


def counted(batch, monkeypatch):
    """The number of rows of each of a batch's passes from now on."""
    found, forward = [], batch.passes.forward
    monkeypatch.setattr(
        batch.passes, "forward", lambda rows: found.append(sum(each.layout.rows for each in rows)) or forward(rows)
    )
    return found


def leased(batch, ids):
    """Lease slots to a text, and fill them up to its last token."""
    lease = batch.open(ids, 300, "")
    for start in range(lease.length, len(ids) - 1, 64):
        piece = lay_out_text(ids[start : min(start + 64, len(ids) - 1)], start)
        batch.reserve(lease, piece)
        batch.forward([Rows(piece, lease, scored=False)])
        lease.commit(range(piece.rows))
    return lease


def streamed(writer, batch, prompt, drafter, new_tokens, most):
    """A text written as a stream that is cancelled after `most` steps, and its tokens."""
    run = writer.begin(prompt, SamplingOptions(), max_new_tokens=new_tokens, drafter=drafter)
    records = steps(run, batch)
    for _ in zip(range(most), records, strict=False):
        pass
    records.close()
    return run, emitted(run)
