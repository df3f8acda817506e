"""Plug-ins are found by their entry points, and are left out where they cannot be loaded."""

import pytest

from flower_ext import plugins

GROUP = "flower_ext.tried"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install two plug-ins, of which one cannot be imported."""
    (tmp_path / "sound_plugin.py").write_text("part = 'a part'\n")
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no such processor')\n")
    for name in ("broken", "sound"):
        folder = tmp_path / f"{name}_plugin-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\n")
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}_plugin:part\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("FLOWER_EXT_PLUGINS", raising=False)
    plugins.offered.cache_clear()
    yield
    plugins.offered.cache_clear()


def test_a_plugin_that_cannot_be_loaded_is_skipped_and_logged(installed, logged):
    assert plugins.offered(GROUP) == ("a part",)
    assert "broken_plugin:part is left out: RuntimeError('no such processor')" in logged.text


def test_all_plugins_can_be_left_out(installed, monkeypatch):
    monkeypatch.setenv("FLOWER_EXT_PLUGINS", "none")
    assert plugins.offered(GROUP) == ()


def test_another_setting_is_refused(installed, monkeypatch):
    monkeypatch.setenv("FLOWER_EXT_PLUGINS", "off")
    with pytest.raises(ValueError, match="FLOWER_EXT_PLUGINS='off': expected 'none'"):
        plugins.offered(GROUP)


def test_without_any_plugin_nothing_is_offered(installed):
    assert plugins.offered("flower_ext.unknown") == ()
