"""A model, its tokenizer and a drafter put together: prompts in, texts out, alone or many at once.

The only place where models, drafters, controls and text meet. Does not know how any of them works, or how a model is
loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Unpack

import numpy as np

from foredraft.cache_folder import cache_folder, cache_path
from foredraft.contracts import Control, CostCurve, DraftContext, Drafter, Learner, TokenIds, Verification
from foredraft.control import BatchControl, FixedControl, StepCosts, choose_control
from foredraft.corpus.words import vocabulary_size
from foredraft.drafters import make_drafter
from foredraft.drafters.prediction import ChainDrafter, Prediction
from foredraft.engine.batch import Batch, Lane, write_all
from foredraft.engine.guard import GuardedDrafter
from foredraft.engine.state import Prepared, SequenceState
from foredraft.errors import UsageError
from foredraft.generation import Generation, Run, Stream, generation
from foredraft.model.batch_target import batch_target
from foredraft.model.compiled.background import Compilation
from foredraft.model.compiled.build import compile_forward
from foredraft.model.compiled.package import kept_forward
from foredraft.model.cost import measured_cost
from foredraft.model.recordings import RecordedForward
from foredraft.model.target import TorchTarget
from foredraft.pairing import pair_draft_model
from foredraft.request import GenerationArguments, GenerationOptions, checked_text, encoded
from foredraft.sampling import SEED_LIMIT, LogitsProcessor, SamplingOptions
from foredraft.speculation import checked_verification
from foredraft.standard_library import resources_for
from foredraft.text import StopStrings

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A text to continue, a conversation (`role` and `content` each), or token ids."""

CACHE_BYTES = 2**30
"""Memory for the keys and values of texts that are written together: 46,000 tokens of SmolLM2-135M in bfloat16."""

TEXTS_AT_ONCE = 16
"""Texts of `generate_all` that are written together: twice as many take twice as long a pass on two cores."""

Around = Callable[[Drafter], Drafter]
"""Returns what drafts for one text, from the drafter of all."""

Progress = Callable[[float, str], None]
"""Told about work that takes over a second: the share done, 0 to 1, and what it is."""


class Generator:
    """A model, its tokenizer, and a drafter, ready to write.

    Attributes:
        target: the model.
        tokenizer: its tokenizer; None where nothing but ids goes in and comes out (see `begin`).
        method: the name of the drafting method.
        drafter: the drafter.
        verification: "matched" or "rejection".
    """

    def __init__(
        self,
        target: TorchTarget,
        tokenizer: Any,
        *,
        method: str,
        options: Mapping[str, Any],
        nodes: int | None,
        control: str | None = None,
        control_options: Mapping[str, Any] | None = None,
        verification: Verification = "matched",
        progress: Progress | None = None,
        compilation: Compilation | None = None,
    ) -> None:
        self.target = target
        self._compilation = compilation
        self.tokenizer = tokenizer
        self._progress = progress
        self._curve: CostCurve | None = None
        if tokenizer is not None:
            _check_vocabulary(target, tokenizer)
        self.use(method, options, nodes, control, control_options, verification)

    def use(
        self,
        method: str,
        options: Mapping[str, Any] | None = None,
        nodes: int | None = None,
        control: str | None = None,
        control_options: Mapping[str, Any] | None = None,
        verification: Verification = "matched",
    ) -> None:
        """Change the drafting method, how much it drafts, and how drafts are verified.

        Args:
            method: one of `foredraft methods`.
            options: the method's own.
            nodes: `num_speculative_tokens`: fixes the number of drafted nodes a step, or caps it if `control` is given.
            control: the name of a control, see docs/explanation/control.md.
            control_options: the control's own.
            verification: "matched" or "rejection".

        Raises:
            UsageError: an unknown name, option or value.
            StoreError: a table that is damaged or belongs to another tokenizer.
        """
        choose_control(nodes, control, control_options)  # refused now, not after the tables
        resources = replace(
            resources_for(self.target.vocabulary, self.tokenizer, progress=self._progress),
            draft_model=partial(pair_draft_model, target=self.target, tokenizer=self.tokenizer),
            target=self.target,
        )
        drafter = make_drafter(method, options or {}, resources)
        self.attach(method, drafter, nodes, control, control_options, verification)

    def attach(
        self,
        method: str,
        drafter: Drafter,
        nodes: int | None = None,
        control: str | None = None,
        control_options: Mapping[str, Any] | None = None,
        verification: Verification = "matched",
        costs: StepCosts | None = None,
    ) -> None:
        """Draft with a drafter that exists already, under the name `method`: one built elsewhere, or used before.

        `costs` is what the measured control keeps from text to text; given again, it goes on with what it knows.
        """
        if nodes is None and control is None:
            control = drafter.needs.control
        self._amount = choose_control(nodes, control, control_options)
        self._costs = StepCosts() if costs is None else costs
        self.method, self.drafter = method, drafter
        self.verification = checked_verification(verification)

    @property
    def most_nodes(self) -> int:
        """The most nodes that a step may draft."""
        return self._amount.most_nodes

    @property
    def cost(self) -> CostCurve:
        """What a forward pass costs by its rows: measured at first use, then read from the cache folder."""
        if self._curve is None:
            self._curve = measured_cost(self.target, cache_path())
        return self._curve

    @property
    def needs_cost(self) -> bool:
        """Whether the next text will need `cost`, which may have to be measured first."""
        return self.method != "none" and self._amount.needs_cost

    def compile(self) -> None:
        """Compile the model's forward for this machine and use it; what was compiled before is only timed anew.

        So are those models that the drafting method runs besides: a draft model, or the parts of an early exit.

        On a CUDA device nothing is compiled: passes are recorded when they are first asked for.

        Raises:
            UsageError: a model that cannot be compiled here, with the reason.
            StoreError: the cache folder cannot be written, or what lies there is damaged.
            ForedraftError: no compiler, or a forward that cannot be compiled.
        """
        if self.target.model.device.type == "cuda":
            self.target.recordings, self._curve = RecordedForward(self.target.model), None
            return
        for each in (self.target, *self.drafter.needs.models):
            compile_forward(each.model, cache_folder(), each.passage, progress=self._progress)
            each.compiled = kept_forward(each.model, each.passage)
        self._curve = None

    def _take_compiled(self) -> None:
        self.target.compiled = kept_forward(self.target.model)
        self._curve = None

    def save(self) -> None:
        """Write what the drafter was asked to remember (`share` and `memory`); nothing where it was not.

        Raises:
            StoreError: the file cannot be written.
        """
        if isinstance(self.drafter, Learner) and self.drafter.saves:
            self.drafter.save()

    def forget(self) -> None:
        """Forget what earlier texts taught the drafter and the control, as if nothing had been written yet."""
        if isinstance(self.drafter, Learner):
            self.drafter.forget()
        self._costs = StepCosts()

    def generate(self, prompt: Prompt, *, chat: bool = False, **options: Unpack[GenerationArguments]) -> Generation:
        """Write the continuation of `prompt`; several are written by `generate_all`.

        Args:
            prompt: a text, a conversation, or token ids. A text is continued as it is; the command line wraps it in the
                chat template where there is one.
            chat: whether `prompt` is a text to answer: the same as a conversation of that one message.
            **options: see `foredraft.request.GenerationOptions`; names are transformers'.

        Raises:
            UsageError: what cannot be honoured, before the first token.
            NumericsError: scores from which no token can be chosen.
        """
        ids, arguments = self._checked(prompt, options, chat=chat)
        return self._written(self.prepare(ids, **arguments))

    def generate_all(
        self, prompts: Sequence[Prompt], *, chat: bool = False, count: int = 1, **options: Unpack[GenerationArguments]
    ) -> list[Generation]:
        """Write the continuations of many prompts together; each text is the one that `generate` writes.

        Args:
            prompts: what `generate` takes, each.
            chat: whether they are texts to answer.
            count: texts for each prompt, which follow each other in the result; the i-th is drawn with `seed + i`.
            **options: for all of them.

        Raises:
            UsageError: what cannot be honoured, before the first token.
            OutOfMemoryError: there is no memory for one of them alone.
            NumericsError: scores from which no token can be chosen, once the others are written.
        """
        texts = [self._checked(prompt, options, chat=chat) for prompt in prompts for _ in range(count)]
        seeds = [arguments["sampling"].seed for _, arguments in texts]
        for place, (_, arguments) in enumerate(texts):
            seed = (seeds[place - place % count] + place % count) % SEED_LIMIT
            arguments["sampling"] = replace(arguments["sampling"], seed=seed)
        prepared = [self.prepare(ids, **arguments) for ids, arguments in texts]
        if self.drafter.needs.target is not None:  # which drafts in the cache of the one text that is written
            return [self._written(each) for each in prepared]
        return [self.result(lane) for lane in write_all(self.batch(), prepared, TEXTS_AT_ONCE)]

    def _written(self, prepared: Prepared) -> Generation:
        """Write one text to its end."""
        run = Run(prepared, self.drafter.needs.target or self.target)
        for _ in run.steps():
            pass
        return run.result(self.tokenizer)

    def stream(self, prompt: Prompt, *, chat: bool = False, **options: Unpack[GenerationArguments]) -> Stream:
        """Begin to write; iterate over the result for pieces, and read its `generation` afterwards.

        Takes and raises what `generate` does.
        """
        return Stream(self.start(prompt, chat=chat, **options), self.tokenizer)

    def start(self, prompt: Prompt, *, chat: bool = False, **options: Unpack[GenerationArguments]) -> Run:
        """Begin to write; iterate over the result's `steps()`, and read its `result()` meanwhile or afterwards.

        It keeps its drafter, so that several can be written by turns. Takes and raises what `generate` does.
        """
        ids, arguments = self._checked(prompt, options, chat=chat)
        return self.begin(ids, **arguments)

    def _checked(self, prompt: Prompt, options: Mapping[str, Any], *, chat: bool) -> tuple[TokenIds, dict[str, Any]]:
        """Return the ids of a prompt, and the arguments of `prepare` that follow them."""
        if chat:
            if not isinstance(prompt, str):
                raise UsageError(f"chat=True is for a prompt that is a text; this one is a {type(prompt).__name__}.")
            prompt = [{"role": "user", "content": prompt}]
        arguments = self.arguments(options)
        return self.encode(prompt), arguments

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `prepare` after its first one, from those of `generate`.

        Raises:
            UsageError: what cannot be honoured.
        """
        given = GenerationOptions.parse(options)
        return {
            "sampling": given.sampling(self.target.vocabulary),
            "max_new_tokens": given.max_new_tokens,
            "eos": given.eos(self.eos_token_ids(), self.target.vocabulary),
            "processors": given.logits_processor,
            "stop": StopStrings(self.tokenizer, given.stops) if given.stops else None,
            "around": self._around(given.prediction),
        }

    def _around(self, prediction: str | None) -> Around:
        """Return what lets a text be drafted from a prediction, if there is one.

        Raises:
            UsageError: a prediction for a method that drafts nothing.
        """
        if not prediction:
            return lambda drafter: drafter
        if self.method == "none":
            raise UsageError("prediction is drafted from, and method 'none' drafts nothing; leave one of them out.")
        if self.verification != "matched":
            raise UsageError("prediction needs matched verification: its tokens are not drawn from a distribution.")
        ids = self.tokenizer(checked_text(prediction), add_special_tokens=False).input_ids
        expected = Prediction(np.asarray(ids, np.int64))
        return lambda drafter: ChainDrafter(drafter, expected)

    def begin(self, ids: TokenIds, sampling: SamplingOptions, **arguments: Any) -> Run:
        """Begin to write after token ids; takes and raises what `prepare` does."""
        return Run(self.prepare(ids, sampling, **arguments), self.drafter.needs.target or self.target)

    def prepare(
        self,
        ids: TokenIds,
        sampling: SamplingOptions,
        *,
        max_new_tokens: int,
        eos: Sequence[int] = (),
        processors: Sequence[LogitsProcessor] = (),
        stop: Callable[[int], bool] | None = None,
        around: Around = lambda drafter: drafter,
    ) -> Prepared:
        """Check a text before it has a cache, where how tokens are chosen and what ends the text is decided already.

        Args:
            ids: int64[n], the prompt; at least one.
            sampling: how tokens are chosen, with the seed.
            max_new_tokens: the text ends after this many.
            eos: ids that end it.
            processors: transformers' logits processors.
            stop: called once for every emitted token, in order; True ends the text.
            around: returns what drafts for this text, from the drafter of all.

        Raises:
            UsageError: a prompt that fills the model's window.
        """
        if self._compilation is not None and self._compilation.has_news():
            self._take_compiled()
        window = self.target.window
        if window is not None and len(ids) >= window:
            raise UsageError(
                f"The prompt has {len(ids)} tokens and the model's window is {window}; shorten the prompt to at most "
                f"{window - 1}."
            )
        begin = partial(
            SequenceState, ids, sampling=sampling, max_new_tokens=max_new_tokens, window=window, eos=eos,
            processors=processors, stop=stop, verification=self.verification,
        )  # fmt: skip
        settings = {**asdict(sampling), "verification": self.verification}
        context = DraftContext(self.target.vocabulary, sampling.seed, self._amount.most_nodes, settings)
        drafter, shared = GuardedDrafter(around(self.drafter)), self.method != "none" and self._amount.is_measured
        return Prepared(ids, begin, drafter, self._control(sampling.seed), shared, context)

    def batch(self, cache_bytes: int = CACHE_BYTES) -> Batch:
        """Return an empty batch, in which many texts are written by passes that they share.

        Args:
            cache_bytes: memory for the keys and values of all of them, and of earlier texts that begin alike.
        """
        target = batch_target(self.target, cache_bytes)
        return Batch(target, BatchControl(lambda: self.cost, target.most_rows, self._amount.most_nodes, self._costs))

    def join(self, batch: Batch, prompt: Prompt, *, chat: bool = False, **options: Unpack[GenerationArguments]) -> Lane:
        """Begin to write in a batch; takes what `generate` does.

        Raises:
            UsageError: what cannot be honoured, before the first token.
            OutOfMemoryError: there is no room for the prompt while other texts have theirs.
        """
        ids, arguments = self._checked(prompt, options, chat=chat)
        return batch.join(self.prepare(ids, **arguments))

    def result(self, lane: Lane) -> Generation:
        """Return what has been written of a text of a batch so far."""
        return generation(lane.seq, lane.records, lane.prefill_seconds, lane.seed, self.tokenizer)

    def encode(self, prompt: Prompt) -> TokenIds:
        """Return the prompt's ids, int64[n]; a conversation goes through the model's chat template.

        Raises:
            UsageError: an empty prompt, something that is no prompt, ids that the model does not have, or a
                conversation without a chat template or that the template refuses.
        """
        return encoded(prompt, self.tokenizer, self.target.vocabulary)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a text by default: the model's generation configuration's, else the tokenizer's."""
        given = getattr(getattr(self.target.model, "generation_config", None), "eos_token_id", None)
        given = self.tokenizer.eos_token_id if given is None else given
        if given is None:
            return ()
        return (given,) if isinstance(given, int) else tuple(given)

    def _control(self, seed: int) -> Control:
        return FixedControl(0) if self.method == "none" else self._amount.make(lambda: self.cost, seed, self._costs)


def _check_vocabulary(target: TorchTarget, tokenizer: Any) -> None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    size = vocabulary_size(backend) if backend is not None else len(tokenizer)
    if size > target.vocabulary:
        raise UsageError(
            f"The tokenizer has ids up to {size - 1} and the model scores ids below {target.vocabulary}; this is not "
            "the model's tokenizer, or its embeddings were not resized."
        )
