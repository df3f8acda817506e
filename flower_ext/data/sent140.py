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

from flower_ext.checks import require_at_least_one
from flower_ext.data.examples import ClientData, Examples
from flower_ext.data.partition import split
from flower_ext.data.sources import Source, open_text
from flower_ext.errors import InvalidValue

DEVICES = 52
SEQUENCE_LENGTH = 25
VOCABULARY_SIZE = 10_000
"""Number of token ids, including padding and unknown."""
TRAIN_FRACTION = 0.74
"""The paper's Table 2: 8,484 of 32,299 tweets test."""
MIN_TWEETS = 10
"""Users with fewer tweets are left out."""
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
    folder: Path | None = None, *, rng: np.random.Generator, num_devices: int = DEVICES
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

    Returns
    -------
    list of ClientData
        Features int64 (n, SEQUENCE_LENGTH), targets int64 (n,): 0 negative, 1 positive.

    Raises
    ------
    DataNotFound
        Neither the folder nor flwr-datasets has the tweets.
    ValueError
        ``num_devices`` is below 1, too few users have enough tweets, or the file has other content.
    """
    require_at_least_one("num_devices", num_devices)
    tweets = _tweets(folder)
    by_user = _most_prolific(lambda: _without_repeats(tweets()), num_devices)
    divided = []
    for user_tweets in by_user:
        labels = np.array([label for label, _ in user_tweets])
        rows = split(np.arange(len(labels)), labels, train_fraction=TRAIN_FRACTION, rng=rng)
        divided.append([[user_tweets[row] for row in part] for part in rows])
    texts = (tokenize(text) for train, _ in divided for _, text in train)
    ids = vocabulary(texts)

    def examples(part: Sequence[tuple[int, str]]) -> Examples:
        features = [encode(tokenize(text), ids) for _, text in part]
        return Examples(torch.tensor(features), torch.tensor([label for label, _ in part]))

    return [ClientData(train=examples(train), test=examples(test)) for train, test in divided]


def tokenize(text: str) -> list[str]:
    """Return runs of letters, digits, underscores and apostrophes, in lower case.

    HTML entities are resolved first, because tweets contain ``&amp;`` and ``&quot;``.
    """
    return _TOKEN.findall(html.unescape(text).lower())


def vocabulary(texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Map the most frequent tokens to ids from 2 on; equally frequent ones go by alphabet."""
    counts = Counter(token for tokens in texts for token in tokens)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return {
        token: number
        for number, token in enumerate(ranked[: VOCABULARY_SIZE - 2], start=UNKNOWN + 1)
    }


def encode(tokens: Sequence[str], ids: Mapping[str, int]) -> list[int]:
    """Return the ids of the first tokens, padded with 0; 1 for unknown tokens."""
    known = [ids.get(token, UNKNOWN) for token in tokens[:SEQUENCE_LENGTH]]
    return known + [PADDING] * (SEQUENCE_LENGTH - len(known))


def _most_prolific(
    tweets: Callable[[], Iterator[tuple[int, str, str]]], num_devices: int
) -> list[list[tuple[int, str]]]:
    """Return labels and texts of the users with the most tweets; two passes keep only theirs."""
    counts = Counter(user for _, user, _ in tweets())
    enough = [user for user, count in counts.items() if count >= MIN_TWEETS]
    if len(enough) < num_devices:
        raise InvalidValue(
            f"num_devices={num_devices!r}: expected at most {len(enough)}, the users with "
            f"{MIN_TWEETS} tweets or more"
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
