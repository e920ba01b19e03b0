"""Compiled models, what is written with and without compiled passes, and the record of a compiled package."""

import warnings

from foredraft.api import Generator
from foredraft.engine.batch import steps
from foredraft.model.compiled.build import compile_forward
from foredraft.model.compiled.package import CompiledForward, CompiledRecord
from foredraft.model.kv_cache import LayerShape
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support.causal_types import tiny_configuration
from support.families import prompt_of, tiny_model

SAMPLINGS = ({}, {"do_sample": True, "temperature": 0.8, "seed": 3})
METHODS = (
    ("none", {}, 0),
    ("prompt_lookup", {}, 10),
    ("adaptix", {"table": "none"}, 24),
)


GEMMA4 = {
    "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3, "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
"""Sizes of a Gemma 4 that several files compile: windows, heads of two sizes, and a layer that reads another's keys."""


def model_of(family, sizes):
    """Return a tiny model of a family with a window long enough to compile, and with these sizes."""
    config = tiny_configuration(family)
    for name, value in {"max_position_embeddings": 1024, **sizes}.items():
        setattr(config, name, value)
    return tiny_model(config)


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
