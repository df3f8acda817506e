import csv
import gzip
from pathlib import Path
from traceback import format_exception

import numpy as np
import pytest
import torch

from flower_ext.data import DataNotFound
from flower_ext.errors import InvalidValue
from tests.support.apps import ULDP_FL
from tests.support.real_data import REAL

tables = ULDP_FL.module("tables")

pytestmark = pytest.mark.usefixtures("offline")

needs_real = pytest.mark.skipif(
    not (REAL / "heart_disease").is_dir(), reason="needs the real data sets"
)


def rng(seed=0):
    return np.random.default_rng(seed)


def write_creditcard(folder: Path, pool: bool, normal: int = 80, fraud: int = 20) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    table = rng().normal(3.0, 2.0, (normal + fraud, 30))
    header = ["Time", *(f"V{i}" for i in range(1, 29)), "Amount", "Class"]
    name = "creditcard_subset.csv.gz" if pool else "creditcard.csv"
    opener = gzip.open if pool else open
    with opener(folder / name, "wt", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*header, "pool"] if pool else header)
        for number, row in enumerate(table):
            label = int(number >= normal)
            # The rows of the pool "head" must not be read.
            extra = [["random"], ["head"]] if pool else [[]]
            for ending in extra:
                writer.writerow([*row, label, *ending])
    return table


def write_heart(folder: Path) -> None:
    folder.mkdir(parents=True)
    for centre in tables.HEART_DISEASE_CENTRES:
        with (folder / f"processed.{centre}.data").open("w") as stream:
            for number in range(24):
                pain, ecg = number % 4 + 1, number % 3
                values = [50 + number, 1, pain, 120, 200, 0, ecg, 150, 0, 1.5, "?", "?", "?"]
                if number == 5:
                    values[4] = "?"
                stream.write(",".join(map(str, [*values, number % 5])) + "\n")


def write_tcga(folder: Path) -> None:
    folder.mkdir(parents=True)
    names = [f"feature {i}" for i in range(39)]
    with (folder / "brca.csv").open("w") as stream:
        stream.write(",".join(["pid", *names, "E", "T"]) + "\n")
        for number in range(36):
            values = [f"P{number}", *([number] * 39), number % 2, 100 + number]
            stream.write(",".join(map(str, values)) + "\n")
    with (folder / "train_test_split.csv").open("w") as stream:
        stream.write("pid,fold,fold2\n")
        for number in range(30):  # the last six patients are in no partition
            fold = "test" if number % 5 == 4 else "train"
            stream.write(f"P{number},{fold},{fold}_{number // 5}\n")


@pytest.mark.parametrize("pool", [True, False])
def test_card_transactions_are_split_by_class_and_standardised_by_training_rows(pool, tmp_path):
    table = write_creditcard(tmp_path / "creditcard", pool)
    data = tables.creditcard(tmp_path, rng=rng())
    assert data.train.features.shape == (85, 30)
    assert data.train.targets.bincount().tolist() == [68, 17]
    assert data.test.targets.bincount().tolist() == [12, 3]
    torch.testing.assert_close(data.train.features.mean(dim=0), torch.zeros(30), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.train.features.std(dim=0, correction=0), torch.ones(30))
    scaled = torch.cat([data.train.features, data.test.features])[:, 0].numpy()
    order = np.corrcoef(np.sort(scaled), np.sort(table[:, 0]))[0, 1]
    assert order == pytest.approx(1.0, abs=1e-6)


def test_of_more_normal_transactions_a_tenth_of_kaggles_is_drawn(tmp_path, monkeypatch):
    write_creditcard(tmp_path, pool=False)
    monkeypatch.setattr(tables, "_NORMAL_TRANSACTIONS", 40)
    data = tables.creditcard(tmp_path, rng=rng())
    together = torch.cat([data.train.targets, data.test.targets])
    assert together.bincount().tolist() == [40, 20]


def test_heart_disease_drops_three_columns_and_incomplete_rows_and_makes_indicators(tmp_path):
    write_heart(tmp_path / "heart_disease")
    centres = tables.heart_disease(tmp_path)
    assert len(centres) == 4
    for centre in centres:
        assert len(centre.train) + len(centre.test) == 23
        assert centre.train.features.shape[1] == 13
        assert set(centre.train.targets.tolist()) == {0, 1}
        spread = centre.train.features.std(dim=0, correction=0)
        constant = torch.tensor([1, 2, 3, 4, 5, 6, 7])
        assert torch.equal(spread[constant], torch.zeros(7))
        varying = torch.tensor([0, 8, 9, 10, 11, 12])
        torch.testing.assert_close(spread[varying], torch.ones(6))
        # At most one of three indicators of chest pain is set, and then it is above its mean.
        both = torch.cat([centre.train.features, centre.test.features])
        assert int((both[:, 8:11] > 0).sum(dim=1).max()) == 1
        assert int((both[:, 11:] > 0).sum(dim=1).max()) == 1


def test_tcga_has_six_regions_time_first_and_the_split_of_the_file(tmp_path):
    write_tcga(tmp_path / "tcga_brca")
    regions = tables.tcga_brca(tmp_path)
    assert [(len(r.train), len(r.test)) for r in regions] == [(4, 1)] * 6
    assert regions[2].train.features.shape == (4, 39)
    assert regions[2].train.features[:, 0].tolist() == [10, 11, 12, 13]
    assert regions[2].train.targets.tolist() == [[110, 0], [111, 1], [112, 0], [113, 1]]
    assert regions[2].train.targets.dtype == torch.float32


def test_tcga_is_scaled_by_numbers_that_no_record_changes(tmp_path):
    write_tcga(tmp_path / "tcga_brca")
    pairs = zip(tables.tcga_brca(tmp_path), tables.tcga_brca(tmp_path, scaled=True), strict=True)
    for plain, scaled in pairs:
        for before, after in ((plain.train, scaled.train), (plain.test, scaled.test)):
            torch.testing.assert_close(after.features[:, 0], (before.features[:, 0] - 60) / 10)
            assert torch.equal(after.features[:, 1:], before.features[:, 1:])
            assert torch.equal(after.targets, before.targets)


READERS = {
    "creditcard": (tables.CREDITCARD, lambda folder: tables.creditcard(folder, rng=rng())),
    "heart-disease": (tables.HEART_DISEASE, tables.heart_disease),
    "tcga-brca": (tables.TCGA_BRCA, tables.tcga_brca),
}


@pytest.mark.parametrize("name", READERS)
def test_missing_files_are_named_with_the_folder_and_what_is_always_there(name, tmp_path):
    files, read = READERS[name]
    with pytest.raises(DataNotFound) as caught:
        read(tmp_path)
    for word in (name, str(tmp_path), files[0][0], "FLOWER_EXT_DATA", "digits"):
        assert word in str(caught.value)
    with pytest.raises(DataNotFound, match="data-folder='': expected"):
        read(None)


def test_files_of_something_else_are_refused_by_name(tmp_path):
    (tmp_path / "creditcard.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"creditcard\.csv: found no values of the columns Time"):
        tables.creditcard(tmp_path, rng=rng())
    (tmp_path / "creditcard.csv").unlink()
    (tmp_path / "creditcard.csv.gz").write_bytes(gzip.compress(b"Time,V1\n" * 99)[:30])
    with pytest.raises(ValueError, match="is damaged"):
        tables.creditcard(tmp_path, rng=rng())
    write_heart(tmp_path / "heart_disease")
    centre = tmp_path / "heart_disease" / "processed.va.data"
    for line, said in (
        ("1,2,3", r"va\.data: 3 columns, expected 14"),
        (
            "1,1,one,1,1,1,1,1,1,1,1,1,1,1",
            r"va\.data: expected a finite number in line 1, column 3$",
        ),
        ("1,1,9,1,1,1,1,1,1,1,1,1,1,1", "chest pain 1 … 4"),
        ("1,1,1,1,1,1,1,1,1,1,1,1,1,-9", "disease 0 … 4"),
        (
            "1,1,1,1,1,1,1,1,1,1,1,1,1,nan",
            r"va\.data: expected a finite number in line 1, column 14$",
        ),
        ("1,1,1,1,inf,1,1,1,1,1,1,1,1,1", "expected a finite number in line 1, column 5$"),
        ("?,1,1,1,1,1,1,1,1,1,1,1,1,1", r"va\.data: expected complete rows"),
    ):
        centre.write_text(line + "\n")
        with pytest.raises(ValueError, match=said):
            tables.heart_disease(tmp_path)
    (tmp_path / "brca.csv").write_text("pid,x,E,T\nP,1,0,5\n")
    (tmp_path / "train_test_split.csv").write_text("pid,fold,fold2\n")
    with pytest.raises(ValueError, match="1 features, expected 39"):
        tables.tcga_brca(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("4711 people,1,0", "line 4, column 'x'$"),
        ('0,"4711 at row 8, column 2",0', "line 4, column 'y'$"),
        ("0,4711x,0", "line 4, column 'y'$"),
        ("0", "as many columns in line 4 as in the first line$"),
    ],
)
def test_an_error_names_the_place_of_a_value_but_not_the_value(line, said, tmp_path):
    (tmp_path / "file.csv").write_text(f"x,y,z\n1,2,3\n\n{line}\n5,6,7\n")
    file = tables._CsvFile.read(tmp_path / "file.csv")
    with pytest.raises(InvalidValue, match=said) as caught:
        file.numbers(["x", "y"])
    assert "4711" not in "".join(format_exception(caught.value))


@pytest.mark.parametrize("content", [b"\x1f\x8bQ", "41,1\n".encode("utf-16"), b"\xfe\xff"])
@pytest.mark.parametrize("name", ["file.csv", "file.csv.gz"])
def test_an_error_about_a_damaged_file_quotes_no_byte(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidValue, match=rf"{name} is damaged \(\w+\); get") as caught:
        tables._CsvFile.read(tmp_path / name)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nan", "a finite number in line 2, column .+$"),
        ("inf", "a finite number in line 2, column .+$"),
        ("2", "0 or 1"),
        ("0.7", "0 or 1"),
    ],
)
@pytest.mark.parametrize(
    ("file", "column", "read"),
    [
        ("creditcard/creditcard.csv", -1, lambda folder: tables.creditcard(folder, rng=rng())),
        ("tcga_brca/brca.csv", -2, tables.tcga_brca),
    ],
    ids=["creditcard", "tcga"],
)
def test_classes_besides_0_and_1_and_infinite_cells_are_refused(
    file, column, read, value, said, tmp_path
):
    write_creditcard(tmp_path / "creditcard", pool=False)
    write_tcga(tmp_path / "tcga_brca")
    header, first, *lines = (tmp_path / file).read_text().splitlines()
    for place in [column, 2] if "finite" in said else [column]:
        cells = first.split(",")
        cells[place] = value
        (tmp_path / file).write_text("\n".join([header, ",".join(cells), *lines]) + "\n")
        with pytest.raises(ValueError, match=f"{Path(file).name}: expected {said}"):
            read(tmp_path)


def test_breast_cancer_is_always_there():
    data = tables.breast_cancer(rng=rng())
    assert data.train.features.shape == (484, 30)
    assert len(data.test) == 85
    assert data.train.targets.dtype == torch.int64


@needs_real
def test_the_real_tables_have_their_published_sizes():
    card = tables.creditcard(REAL, rng=rng())
    assert card.train.targets.bincount().tolist() == [23_192, 418]
    assert card.test.targets.bincount().tolist() == [4_093, 74]
    heart = tables.heart_disease(REAL)
    sizes = [(199, 104), (172, 89), (30, 16), (85, 45)]
    assert [(len(c.train), len(c.test)) for c in heart] == sizes
    tcga = tables.tcga_brca(REAL)
    sizes = [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]
    assert [(len(c.train), len(c.test)) for c in tcga] == sizes
    deaths = [int(c.train.targets[:, 1].sum()) for c in tcga]
    assert deaths == [45, 35, 14, 16, 7, 2]
