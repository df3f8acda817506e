import pytest

from flower_ext.reporting import NotARun, RunDirectory, write_comparison
from flower_ext.reporting.comparison import mean_and_std
from tests.reporting.test_report import finished


def test_the_deviation_over_runs_is_the_sample_deviation():
    assert mean_and_std([0.1, 0.2, 0.3]) == "0.200 ± 0.100"


def test_a_single_run_claims_no_deviation():
    assert mean_and_std([0.25]) == "0.250"


def test_runs_without_a_method_are_named_by_their_folder(tmp_path):
    run = RunDirectory.create(tmp_path / "first", {})
    run.log(1, accuracy_mean=0.5)
    run.save_client_metrics([{"partition": 0, "accuracy": 0.5}])
    run.finish("completed")
    write_comparison([run], tmp_path, title="One")
    assert "| first | 1 | 0.500 |" in (tmp_path / "comparison.md").read_text()


def test_a_method_without_privacy_claims_no_epsilon(tmp_path):
    runs = [finished(tmp_path / "a", method="plain", private=False), finished(tmp_path / "b")]
    write_comparison(runs, tmp_path, title="Both")
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    (plain,) = (line for line in lines if line.startswith("| plain "))
    (private,) = (line for line in lines if line.startswith("| dp2-fedsam "))
    assert plain.endswith("| none | none |")
    assert "none" not in private


@pytest.mark.parametrize("order", [1, -1])
def test_methods_stand_in_the_order_given(tmp_path, order):
    runs = [finished(tmp_path / name, method=name) for name in ("a", "b", "c")][::order]
    write_comparison(runs, tmp_path, title="Ordered")
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    named = [line[2] for line in lines if line[:2] == "| " and line[2:4] in ("a ", "b ", "c ")]
    assert named == ["a", "b", "c"][::order]


def test_markup_in_a_title_stays_text(tmp_path):
    run = finished(tmp_path / "run")
    page = write_comparison([run], tmp_path, title="<script>alert(1)</script>").read_text()
    assert "<script>" not in page


def test_runs_of_unequal_length_are_compared_where_all_measured(tmp_path):
    runs = [finished(tmp_path / name) for name in ("a", "b")]
    runs[1].log(5, accuracy_mean=0.9)
    write_comparison(runs, tmp_path, title="Unequal")
    rounds = (tmp_path / "figures" / "accuracy.csv").read_text().splitlines()[1:]
    assert len(rounds) == 4


def test_one_run_without_privacy_takes_the_epsilon_from_its_method(tmp_path):
    runs = [finished(tmp_path / "a"), finished(tmp_path / "b", private=False)]
    write_comparison(runs, tmp_path, title="Mixed")
    assert "| none | none |" in (tmp_path / "comparison.md").read_text()


def test_a_failed_run_is_not_averaged_in(tmp_path):
    run = finished(tmp_path / "a")
    run.finish("failed", "disk full")
    with pytest.raises(NotARun, match="is failed"):
        write_comparison([run], tmp_path, title="Failed")
