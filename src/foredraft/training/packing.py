"""Fixed windows from a prepared folder, in an order that depends on nothing but a seed and the step.

Knows token streams and domain shares. Does not know models, tokenizers or what a step does with its windows. There is
no state to save: the n-th batch of a run is the same whenever and wherever it is asked for.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.errors import StoreError, UsageError
from foredraft.options import nearest
from foredraft.training.text_data import FORMAT_VERSION

TokenStream = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class PreparedText:
    """An opened prepared folder; the streams are memory-mapped.

    Attributes:
        folder: where it lies; `tokenizer.json` is in it.
        vocabulary: number of ids.
        train: domain -> uint16[tokens], documents one after another, each ended by id 0.
        held: the same for the held-out side; may be empty.
        fingerprint: changes whenever the text, the tokenizer or the hold-out does.
    """

    folder: Path
    vocabulary: int
    train: Mapping[str, TokenStream]
    held: Mapping[str, TokenStream]
    fingerprint: str


def open_prepared(folder: Path) -> PreparedText:
    """Open what `text_data.prepare` wrote.

    Raises:
        UsageError: there is no such folder.
        StoreError: it is unfinished, damaged, or of another version.
    """
    manifest_file = folder / "manifest.json"
    if not folder.is_dir():
        raise UsageError(f"There is no prepared folder {folder}. Make one with the command 'prepare'.")
    if not manifest_file.is_file():
        raise StoreError(f"{folder} has no manifest.json, so its preparation did not finish. Run 'prepare' again.")
    raw = manifest_file.read_bytes()
    try:
        manifest = json.loads(raw)
        version, domains, vocabulary = manifest["version"], manifest["domains"], int(manifest["vocabulary"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{manifest_file} cannot be read ({error}). Run 'prepare' again.") from error
    if version != FORMAT_VERSION:
        raise StoreError(f"{folder} has version {version} and this is version {FORMAT_VERSION}. Run 'prepare' again.")
    return PreparedText(
        folder,
        vocabulary,
        {name: _stream(folder / f"train-{name}.u16", entry["train"]) for name, entry in domains.items()},
        {name: _stream(folder / f"held-{name}.u16", entry["held"]) for name, entry in domains.items()},
        hashlib.sha256(raw).hexdigest(),
    )


def _stream(file: Path, entry: Mapping[str, Any]) -> TokenStream:
    """Map one side of a domain, or raise `StoreError` when its size is not the manifest's."""
    size = file.stat().st_size if file.is_file() else -1
    if size != 2 * entry["tokens"]:
        raise StoreError(f"{file} should hold {2 * entry['tokens']} bytes and holds {size}. Run 'prepare' again.")
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, np.uint16)
    return np.memmap(file, "<u2", mode="r")


class WindowOrder:
    """All training windows of a prepared folder, shuffled anew in every epoch."""

    def __init__(self, text: PreparedText, window: int, shares: Mapping[str, float], seed: int) -> None:
        """Count the windows.

        Args:
            text: where the tokens are.
            window: tokens a model sees at once; a window holds one more, for the last target.
            shares: domain -> how much of it one epoch takes: 0.5 is another random half in every epoch, 2.0 everything
                twice; domains that are not named are taken once.
            seed: of the order.

        Raises:
            UsageError: an unknown domain or a negative share, or no domain fills a single window.
        """
        for name, share in shares.items():
            if name not in text.train:
                raise UsageError(f"There is no domain {name!r} in {text.folder}.{nearest(name, text.train)}")
            if share < 0:
                raise UsageError(f"The share of {name!r} is {share}; give 0 to leave the domain out, or more.")
        self._streams = list(text.train.values())
        # Consecutive windows overlap by the one token that is the target of the first and an input of the second.
        self._windows = [max(0, (len(stream) - 1) // window) for stream in self._streams]
        self._taken = [
            round(count * shares.get(name, 1.0)) for name, count in zip(text.train, self._windows, strict=True)
        ]
        self._window, self._seed = window, seed
        self._epoch, self._order = -1, np.empty((0, 2), np.int64)
        if not sum(self._taken):
            raise UsageError(
                f"No domain of {text.folder} fills a window of {window} tokens. Give more text or a shorter window."
            )

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return sum(self._taken)

    def batch(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the windows number `first` to `first + count` of the run, int64[count, window + 1]."""
        rows = []
        for number in range(first, first + count):
            epoch, position = divmod(number, len(self))
            domain, index = self._shuffled(epoch)[position]
            start = index * self._window
            rows.append(self._streams[domain][start : start + self._window + 1])
        return np.stack(rows).astype(np.int64)

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return (domain, window) pairs in the order of `epoch`, int64[windows, 2]; the last one asked for is kept."""
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, epoch])
            pairs = []
            for domain, (count, taken) in enumerate(zip(self._windows, self._taken, strict=True)):
                passes = [random.permutation(count) for _ in range(-(-taken // count) if count else 0)]
                chosen = np.concatenate(passes)[:taken] if passes else np.empty(0, np.int64)
                pairs.append(np.stack([np.full(len(chosen), domain, np.int64), chosen.astype(np.int64)], axis=1))
            self._order = random.permutation(np.concatenate(pairs), axis=0)
            self._epoch = epoch
        return self._order
