"""The exceptions foredraft raises on purpose; every message is a sentence a user can act on.

Knows nothing about models, files or text. The command line maps `UsageError` to exit status 2 and every other
`ForedraftError` to exit status 1.
"""


class ForedraftError(Exception):
    """Base of everything foredraft raises on purpose: one sentence naming the value, the limit and the remedy."""


class UsageError(ForedraftError, ValueError):
    """The caller asked for something that cannot be honoured (option, argument, prompt)."""


class UnsupportedModelError(ForedraftError):
    """The model cannot be verified as a tree (recurrent state, ALiBi, encoder-decoder, ...)."""


class StoreError(ForedraftError):
    """A stored table, datastore or cache file is missing, damaged, or belongs to another tokenizer or version."""


class NumericsError(ForedraftError):
    """The model produced scores that no token can be chosen from (NaN, or nothing left after the filters)."""


class OutOfMemoryError(ForedraftError):
    """There is no memory left for the next pass or for the cache to grow; what was written so far stands."""


class ForedraftWarning(UserWarning):
    """What a user should know although the work goes on; the command line prints it as a sentence."""


def told(error: Exception) -> str:
    """Return an error's kind and the first line of what it says, for a warning that goes on without its cause."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
