import csv
import gzip

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_ext.data import DataNotFound, sent140
from flower_ext.data.sent140 import encode, load, tokenize, vocabulary

pytestmark = pytest.mark.usefixtures("offline")

FILE = "training.1600000.processed.noemoticon.csv"
NASTY = [
    'He said ""hi"", really',
    "one, two, three",
    "Müßig café",
    "two\nlines",
    "&quot;Tom &amp; Jerry&quot;",
]


def rows(users: dict[str, int]) -> list[tuple[int, str, str]]:
    """Return so many tweets of each user, alternating; every other tweet is positive."""
    turns = [(turn, user) for user, count in users.items() for turn in range(count)]
    return [
        (4 * (turn % 2), user, f"{'good' if turn % 2 else 'bad'} {NASTY[turn % 5]} {user}")
        for turn, user in sorted(turns)
    ]


def date(number: int) -> str:
    return f"Mon Apr 06 22:{number // 60:02}:{number % 60:02} PDT 2009"


def write(path, tweets) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="latin-1", newline="") as stream:
        table = csv.writer(stream, quoting=csv.QUOTE_ALL)
        for number, (polarity, user, text) in enumerate(tweets):
            table.writerow([polarity, number, date(number), "NO_QUERY", user, text])


def devices(folder, seed=0, **arguments):
    return load(folder, rng=np.random.default_rng(seed), **arguments)


@pytest.mark.parametrize(
    "where", [FILE, f"{FILE}.gz", f"sent140/{FILE}", f"sentiment140/{FILE}.gz"]
)
def test_the_most_prolific_users_are_the_devices(where, tmp_path):
    write(tmp_path / where, rows({"few": 9, "ann": 12, "bob": 40, "carl": 20, "dora": 20}))
    read = devices(tmp_path, num_devices=3)
    assert [len(data.train) + len(data.test) for data in read] == [40, 20, 20]
    for data in read:
        for part in (data.train, data.test):
            assert part.features.shape == (len(part), 25)
            assert part.features.dtype == part.targets.dtype == torch.int64
            assert set(part.targets.tolist()) == {0, 1}
        assert len(data.train) == round(0.74 * (len(data.train) + len(data.test)))
        assert data.train.features.max() < 10_000


def test_features_are_the_tweets_tokens_whatever_quotes_commas_and_accents_they_hold(tmp_path):
    tweets = rows({"ann": 40})
    write(tmp_path / FILE, tweets)
    (data,) = devices(tmp_path, num_devices=1)
    found = [
        (int(target), tuple(row.tolist()))
        for part in (data.train, data.test)
        for row, target in zip(part.features, part.targets, strict=True)
    ]
    assert len(set(found)) == len(set(tweets)) == 10
    lengths = sorted((int(polarity == 4), len(tokenize(text))) for polarity, _, text in tweets)
    assert sorted((target, sum(token > 0 for token in row)) for target, row in found) == lengths
    assert min(token for _, row in found for token in row if token > 0) > 1
    mood = {row[0] for target, row in found if target == 1}
    assert len(mood) == 1  # "good" comes first in every positive tweet
    assert mood != {row[0] for target, row in found if target == 0}


def test_a_tweet_that_comes_twice_counts_once_whatever_its_second_label(tmp_path):
    tweets = rows({"ann": 12, "bob": 30})
    write(tmp_path / "once" / FILE, tweets)
    write(tmp_path / "twice" / FILE, tweets)
    lines = (tmp_path / "twice" / FILE).read_text(encoding="latin-1")
    again = lines.replace('"4","', '"0","')
    (tmp_path / "twice" / FILE).write_text(lines + lines + again, encoding="latin-1")
    once, twice = (devices(tmp_path / name, num_devices=2) for name in ("once", "twice"))
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(a.train.features, b.train.features)
        assert torch.equal(a.test.features, b.test.features)
        assert torch.equal(a.train.targets, b.train.targets)


def test_the_vocabulary_holds_training_tokens_only(tmp_path, monkeypatch):
    tweets = [(4 * (turn % 2), "ann", f"word{turn} always") for turn in range(40)]
    write(tmp_path / FILE, tweets)
    (data,) = devices(tmp_path, num_devices=1)
    assert (data.train.features[:, :2] > 1).all()
    assert (data.test.features[:, 0] == 1).all()
    assert (data.test.features[:, 1] == 2).all()  # the most frequent token has the first id
    assert (data.train.features[:, 2:] == 0).all()
    monkeypatch.setattr(sent140, "VOCABULARY_SIZE", 3)
    (small,) = devices(tmp_path, num_devices=1)
    assert set(small.train.features.flatten().tolist()) == {0, 1, 2}


def test_the_generator_alone_decides_the_split(tmp_path):
    write(tmp_path / FILE, rows({"ann": 30, "bob": 30}))
    before = torch.get_rng_state()
    first, again, other = (devices(tmp_path, seed, num_devices=2) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(a.train.features, b.train.features) for a, b in zip(first, again, strict=True)
    )
    assert any(
        not torch.equal(a.test.features, b.test.features) for a, b in zip(first, other, strict=True)
    )


def test_equally_prolific_users_come_in_alphabetical_order(tmp_path):
    write(tmp_path / FILE, [(0, user, user) for _ in range(10) for user in ("zoe", "ann", "max")])
    (data,) = devices(tmp_path, num_devices=1)
    assert set(data.train.features[:, 0].tolist()) == {2}
    write(tmp_path / FILE, [(0, u, u) for u in ("zoe",) * 10 + ("ann",) * 10 + ("ann2",) * 9])
    with pytest.raises(ValueError, match="num_devices=3: expected at most 2, the users with 10"):
        devices(tmp_path, num_devices=3)
    assert len(devices(tmp_path, num_devices=2)) == 2


def test_no_device_at_all_is_refused(tmp_path):
    write(tmp_path / FILE, rows({"ann": 20}))
    with pytest.raises(ValueError, match="num_devices=0: expected an integer >= 1"):
        devices(tmp_path, num_devices=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'"2","1","date","NO_QUERY","ann","so so"\n', "line 1: .*polarity 2 is neither 0 nor 4"),
        (b'"0","1","d","NO_QUERY","ann","a"\n"0","ann","text"\n', "line 2: expected polarity"),
        (b"polarity,id,date,query,user,text\n", "line 1: expected polarity"),
    ],
)
def test_a_file_of_something_else_is_refused_with_its_line(content, said, tmp_path):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"{FILE}, {said}"):
        devices(tmp_path, num_devices=1)


def test_damaged_gzip_is_an_error_that_names_the_file(tmp_path):
    write(tmp_path / f"{FILE}.gz", rows({"ann": 200}))
    whole = (tmp_path / f"{FILE}.gz").read_bytes()
    for damaged in (b"not gzip", whole[:-20], whole[:40] + b"\xff" * 40 + whole[80:]):
        (tmp_path / f"{FILE}.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{FILE}.gz, line"):
            devices(tmp_path, num_devices=1)


def test_a_missing_file_says_which_where_and_what_to_do(tmp_path):
    with pytest.raises(DataNotFound) as caught:
        devices(tmp_path)
    for word in ("sent140", str(tmp_path), FILE, "FLOWER_EXT_DATA", "flwr-datasets"):
        assert word in str(caught.value)
    with pytest.raises(DataNotFound, match="none is given"):
        devices(None)


def test_the_hub_gives_the_same_devices_as_the_file(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    flwr_datasets = pytest.importorskip("flwr_datasets")
    tweets = rows({"ann": 20, "bob": 30})
    columns = zip(*tweets, strict=True)
    table = dict(zip(("sentiment", "user", "text"), map(list, columns), strict=True))

    class Served:
        def __init__(self, dataset, **_):
            assert dataset == "stanfordnlp/sentiment140"

        def load_split(self, split):
            assert split == "train"
            dates = [date(number) for number in range(len(tweets))]
            facts = {"date": dates, "query": ["NO_QUERY"] * len(tweets)}
            return datasets.Dataset.from_dict({**table, **facts})

    monkeypatch.setattr(flwr_datasets, "FederatedDataset", Served)
    write(tmp_path / FILE, tweets)
    for a, b in zip(devices(None, num_devices=2), devices(tmp_path, num_devices=2), strict=True):
        assert torch.equal(a.train.features, b.train.features)
        assert torch.equal(a.test.targets, b.test.targets)


def test_tokens_are_lower_case_words_with_their_apostrophes():
    assert tokenize("@Bob I DON'T like it... &quot;AT&amp;T&quot; café 24/7 :(") == [
        *("bob", "i", "don't", "like", "it", "at", "t", "café", "24", "7")
    ]
    assert tokenize("!!! ...") == []


@given(st.text())
def test_tokens_hold_no_space_and_are_tokens_of_themselves(text):
    tokens = tokenize(text)
    assert all(token and not any(letter.isspace() for letter in token) for token in tokens)
    assert " ".join(tokens).split() == tokens


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=6)), st.integers(2, 10))
def test_a_vocabulary_numbers_the_most_frequent_tokens_from_2(texts, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sent140, "VOCABULARY_SIZE", size)
        ids = vocabulary(texts)
    counts = {token: sum(tokens.count(token) for tokens in texts) for token in "abcdef"}
    occurring = [token for token in counts if counts[token]]
    assert sorted(ids.values()) == list(range(2, 2 + min(size - 2, len(occurring))))
    assert all(
        counts[kept] >= counts[other] for kept in ids for other in occurring if other not in ids
    )


@given(st.lists(st.sampled_from("abcx"), max_size=8), st.integers(1, 5))
def test_encoding_cuts_or_pads_to_the_length(tokens, length):
    ids = {"a": 2, "b": 3, "c": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sent140, "SEQUENCE_LENGTH", length)
        row = encode(tokens, ids)
    assert len(row) == length
    kept = min(length, len(tokens))
    assert row[:kept] == [ids.get(token, 1) for token in tokens[:kept]]
    assert set(row[kept:]) <= {0}
