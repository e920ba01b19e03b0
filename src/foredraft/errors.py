"""The exceptions that foredraft raises on purpose, each with a message that a user can act on.

Does not depend on models, files or text. The command line exits with status 2 for `UsageError` and 1 for every other
`ForedraftError`.
"""


class ForedraftError(Exception):
    """Base of all exceptions raised on purpose; the message names the value, the limit and the remedy."""


class UsageError(ForedraftError, ValueError):
    """An option, argument or prompt that is invalid or not supported."""


class PromptTooLongError(UsageError):
    """A prompt that leaves no room for a new token in the model's window."""


class UnsupportedModelError(ForedraftError):
    """The model cannot verify a tree of drafts in one pass (recurrent state, ALiBi, encoder-decoder, ...)."""


class StoreError(ForedraftError):
    """A stored table, datastore or cache file is missing, damaged, or belongs to another tokenizer or version."""


class NumericsError(ForedraftError):
    """The model produced logits from which no token can be chosen (NaN, or none left after the filters)."""


class OutOfMemoryError(ForedraftError):
    """No memory is left for the next pass or for the KV cache to grow; the tokens written so far are kept."""


class ForedraftWarning(UserWarning):
    """A problem that does not stop the work; the command line prints it without a source location."""


def told(error: BaseException) -> str:
    """Return an error's type and the first line of its message, for use in another message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error: numba's compiled code turns a KeyboardInterrupt into a SystemError."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or is_interrupt(error.__cause__) or is_interrupt(error.__context__)
    )
