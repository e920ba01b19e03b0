"""What is written with and without compiled passes, and records of compiled packages."""

import dataclasses

from foredraft.api import Generator
from foredraft.contracts import CostCurve
from foredraft.engine.batch import steps
from foredraft.model.compiled.package import (
    ANY,
    EAGER,
    MOST_ROWS,
    ONE,
    CompiledForward,
    CompiledRecord,
)
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


def written(target, method, options, nodes, sampling):
    generator = Generator(target, None, method=method, options=options, nodes=nodes or None)
    run = generator.begin(prompt_of(20), SamplingOptions(**sampling), max_new_tokens=48)
    return [token for record in steps(run) for token in record.emitted]


def always_compiled(model, folder, record):
    """Return a target that runs what it can with the packages, whatever they cost."""
    costs = {**record.costs, EAGER: constant(1e6)}
    return TorchTarget(model, CompiledForward(folder, dataclasses.replace(record, costs=costs)))


def constant(seconds):
    return CostCurve((1, MOST_ROWS), (seconds, seconds))


def record_of(recipe="torch's kernels", warning="", **told):
    """Return a record of packages with the seconds that passes of 1, 4 and 16 rows take, None where they take none."""
    packages = tuple(
        dataclasses.replace(package, recipe=recipe, kernels=("attention",))
        for package in (ANY, ONE)
        if package.name in told
    )
    costs = {}
    for name, seconds in told.items():
        timed = [(rows, each) for rows, each in zip((1, 4, 16), seconds, strict=True) if each is not None]
        costs[name] = CostCurve(*(tuple(column) for column in zip(*timed, strict=True)))
    return CompiledRecord(
        packages, costs, same_bits=True, shapes=(LayerShape(2, 16),) * 2, torch="9.9", warning=warning
    )
