"""Sentiment140 (Go et al. 2009): tweets labelled by their emoticons, one device per user.

The usual file ``training.1600000.processed.noemoticon.csv`` has no header, is Latin-1, and has six
columns: polarity (0 negative, 4 positive), id, date, query, user, text.
"""

from __future__ import annotations

import csv
import html
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from flower_ext.data.examples import ClientData, Examples
from flower_ext.data.partition import split
from flower_ext.data.sources import Source, open_text
from flower_ext.errors import InvalidValue

DEVICES = 52
SEQUENCE_LENGTH = 25
VOCABULARY_SIZE = 10_000
PADDING, UNKNOWN = 0, 1

SOURCE = Source(
    name="sent140",
    files=tuple(
        (f"{folder}/training.1600000.processed.noemoticon.csv",)
        for folder in ("sent140", "sentiment140")
    ),
    hub="stanfordnlp/sentiment140",
)

_LABELS = {0: 0, 4: 1}
_TOKEN = re.compile(r"[\w']+")

Tweet = tuple[int, str, str, str]
"""Label (0 negative, 1 positive), user, date and text."""


def load(
    folder: Path | None = None,
    *,
    rng: np.random.Generator,
    num_devices: int = DEVICES,
    vocabulary_size: int = VOCABULARY_SIZE,
    sequence_length: int = SEQUENCE_LENGTH,
    train_fraction: float = 0.74,
    min_tweets: int = 10,
) -> list[ClientData]:
    """Load the users with the most tweets as devices, the most prolific first.

    Some tweets occur twice, with the same label or another; only the first one counts, so that no
    tweet both trains and tests. The vocabulary comes from all devices' training tweets together; no
    privacy guarantee of a training covers it.

    Parameters
    ----------
    folder : Path, optional
        Folder of the file, which is plain or gzipped; by default the environment variable
        FLOWER_EXT_DATA names it, else flwr-datasets downloads it.
    rng : numpy.random.Generator
        Divides each user's tweets into training and test.
    vocabulary_size : int
        Number of token ids, including padding and unknown.
    train_fraction : float
        The default follows the paper's Table 2: 8,484 of 32,299 tweets test.
    min_tweets : int
        Users with fewer tweets are left out.

    Returns
    -------
    list of ClientData
        Features int64 (n, sequence_length), targets int64 (n,): 0 negative, 1 positive.

    Raises
    ------
    DataNotFound
        Neither the folder nor flwr-datasets has the tweets.
    ValueError
        An argument is out of range, too few users have enough tweets, or the file has other
        content.
    """
    for name, value, least in (
        ("num_devices", num_devices, 1),
        ("vocabulary_size", vocabulary_size, 2),
        ("sequence_length", sequence_length, 1),
        ("min_tweets", min_tweets, 2),
    ):
        if value < least:
            raise InvalidValue(f"{name}={value!r}: expected at least {least}")
    tweets = _tweets(folder)
    by_user = _most_prolific(lambda: _without_repeats(tweets()), num_devices, min_tweets)
    divided = []
    for user_tweets in by_user:
        labels = np.array([label for label, _ in user_tweets])
        rows = split(np.arange(len(labels)), labels, train_fraction=train_fraction, rng=rng)
        divided.append([[user_tweets[row] for row in part] for part in rows])
    texts = (tokenize(text) for train, _ in divided for _, text in train)
    ids = vocabulary(texts, size=vocabulary_size)

    def examples(part: Sequence[tuple[int, str]]) -> Examples:
        features = [encode(tokenize(text), ids, length=sequence_length) for _, text in part]
        return Examples(torch.tensor(features), torch.tensor([label for label, _ in part]))

    return [ClientData(train=examples(train), test=examples(test)) for train, test in divided]


def tokenize(text: str) -> list[str]:
    """Return runs of letters, digits, underscores and apostrophes, in lower case.

    HTML entities are resolved first, because tweets contain ``&amp;`` and ``&quot;``.
    """
    return _TOKEN.findall(html.unescape(text).lower())


def vocabulary(texts: Iterable[Sequence[str]], *, size: int = VOCABULARY_SIZE) -> dict[str, int]:
    """Map the most frequent tokens to ids 2 … size - 1; equally frequent ones go by alphabet."""
    counts = Counter(token for tokens in texts for token in tokens)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return {token: number for number, token in enumerate(ranked[: size - 2], start=UNKNOWN + 1)}


def encode(
    tokens: Sequence[str], ids: Mapping[str, int], *, length: int = SEQUENCE_LENGTH
) -> list[int]:
    """Return the ids of the first ``length`` tokens, padded with 0; 1 for unknown tokens."""
    known = [ids.get(token, UNKNOWN) for token in tokens[:length]]
    return known + [PADDING] * (length - len(known))


def _most_prolific(
    tweets: Callable[[], Iterator[tuple[int, str, str]]], num_devices: int, min_tweets: int
) -> list[list[tuple[int, str]]]:
    """Return labels and texts of the users with the most tweets; two passes keep only theirs."""
    counts = Counter(user for _, user, _ in tweets())
    enough = [user for user, count in counts.items() if count >= min_tweets]
    if len(enough) < num_devices:
        raise InvalidValue(
            f"num_devices={num_devices!r}: expected at most {len(enough)}, the users with "
            f"{min_tweets} tweets or more"
        )
    chosen = sorted(enough, key=lambda user: (-counts[user], user))[:num_devices]
    by_user: dict[str, list[tuple[int, str]]] = {user: [] for user in chosen}
    for label, user, text in tweets():
        if user in by_user:
            by_user[user].append((label, text))
    return list(by_user.values())


def _without_repeats(tweets: Iterable[Tweet]) -> Iterator[tuple[int, str, str]]:
    """Yield label, user and text of every tweet that has not occurred before."""
    seen: set[int] = set()
    for label, user, date, text in tweets:
        tweet = hash((user, date, text))  # eight bytes per tweet, of which there are over a million
        if tweet not in seen:
            seen.add(tweet)
            yield label, user, text


def _tweets(folder: Path | None) -> Callable[[], Iterator[Tweet]]:
    """Return a function that starts a pass over all tweets."""
    paths = SOURCE.locate(folder)
    if paths is not None:
        return lambda: _read(paths[0])
    (table,) = SOURCE.download(["train"], folder)
    table = table.select_columns(["sentiment", "user", "date", "text"])
    return lambda: (
        (_label(row["sentiment"]), row["user"], row["date"], row["text"]) for row in table
    )


def _read(path: Path) -> Iterator[Tweet]:
    with open_text(path, encoding="latin-1") as stream:
        rows = csv.reader(stream)
        try:
            for polarity, _, date, _, user, text in rows:
                yield _label(int(polarity)), user, date, text
        except (ValueError, csv.Error, EOFError, OSError, zlib.error) as error:
            raise InvalidValue(
                f"{path}, line {rows.line_num}: expected polarity (0 or 4), id, date, query, user, "
                f"text: {error}"
            ) from error


def _label(polarity: int) -> int:
    if polarity not in _LABELS:
        raise InvalidValue(f"polarity {polarity} is neither 0 nor 4")
    return _LABELS[polarity]
