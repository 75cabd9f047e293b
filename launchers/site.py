"""A site profile: what a cluster wants, as data. One TOML file each in `slurm/sites`, or a file of the user's own."""

import difflib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import miles_hpc.slurm
from miles_hpc import config as configuration
from miles_hpc.errors import ConfigError

SITES = Path(miles_hpc.slurm.__file__).parent / "sites"
FALLBACK = "generic"


class Site(BaseModel):
    """Facts of one cluster that a run does not have to repeat."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """Name of the profile."""
    cluster_names: list[str] = []
    """Values of ClusterName that mean this site."""
    mpi: str = "pmi2"
    """Kind of `srun --mpi`."""
    het: bool = True
    """Heterogeneous jobs with one step over both components work; else one homogeneous job."""
    train_partition: str = ""
    """Default partition of the training nodes."""
    rollout_partition: str = ""
    """Default partition of the rollout nodes."""
    partition: str = ""
    """Default partition of a homogeneous job."""
    setup: list[str] = []
    """Shell lines before the ranks start."""
    srun_options: list[str] = []
    """Further options of srun."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment of all ranks."""


def load(wanted: str, cluster_name: str = "") -> Site:
    """The profile named by `slurm.site` (a name or a TOML file), else the one of this cluster, else the generic one.

    Raises:
        ConfigError: no such profile, or a key that profiles do not have.
    """
    if wanted.endswith(".toml"):
        return _read(Path(wanted))
    if wanted:
        return _read(_named(wanted))
    sites = [_read(file) for file in sorted(SITES.glob("*.toml"))]
    found = [site for site in sites if cluster_name and cluster_name in site.cluster_names]
    return found[0] if found else _read(_named(FALLBACK))


def _named(name: str) -> Path:
    file = SITES / f"{name}.toml"
    if not file.is_file():
        names = sorted(f.stem for f in SITES.glob("*.toml"))
        near = difflib.get_close_matches(name, names) or names
        raise ConfigError(f"slurm.site: no profile {name!r}; did you mean {', '.join(near)}?", where=str(SITES))
    return file


def _read(file: Path) -> Site:
    if not file.is_file():
        raise ConfigError("slurm.site: no such file", where=str(file))
    try:
        return Site.model_validate({"name": file.stem, **configuration.toml(file)})
    except ValidationError as error:
        problems = "\n".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        keys = ", ".join(name for name in Site.model_fields if name != "name")
        raise ConfigError(f"{problems}\n  keys of a profile: {keys}", where=str(file)) from None
