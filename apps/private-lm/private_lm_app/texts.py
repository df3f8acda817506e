"""Texts of clients as examples: windows of running text, and records with a prompt.

A folder holds files of two kinds:

* ``*.txt`` is running text, which is cut into windows.
* Each line of ``*.jsonl`` is a record ``{"prompt": ..., "completion": ..., "author": 3}``. The
  model learns the completion alone. ``prompt`` may be absent. ``author`` is needed only for privacy
  of authors. In that case, a text without a valid author, or a line that is no record, is left out
  with a warning: an error would let one author's texts change what other authors contribute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_ext.data import ClientData, DataNotFound, Examples, SiloData
from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.privacy import seeded_generator
from flower_ext_pretrained.next_token import IGNORED
from private_lm_app.python_text import private_functions

log = getLogger("flwr")

TEST_SHARE = 4
"""One of this many texts is for tests."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts of all clients, by number of the client.

    Parameters
    ----------
    of_python : bool
        If True, the texts are functions of Python's library; otherwise they are files of
        ``folder``.
    folder : Path, optional
        If it has sub-folders, each of them belongs to one client, in the order of their names. If
        it has none, its files belong to the only client on this machine.
    clients, texts_per_client, users, seed
        The settings of these names. ``users`` is 0 if texts have no authors.
    """

    of_python: bool
    folder: Path | None
    clients: int
    texts_per_client: int
    users: int
    seed: int

    def client_data(self, tokenizer: Any, max_tokens: int, client: int) -> ClientData:
        """Return the examples of one client, three quarters of them for training.

        Raises
        ------
        InvalidValue
            No text leaves a token to learn.
        """
        texts = self._of_python(client) if self.of_python else self._of_folder(client)
        rows = [
            row
            for text in texts
            if self._has_author(text)
            for row in encoded(tokenizer, text, max_tokens)
        ]
        if not rows:
            raise InvalidValue(
                f"max-tokens={max_tokens}: no text of this client leaves a token to learn, so all "
                "labels would be ignored; expected shorter prompts, or a larger max-tokens"
            )
        examples = padded([row[:2] for row in rows], tokenizer.pad_token_id or 0, max_tokens)
        test, train = self._split(rows, client)
        data = ClientData(train=examples.subset(train), test=examples.subset(test))
        if not self.users:
            return data
        owners = torch.tensor([rows[row][2] for row in train])
        return SiloData(train=data.train, test=data.test, owners=owners)

    def _split(self, rows: Sequence[Row], client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the rows for tests, and of the rows for training.

        With authors, each author's rows are divided separately, so that one author's texts cannot
        move the rows of another.
        """
        by_author: dict[object, list[int]] = {}
        for number, (_, _, author) in enumerate(rows):
            by_author.setdefault(author if self.users else None, []).append(number)
        test, train = [], []
        for author, numbers in by_author.items():
            path = ("split", client) if author is None else ("split", client, int(str(author)))
            order = seeded_generator(self.seed, *path).permutation(numbers)
            test += [*order[: len(numbers) // TEST_SHARE]]
            train += [*order[len(numbers) // TEST_SHARE :]]
        return np.array(test, dtype=int), np.array(train, dtype=int)

    def _has_author(self, text: Text) -> bool:
        """Return True if a text has an author, or needs none."""
        author = text.author
        known = type(author) is int and 0 <= author < self.users
        if self.users and not known:
            log.warning(
                "a text is left out, because its author is not a number of 0 … %d", self.users - 1
            )
        return known or not self.users

    def _of_folder(self, client: int) -> Iterator[Text]:
        named = f"data-folder={str(self.folder or '')!r}"
        with knowing_no_data():  # a folder's name and the number of clients are no person's data
            if self.folder is None or not self.folder.is_dir():
                raise DataNotFound(
                    f"{named} with dataset='folder': expected the absolute path of a folder of "
                    "texts, in the settings or in the node config"
                )
            folders = sorted(path for path in self.folder.iterdir() if path.is_dir())
            if folders and len(folders) != self.clients:
                raise InvalidValue(
                    f"{named} with clients={self.clients}: expected {self.clients} sub-folders, "
                    "one for each client"
                )
        return read(folders[client] if folders else self.folder, strict=not self.users)

    def _of_python(self, client: int) -> Iterator[Text]:
        shares = _shares_of_modules(self.texts_per_client)
        if self.users:  # a module is an author, whose shares lie with clients next to each other
            for author, parts in enumerate(shares[: self.users]):
                number = (client - author * self.clients // self.users) % self.clients
                for share in parts[number : number + 1]:
                    yield from (Text("", code, author, 1) for code in share)
            return
        # First one share of each module, then a second one of those that have it, and so on.
        people = [share for row in zip_longest(*shares) for share in row if share]
        if self.clients > len(people):
            with knowing_no_data():
                raise InvalidValue(
                    f"clients={self.clients} with texts-per-client={self.texts_per_client}: "
                    f"Python's library has functions for {len(people)} clients; expected no more"
                )
        yield from (Text("", code, None, 1) for code in people[client])


@dataclass(frozen=True)
class Text:
    """A text to learn, and its prompt, which may be empty.

    At most ``most`` windows of the text are used; all of them if it is None.
    """

    prompt: str
    completion: str
    author: object = None
    most: int | None = None


def read(folder: Path, *, strict: bool) -> Iterator[Text]:
    """Yield the texts of the files of a folder.

    Parameters
    ----------
    folder : Path
    strict : bool
        False to leave out, with a warning, lines that are no records.

    Raises
    ------
    InvalidValue
        ``strict`` is True, and a line of a ``.jsonl`` file is no record. No text is shown.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix == ".txt":
            yield Text("", path.read_text(encoding="utf-8", errors="replace"))
        elif path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    prompt, completion = record.get("prompt", ""), record["completion"]
                    if not isinstance(prompt, str) or not isinstance(completion, str):
                        raise TypeError
                except (ValueError, KeyError, TypeError, AttributeError):
                    reason = f"{path}: line {number} is not a JSON object with texts prompt and "
                    if strict:
                        raise InvalidValue(f"{reason}completion") from None
                    log.warning("%scompletion, and is left out", reason)
                    continue
                yield Text(prompt, completion, record.get("author"), 1)


Row = tuple[list[int], list[int], object]
"""Tokens of an example, its labels, and its author."""


def encoded(tokenizer: Any, text: Text, max_tokens: int) -> Iterator[Row]:
    """Yield the windows of running text, or the single example of a record.

    Each example has at most ``max_tokens`` tokens.

    A record ends with the end-of-text token, so that generation learns to stop. Examples without a
    token to learn are left out.
    """
    (prompt, tokens), end = (_ids(tokenizer, part) for part in (text.prompt, text.completion)), []
    if text.most == 1 and tokenizer.eos_token_id is not None:
        end = [tokenizer.eos_token_id]
    ids = [*prompt, *tokens, *end]
    labels = [*[IGNORED] * len(prompt), *tokens, *end]
    starts = range(0, len(ids), max_tokens)
    for start in starts[: text.most]:
        window = slice(start, start + max_tokens)
        if any(label != IGNORED for label in labels[window][1:]):
            yield ids[window], labels[window], text.author


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int, length: int) -> Examples:
    """Return rows of tokens and labels as examples of one length."""

    def filled(parts: Iterable[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([part + [value] * (length - len(part)) for part in parts])

    labels = filled((row[1] for row in rows), IGNORED)
    return Examples({"input_ids": filled((row[0] for row in rows), pad), "labels": labels}, labels)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@cache
def _shares_of_modules(size: int) -> list[list[tuple[str, ...]]]:
    """Return, for each private module, shares of ``size`` functions.

    Functions of one share lie far apart in their module. Neighbouring functions are often almost
    copies of each other, and one of them could be for training and the other for tests.
    """
    modules = [(functions, len(functions) // size) for functions in private_functions()]
    return [[functions[i::most][:size] for i in range(most)] for functions, most in modules]
