"""Places in an app: where an error comes from."""

import pytest

from flower_ext_check.app_folder import AppFolder


def test_a_syntax_error_is_described_by_its_line_of_the_app(tmp_path):
    (tmp_path / "server_app.py").write_text(source := "x = 1\ny = (\n")
    with pytest.raises(SyntaxError) as caught:
        compile(source, str(tmp_path / "server_app.py"), "exec")
    assert AppFolder(tmp_path).described(caught.value) == "SyntaxError at server_app.py:2"
