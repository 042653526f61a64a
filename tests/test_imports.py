"""The public names, and what importing or using them without a model costs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import autopipe

PUBLIC = {"Cluster", "Plan", "Profile", "Timeline", "check", "load", "plan", "profile", "tune", "without_weights"}


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has after running the code."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_the_public_names_are_these():
    assert set(autopipe.__all__) == PUBLIC
    assert {*dir(autopipe)} >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there_and_documented(name):
    assert getattr(autopipe, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'paln'"):
        autopipe.paln  # noqa: B018


def test_importing_autopipe_loads_nothing():
    loaded = loaded_after("import autopipe")
    assert not {"torch", "numpy", "rich", "typer", "cattrs", "autopipe.core"} & loaded


@pytest.mark.parametrize("name", ["Plan", "Profile", "Cluster", "Timeline", "load", "plan"])
def test_names_that_need_no_model_need_no_torch(name):
    assert "torch" not in loaded_after(f"import autopipe; autopipe.{name}")


def test_the_command_line_starts_without_what_its_verbs_need():
    assert not {"torch", "numpy", "rich.table", "transformers"} & loaded_after("import autopipe.cli")


def test_modules_and_public_functions_never_share_a_name():
    for name in PUBLIC:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"autopipe.{name}")


def test_the_version_is_printed():
    done = subprocess.run([sys.executable, "-m", "autopipe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"autopipe {autopipe.__version__}\n"
