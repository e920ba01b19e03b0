"""Targets of recorded passes, and what must not be done while one is recorded."""

import contextlib
import warnings
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foredraft.api import Generator
from foredraft.engine.batch import steps
from foredraft.errors import ForedraftWarning
from foredraft.model.recordings import RecordedForward
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support.families import prompt_of


def recorded_target(model):
    return TorchTarget(model, recordings=RecordedForward(model))


def caches_of(target):
    """Return a list to which a weak reference to each cache that `target` makes from now on is added."""
    made, new_cache = [], target.new_cache

    def noted(tokens=0):
        cache = new_cache(tokens)
        made.append(weakref.ref(cache))
        return cache

    target.new_cache = noted
    return made


def begun(target, length, tokens=48, **sampling):
    """Begin a text of `target` behind a prompt of its own, with trees for drafts."""
    generator = Generator(target, None, method="adaptix", options={"table": "none"}, nodes=12)
    return generator.begin(prompt_of(length), SamplingOptions(**sampling), max_new_tokens=tokens)


def finished(run):
    for _ in steps(run):
        pass
    return tuple(run.seq.emitted.tolist())


def finished_in_store(run, caches):
    """Finish the run that began last; return its text, and the store in which its cache was before its last step."""
    stores = []
    for _ in steps(run):
        stores += [cache.store for cache in [caches[-1]()] if cache is not None]
    return tuple(run.seq.emitted.tolist()), stores[-1]


@contextlib.contextmanager
def our_warnings_alone():
    """Turn every warning of ours into an error, and ignore those of compilers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", ForedraftWarning)
        yield


@contextlib.contextmanager
def exact_products():
    """Compute float32 products in float32, and heed our own warnings alone."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with our_warnings_alone():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Watch(TorchDispatchMode):
    """Notes what would take something from the host in the middle of a recording."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        devices = {each.device.type for each in (*given, *tree_leaves(result)) if isinstance(each, torch.Tensor)}
        copied = func._schema.name in ("aten::copy_", "aten::_to_copy", "aten::to")
        if len(devices) > 1 and (copied or any(each.ndim for each in given if each.device.type == "cpu")):
            self.seen.append(func)
        return result
