"""What commands that generate share: the model and method to load, generation arguments, and the prompt.

Contradicting options are rejected before a model is loaded. Options that are not given are not passed on, so defaults
are the library's. Does not depend on how results are printed.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from foredraft.cli import flags
from foredraft.cli.screen import working
from foredraft.errors import UsageError
from foredraft.model.gguf.files import SMOLLM2
from foredraft.options import json_object

if TYPE_CHECKING:  # torch and transformers are imported when a command runs, so that help is fast
    from foredraft.api import Generator, Prompt

# Repeating prompt ids that a drafter can draft from, and enough tokens (chosen) for steps with accepted, rejected and
# no drafts: each kind of step compiles kernels at first use, which should not count as time of a text.
_WARM_UP, _WARM_UP_TOKENS = (1, 2, 3, 1, 2, 3, 1, 2), 24


@dataclass(frozen=True, slots=True)
class Job:
    """The options of a command that generates, except those of the text."""

    model: flags.ModelOption = SMOLLM2
    dtype: flags.DtypeOption = "auto"
    device: flags.DeviceOption = None
    eager: flags.EagerOption = False
    method: flags.MethodOption = None
    speculative_config: Annotated[str | None, flags.in_drafting(help="The method's options, as a JSON object")] = None
    num_speculative_tokens: Annotated[
        int | None, flags.in_drafting(help="Drafted tokens per step; default: by the measured cost of verification")
    ] = None

    def config(self, **given: Any) -> dict[str, Any]:
        """Merge --speculative-config with `given` flags; UsageError for other than a JSON object, or two values."""
        text = self.speculative_config
        config = {} if text is None else json_object(text, "--speculative-config")
        for name, value in {**given, "num_speculative_tokens": self.num_speculative_tokens}.items():
            if value is not None and config.setdefault(name, value) != value:
                flag = "--draft-model" if name == "model" else f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is {value} and --speculative-config says {config[name]}; give one of them.")
        return config

    def load(self, config: Mapping[str, Any], *settings: Mapping[str, Any]) -> "Generator":
        """Load the model and the drafter, measure the cost of verification if needed, and warm up.

        The settings are generation arguments: of the text to come, or several, such as of a server's texts. They are
        checked first; raises what `foredraft.load` raises.
        """
        with working(f"loading {self.model}") as tell:
            from foredraft.api import Generator, load
            from foredraft.request import GenerationOptions

            for each in settings:
                GenerationOptions.parse(each).sampling(sys.maxsize)  # top_k is compared with the vocabulary later
            generator = load(
                self.model, method=self.method, speculative_config=config, dtype=self.dtype, device=self.device,
                compile=False if self.eager else "auto", progress=tell,
            )  # fmt: skip
            if generator.amount.needs_cost:
                tell(0.0, "measuring the cost of verification on this machine (once)")
                _ = generator.cost
            tell(0.0, "warming up (on a new installation it takes longer, as kernels are compiled)")
            # another generator, so that the control does not learn costs that include compilation
            other = Generator(generator.target, generator.tokenizer, method="none")
            other.attach(generator.method, generator.drafter)
            for each in settings:
                other.generate(_WARM_UP, **{**each, "max_new_tokens": _WARM_UP_TOKENS, "eos_token_id": ()})
            generator.forget()  # of the warm-up text nothing is kept, in no memory either
        return generator


def load_plain(
    model: str, dtype: str, eager: bool, tell: Callable[[float, str], None], device: str | None = None
) -> "Generator":
    """Load a model with plain decoding, for commands that compare methods or generate training texts.

    On a CUDA device its passes are recorded, as these commands run many.
    """
    from foredraft.api import load
    from foredraft.model.recordings import recorded_forward

    generator = load(
        model, method="none", dtype=dtype, device=device, compile=False if eager else "auto", progress=tell
    )  # fmt: skip
    target = generator.target
    if not eager and target.outline.device.type == "cuda":
        target.recordings = recorded_forward(target.model)
    return generator


def setting(temperature: float, **arguments: int) -> dict[str, Any]:
    """Return generation arguments, greedy at temperature 0; UsageError, without a model, if one is out of range."""
    from foredraft.request import GenerationOptions

    found: dict[str, Any] = dict(arguments)
    if temperature:
        found["temperature"] = temperature
    GenerationOptions.parse(found).sampling(2)  # any vocabulary size will do
    return found


def samples(generator: "Generator", options: Mapping[str, Any]) -> bool:
    """Return whether generation arguments sample tokens."""
    return bool(generator.arguments(options)["sampling"].do_sample)


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the argument, standard input or the file; UsageError if there is none in UTF-8."""
    if (prompt is None) == (file is None):
        raise UsageError("Give one prompt: PROMPT, - to read standard input, or --file FILE.")
    try:
        if file is not None:
            text = file.read_bytes().decode("utf-8-sig")
        elif prompt == "-" and sys.stdin is None:
            raise UsageError("Standard input is closed; give the prompt as an argument or with --file.")
        else:
            text = sys.stdin.read() if prompt == "-" else prompt or ""
            text.encode("utf-8")
    except OSError as error:
        raise UsageError(f"The file {file} cannot be read ({error.strerror}); give another one.") from error
    except UnicodeError as error:
        raise UsageError("The prompt is not text in UTF-8; convert it first.") from error
    if not text.strip():
        raise UsageError("The prompt is empty; give at least a word to continue.")
    return text


def prompt_for(generator: "Generator", text: str, system: str | None = None, *, raw: bool = False) -> "Prompt":
    """Return a conversation if the tokenizer has a chat template, else, or if `raw`, the text itself."""
    if raw or not getattr(generator.tokenizer, "chat_template", None):
        if system is not None:
            raise UsageError("--system needs a chat template, which this model's tokenizer does not have.")
        return text
    return [*opening(system), {"role": "user", "content": text}]


def opening(system: str | None) -> list[dict[str, str]]:
    """Return the messages before a conversation: the system message, if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]
