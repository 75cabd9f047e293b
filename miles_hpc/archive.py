"""`checkpoint.backend`: a place of the user's own where checkpoints are kept beside the run folder.

Every checkpoint is written into the run folder first, whole, with its manifest; then the first training rank puts it into the
backend. A resume fetches one from there that the run folder has lost (scratch file systems are purged), or that is damaged.
"""

import shutil
from collections.abc import Callable
from typing import Any

from miles_hpc import durable, edges, sections
from miles_hpc.attach import attach_object
from miles_hpc.config import Config
from miles_hpc.paths import RunPaths

KEY = "checkpoint.backend"
METHODS = {"versions": (), "put": ("version", "folder"), "get": ("version", "folder"), "remove": ("version",)}


def check(config: Config, paths: RunPaths) -> None:
    """Ask the store what it has, before an engine starts.

    Raises:
        EdgeError: it cannot be used.
    """
    if archive := Archive.of(config, paths):
        archive.versions()


class Archive:
    """The user's store, its answers checked. Used by the first training rank alone.

    Args:
        paths: of the run.
        store: what the backend function returned, see `protocols.CheckpointStore`.
        rules: what is kept in it, as in the run folder.
    """

    def __init__(self, paths: RunPaths, store: Any, rules: sections.Checkpoint) -> None:
        self.paths, self.store, self.rules = paths, store, rules

    @classmethod
    def of(cls, config: Config, paths: RunPaths) -> "Archive | None":
        """The named one, None without.

        Raises:
            EdgeError: the function cannot be loaded, raised, or returned no store.
        """
        if not (name := config.checkpoint.backend):
            return None
        return cls(paths, attach_object(config, KEY, name, paths.folder, METHODS), config.checkpoint)

    def put(self, version: int) -> None:
        """Store the checkpoint of `version`, then remove those that the rules no longer keep. Raises: EdgeError."""
        self._call(self.store.put, version, self.paths.checkpoint(version))
        for old in self.rules.outdated(self.versions()):
            self._call(self.store.remove, old)

    def fetch(self, version: int) -> bool:
        """Bring `version` into the run folder, in the place of a damaged one; False if it is not stored. Raises: EdgeError."""
        if version not in self.versions():
            return False
        folder = self.paths.checkpoint(version)
        partial = folder.with_name(f".{folder.name}.fetched")
        shutil.rmtree(partial, ignore_errors=True)
        self.paths.checkpoints.mkdir(exist_ok=True)
        partial.mkdir()
        self._call(self.store.get, version, partial)
        durable.swap(partial, folder)
        return True

    def versions(self) -> list[int]:
        """Ascending. Raises: EdgeError."""
        found = self._call(self.store.versions)
        try:
            return sorted(int(version) for version in found)
        except (TypeError, ValueError):
            raise edges.wrong(f"{KEY} versions()", self.store.versions, "a list of whole numbers", found) from None

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return edges.call(method, *arguments, key=f"{KEY} {getattr(method, '__name__', '')}()")
