"""Sequences of tokens over one plan: prefill, decode, fork, snapshot, rollback, save, load.

decoder = graphc.runtime.decoder.load("plan-folder")
sequence = decoder.sequence()
logits = sequence.prefill(prompt)
logits = sequence.decode(int(logits.argmax()))

All sequences share the plan, its weights and one pool of pages. What a sequence remembers is in
pages, which it gets as it grows, and in one slot of fixed size. Pages are shared by forks and
snapshots until somebody writes into them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphc.errors import DamagedError, UsageError
from graphc.plan import DecoderPlan
from graphc.runtime.pages import PagePool
from graphc.runtime.session import Session
from graphc.runtime.session import load as load_session

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    Logits = NDArray[np.float32]


def load(path: Path | str, *, threads: int | None = None, verify: bool = False) -> Decoder:
    """Loads a plan of a decoder. Arguments and errors as `graphc.runtime.session.load`.

    Raises UsageError if the plan has no decoder's phases.
    """
    return Decoder(load_session(path, threads=threads, verify=verify))


#: pages at once from which on they may make up huge pages of the machine
_MANY = 16


class Decoder:
    """The plan at work; made by `load`."""

    def __init__(self, session: Session) -> None:
        if session.plan.decoder is None:
            raise UsageError(
                "expected a plan with the phases prefill and decode, found one without states",
                where=session.folder,
                hint="build the model with: graphc build MODEL --generate -o PLAN",
            )
        self.session = session
        self.facts: DecoderPlan = session.plan.decoder
        self.pool = PagePool(self.facts.pages)
        self._free_slots = list(range(self.facts.slots - 1, -1, -1))
        states = list(session.states.values())
        #: bytes of each page, and of each slot, by state
        self._pages = [_by_entry(states[i]) for i in self.facts.rows]
        self._slots = [_by_entry(states[i]) for i in self.facts.fixed]

    @property
    def page_bytes(self) -> int:
        """Memory of one page in all layers."""
        return sum(view.shape[1] for view in self._pages)

    @property
    def slot_bytes(self) -> int:
        """Memory of what a sequence keeps whatever its length, in all layers."""
        return sum(view.shape[1] for view in self._slots)

    def sequence(self) -> Sequence:
        """A new sequence without tokens.

        Raises UsageError: all slots are taken.
        """
        return Sequence(self, self._take_slot())

    def decode(self, sequences: Many[Sequence], tokens: ArrayLike) -> Logits:
        """One more token for each sequence: float32 [B, V], the scores of what follows.

        Raises:
            UsageError: a sequence is full, appears twice, or there are no pages left; nothing ran.
        """
        ids = np.asarray(tokens, np.int64).reshape(-1)
        self._reserve(sequences, ids[:, None])
        made: list[Logits] = []
        for first in range(0, len(ids), self.facts.batch):
            some = sequences[first : first + self.facts.batch]
            made.append(self._run(some, ids[first : first + len(some), None])[:, -1])
        return made[0] if len(made) == 1 else np.concatenate(made)

    def verify(self, sequences: Many[Sequence], tokens: ArrayLike) -> Logits:
        """The same K tokens more [B, K] as K decodes, at once: float32 [B, K, V], the scores of
        what follows each of them. A snapshot taken before is the way back to a token before the
        last.

        Raises:
            UsageError: as `decode`, or K is not what the plan was built for; nothing ran.
        """
        ids = np.asarray(tokens, np.int64)
        drafts = self.facts.drafts
        if ids.ndim != 2 or not 2 <= ids.shape[1] <= drafts:
            raise UsageError(
                f"expected tokens [sequences, 2 to {drafts}], found {list(ids.shape)}"
                if drafts
                else "expected a plan with the phase verify, found one without",
                hint="build with room for more: graphc build MODEL --generate --drafts K",
            )
        self._reserve(sequences, ids)
        made = [
            self._run(sequences[first : first + self.facts.batch],
                      ids[first : first + self.facts.batch], ids.shape[1])
            for first in range(0, len(ids), self.facts.batch)
        ]  # fmt: skip
        return made[0] if len(made) == 1 else np.concatenate(made)

    # ------------------------------------------------------------ for sequences

    def _reserve(self, sequences: Many[Sequence], ids: NDArray[np.int64]) -> None:
        """Room for ids [B, T]."""
        if len(sequences) != len(ids):
            raise UsageError(f"expected {len(sequences)} tokens, found {len(ids)}")
        if len(set(map(id, sequences))) != len(sequences):
            raise UsageError("expected different sequences, found one twice")
        for sequence in sequences:
            sequence._reserve(ids.shape[1])

    def _run(self, sequences: Many[Sequence], ids: NDArray[np.int64], keep: int = 1) -> Logits:
        """Appends ids [B, T], for which there is room; gives the logits [B, keep, V] behind the
        last ones."""
        logits: Logits = self._answer(sequences, ids, keep)["logits"]
        return logits

    def _answer(
        self, sequences: Many[Sequence], ids: NDArray[np.int64], keep: int
    ) -> dict[str, NDArray[Any]]:
        """All results by name."""
        answer: dict[str, NDArray[Any]] = self.session.run(
            input_ids=ids, start=np.array([s.length for s in sequences], np.int32),
            table=self._table(sequences, ids.shape[1]),
            slots=np.array([s.slot for s in sequences], np.int32),
            kept=np.arange(ids.shape[1] - keep, ids.shape[1]),
        )  # fmt: skip
        for sequence in sequences:
            sequence.length += ids.shape[1]
        return answer

    def _table(self, sequences: Many[Sequence], more: int) -> NDArray[np.int32]:
        """int32 [B, M]: the pages of the tokens that there are and of the next `more`, in the
        narrowest table that a program takes. Pages beyond them are left out, so that the first
        piece of a long prompt costs what it would cost alone."""
        longest = max(sequence.length for sequence in sequences) + more
        pages = -(-longest // self.facts.page)
        columns = min(max(low, pages) for low, high in self.facts.columns if pages <= high)
        if len(sequences) == 1:
            return sequences[0].table[None, :columns]
        return np.stack([sequence.table[:columns] for sequence in sequences])

    def _take_slot(self) -> int:
        if not self._free_slots:
            raise UsageError(
                f"expected a free slot, found all {self.facts.slots} sequences in use",
                hint="close one, or build with room for more sequences",
            )
        slot = self._free_slots.pop()
        for view in self._slots:
            view[slot] = 0
        return slot

    def _slot_content(self, slot: int) -> list[NDArray[np.uint8]]:
        return [view[slot].copy() for view in self._slots]

    def _write_slot(self, slot: int, content: list[NDArray[np.uint8]]) -> None:
        for view, data in zip(self._slots, content, strict=True):
            view[slot] = data

    def _expect(self, pages: list[int]) -> None:
        """Pages that are about to be filled, those of a long prompt: in huge pages of the machine,
        where rows far apart are read a sixth faster."""
        first, count = min(pages), max(pages) + 1 - min(pages)
        for state, view in zip(self.facts.rows, self._pages, strict=True):
            entry = view.shape[1]
            self.session._states.use_huge_pages(state, first * entry, count * entry)

    def _copy_page(self, page: int, copy: int) -> None:
        for view in self._pages:
            view[copy] = view[page]


@dataclass
class Snapshot:
    """A sequence as it was: `Sequence.rollback` goes back to it, any number of times. It keeps
    pages in use until it is closed."""

    decoder: Decoder
    length: int
    pages: list[int]
    content: list[Any] = field(repr=False)
    closed: bool = False

    def close(self) -> None:
        """Gives the pages back."""
        if not self.closed:
            self.decoder.pool.give_back(self.pages)
        self.closed = True

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Sequence:
    """Tokens, and what the model remembers of them; made by `Decoder.sequence`."""

    def __init__(self, decoder: Decoder, slot: int) -> None:
        self.decoder = decoder
        self.slot = slot
        self.length = 0
        self.pages: list[int] = []
        #: the same pages, then -1: as programs read them, made once and not at every token
        self.table = np.full(max(high for _, high in decoder.facts.columns), -1, np.int32)
        self.closed = False

    def prefill(self, tokens: ArrayLike) -> Logits:
        """Appends tokens, in pieces of the plan's chunk: float32 [V], the scores of what follows.

        Raises UsageError: no tokens, or more than fit; the sequence is as it was then.
        """
        ids = np.asarray(tokens, np.int64).reshape(-1)
        if not len(ids):
            raise UsageError("expected at least one token, found none")
        self._reserve(len(ids))
        chunk = self.decoder.facts.chunk
        for first in range(0, len(ids), chunk):
            logits = self.decoder._run([self], ids[None, first : first + chunk])
        last: Logits = logits[0, -1]
        return last

    def decode(self, token: int) -> Logits:
        """Appends one token: float32 [V]."""
        last: Logits = self.decoder.decode([self], [token])[0]
        return last

    def verify(self, tokens: ArrayLike) -> Logits:
        """Appends K tokens: float32 [K, V], what K calls of `decode` give."""
        scores: Logits = self.decoder.verify([self], np.asarray(tokens, np.int64)[None])[0]
        return scores

    def score(self, tokens: ArrayLike) -> dict[str, NDArray[Any]]:
        """Appends up to a chunk of tokens, with a plan that `watch` was given for
        (`graphc.decoders.build`): what it watches, and "logits" float32 [1, T, V].

        Raises UsageError: no tokens, or more than fit; the sequence is as it was then.
        """
        ids = np.asarray(tokens, np.int64).reshape(-1)
        chunk = self.decoder.facts.chunk
        if not 1 <= len(ids) <= chunk:
            raise UsageError(f"expected 1 to {chunk} tokens, found {len(ids)}")
        self._reserve(len(ids))
        return self.decoder._answer([self], ids[None], len(ids))

    def rows(self, state: str) -> NDArray[Any]:
        """A copy of what one of the plan's states of rows holds of this sequence [length, W]."""
        held = self.decoder.session.states[state][self.pages]
        return held.reshape(-1, held.shape[-1])[: self.length]

    def fork(self) -> Sequence:
        """Another sequence with the same past; pages are shared until one of them is written."""
        decoder = self._open()
        other = Sequence(decoder, decoder._take_slot())
        decoder._write_slot(other.slot, decoder._slot_content(self.slot))
        other.length = self.length
        other._use(decoder.pool.share(self.pages))
        return other

    def snapshot(self) -> Snapshot:
        """The sequence as it is now."""
        decoder = self._open()
        return Snapshot(
            decoder, self.length, decoder.pool.share(self.pages), decoder._slot_content(self.slot)
        )

    def rollback(self, snapshot: Snapshot) -> None:
        """Everything as it was at the snapshot: pages, recurrent states, windows.

        Raises UsageError: the snapshot is closed or another decoder's.
        """
        decoder = self._open()
        if snapshot.closed or snapshot.decoder is not decoder:
            raise UsageError("expected an open snapshot of this decoder")
        pages = decoder.pool.share(snapshot.pages)
        decoder.pool.give_back(self.pages)
        self.length = snapshot.length
        self._use(pages)
        decoder._write_slot(self.slot, snapshot.content)

    def save(self, path: Path | str) -> None:
        """Writes what the model remembers to one .npz file, all or nothing."""
        from pathlib import Path

        from graphc.files import replacing

        decoder = self._open()
        arrays: dict[str, NDArray[Any]] = {
            "model": np.frombuffer(_identity(decoder).encode(), np.uint8),
            "length": np.array(self.length, np.int64),
        }
        used = self.pages[: -(-self.length // decoder.facts.page)]
        for i, view in enumerate(decoder._pages):
            arrays[f"pages{i}"] = view[used]
        for i, view in enumerate(decoder._slots):
            arrays[f"slot{i}"] = view[self.slot]
        with replacing(Path(path)) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def load(self, path: Path | str) -> None:
        """Reads what `save` wrote, in place of what this sequence remembers.

        Raises:
            DamagedError: the file is not whole; the sequence is as it was.
            UsageError: it is another model's, or too long for the pages that are free.
        """
        decoder = self._open()
        length, pages, slots = _read(path, decoder)
        fresh = decoder.pool.take(-(-length // decoder.facts.page))
        for view, data in zip(decoder._pages, pages, strict=True):
            view[fresh] = data
        decoder._write_slot(self.slot, slots)
        decoder.pool.give_back(self.pages)
        self.length = length
        self._use(fresh)

    def close(self) -> None:
        """Gives pages and slot back; the sequence is not to be used any more."""
        if not self.closed:
            self.decoder.pool.give_back(self.pages)
            self.decoder._free_slots.append(self.slot)
        self.closed = True

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> Decoder:
        if self.closed:
            raise UsageError("expected an open sequence, found a closed one")
        return self.decoder

    def _reserve(self, more: int) -> None:
        """Pages of its own for the next `more` rows."""
        decoder, page = self._open(), self.decoder.facts.page
        context = decoder.facts.context
        if self.length + more > context:
            raise UsageError(
                f"expected at most {context} tokens, found {self.length + more}",
                hint="build with a larger bucket: graphc build MODEL --generate --bucket "
                f"{self.length + more}",
            )

        first = self.length // page
        wanted = -(-(self.length + more) // page)
        shared = [p for p in self.pages[first:] if decoder.pool.shared(p)]
        missing = max(0, wanted - len(self.pages)) + len(shared)
        if not missing:
            return
        fresh = decoder.pool.take(missing)
        if missing >= _MANY:
            decoder._expect(fresh)
        copies = {page: fresh.pop() for page in shared}
        for page, copy in copies.items():
            decoder._copy_page(page, copy)
        decoder.pool.give_back(shared)
        self._use([*(copies.get(p, p) for p in self.pages[first:]), *fresh], first)

    def _use(self, pages: list[int], first: int = 0) -> None:
        """Its pages from `first` on."""
        self.pages[first:] = pages
        self.table[first : len(self.pages)] = pages
        self.table[len(self.pages) :] = -1


def _by_entry(state: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a state, one row for each entry of its first dimension."""
    return state.view(np.uint8).reshape(state.shape[0], -1)


def _identity(decoder: Decoder) -> str:
    """What two plans have in common that can read each other's sequences."""
    plan = decoder.session.plan
    states = "; ".join(f"{s.tensor.name} {s.tensor.dtype} {s.tensor.text[1:]}" for s in plan.states)
    return f"{plan.model}: {states}"


def _read(path: Path | str, decoder: Decoder) -> tuple[int, list[Any], list[Any]]:
    from zipfile import BadZipFile

    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {key: stored[key] for key in stored.files}
        if bytes(found["model"]).decode() != _identity(decoder):
            raise UsageError(
                "expected a sequence of this model, found another model's", where=str(path)
            )
        length = int(found["length"])
        pages = [found[f"pages{i}"] for i in range(len(decoder._pages))]
        slots = [found[f"slot{i}"] for i in range(len(decoder._slots))]
    except (OSError, ValueError, KeyError, BadZipFile, EOFError) as error:
        raise DamagedError(f"cannot read the sequence: {error}", where=str(path)) from error
    count = -(-length // decoder.facts.page)
    wanted = [(count, view.shape[1]) for view in decoder._pages]
    if [p.shape for p in pages] != wanted or [s.shape for s in slots] != [
        view.shape[1:] for view in decoder._slots
    ]:
        raise DamagedError("the sequence's parts have wrong sizes", where=str(path))
    return length, pages, slots
