"""A checkpoint in safetensors format, read one tensor at a time: what is not asked for never enters memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from autopipe.core.errors import FileError, UsageError

_INDEX = "model.safetensors.index.json"


class Shards:
    """The tensors of a checkpoint by name.

    ``path`` is a file, or a folder with the usual index or with any number of ``.safetensors`` files. Raises FileError
    where there is none, or where one cannot be read; UsageError where the safetensors package is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._open: dict[Path, Any] = {}
        self._where = self._index()

    def _index(self) -> dict[str, Path]:
        index = self._path / _INDEX
        if index.exists():
            try:
                return {
                    str(name): self._path / file for name, file in json.loads(index.read_text())["weight_map"].items()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise FileError(f"{index} is no index of a checkpoint: {error}") from None
        files = sorted(self._path.glob("*.safetensors")) if self._path.is_dir() else [self._path]
        if not files:
            raise FileError(f"checkpoint {self._path} holds no .safetensors file")
        return {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118  (no mapping)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                from safetensors import SafetensorError, safe_open
            except ImportError:
                raise UsageError(
                    "checkpoint=… needs the safetensors package: pip install autopipe[checkpoints]"
                ) from None
            try:
                self._open[path] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise FileError(f"checkpoint {path} cannot be read: {error}") from None
        return self._open[path]

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._file(self._where[name]).get_tensor(name)
        return found
