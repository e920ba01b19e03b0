"""Must drafted texts be plain decoding's token for token, or may rounding excuse a difference?

Knows the generator's surface: its dtype, its compiled passes, and what its drafter asks of the target.
"""

from foredraft.api import Generator
from foredraft.model.quantized import EXACT, dtype_name


def is_exact(generator: Generator) -> bool:
    """Say whether rounding excuses no difference between the generator's method and plain decoding.

    So it is in float32, float64 and int8, and in any dtype where every pass that verifies is compiled and a row was
    found to come out the same to the last bit beside others. Drafters that go on from passes of their own verify with
    the model as it is.
    """
    if dtype_name(generator.target.model) in EXACT:
        return True
    compiled, as_it_is = generator.target.compiled, generator.drafter.needs.target is not None
    return compiled is not None and not as_it_is and compiled.rounds_alike(generator.most_nodes + 1)
