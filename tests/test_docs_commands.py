"""Every command in the documentation runs, in the order of its page, and every error that it explains exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from autopipe import cli
from tests.test_docs import ROOT, blocks

DOCS = ROOT / "docs"
LIGHT = ["concepts.md", "profiles.md", "report.md", "schedules.md"]
"""Pages whose commands need no ranks."""
LONG = ["quickstart.md", "../README.md"]


def commands(page: str) -> list[list[str]]:
    """The lines of a page's blocks that call autopipe."""
    lines = [line for block in blocks(DOCS / page, "") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("autopipe ")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the pages name."""
    for name in ("examples", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.profile.json", "__pycache__"))
    for path in (ROOT / "profiles").glob("*.json"):
        shutil.copy(path, tmp_path / "profiles")
    shutil.copy(ROOT / "examples" / "gpt2.py", tmp_path / "model.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", LIGHT)
def test_the_commands_of_a_page_run(page, folder, monkeypatch, capsys):
    for command in commands(page):
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", LONG)
def test_the_long_commands_of_a_page_run(page, folder):
    for command in commands(page):
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, (command, done.stderr)


def test_every_page_with_commands_is_run():
    pages = {page.name for page in DOCS.glob("*.md") if commands(page.name)}
    own = {Path(page).name for page in (*LIGHT, *LONG)}
    others = {
        "asynchronous.md",
        "export.md",
        "files.md",
        "model-file.md",
        "models.md",
        "training.md",
    }
    assert pages <= own | others  # the others have tests of their own


def test_every_explained_error_exists():
    source = "\n".join(path.read_text() for path in (ROOT / "autopipe").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # messages that go on in another line
    explained = [text for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line.startswith("### ")
                 for text in re.findall(r"`([^`]+)`", line)]  # fmt: skip
    assert len(explained) > 15
    assert [text for text in explained if text not in source] == []


def test_the_picture_is_whole_and_has_both_lanes():
    root = ET.fromstring((DOCS / "timeline.svg").read_text())
    lanes = root.findall(".//{*}g[@class='lane']")
    assert {lane.attrib["data-origin"] for lane in lanes} == {"predicted", "measured"}
    for page in (ROOT / "README.md", DOCS / "report.md"):
        assert "timeline.svg)" in page.read_text()
