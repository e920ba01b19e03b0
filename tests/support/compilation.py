"""Compiled models, what is written with and without compiled passes, and the record of a compiled package."""

import warnings

from foredraft.api import Generator
from foredraft.engine.batch import steps
from foredraft.model.compiled.build import compile_forward
from foredraft.model.compiled.package import CompiledForward, CompiledRecord
from foredraft.model.kv_cache import LayerShape
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support.families import prompt_of

SAMPLINGS = ({}, {"do_sample": True, "temperature": 0.8, "seed": 3})
METHODS = (
    ("none", {}, 0),
    ("prompt_lookup", {}, 10),
    ("adaptix", {"table": "none"}, 24),
)


def compiled_once(model, cache):
    """Return a model as a target whose forward is compiled, once for a cache folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        return compiled_by(model, *compile_forward(model, cache))


def written(target, method, options, nodes, sampling):
    generator = Generator(target, None, method=method, options=options, nodes=nodes or None)
    run = generator.begin(prompt_of(20), SamplingOptions(**sampling), max_new_tokens=48)
    return [token for record in steps(run) for token in record.emitted]


def compiled_by(model, folder, record):
    """Return a target that runs the package of a folder."""
    return TorchTarget(model, CompiledForward(folder, record))


def record_of():
    """Return the record of a package that does not exist."""
    shapes = (LayerShape(2, 16, 16),) * 2
    return CompiledRecord("", "9.9", ("attention",), "", shapes, (), "bfloat16", 0, 0)
