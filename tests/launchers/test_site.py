import pytest

from miles_hpc.errors import ConfigError
from miles_hpc.launchers import site


def test_found_by_cluster_name():
    assert site.load("", "miles").name == "local"
    assert site.load("", "some-other-cluster").name == "generic"
    assert site.load("").name == "generic"


def test_named_beats_found():
    assert site.load("generic", "miles").name == "generic"


def test_a_file_of_the_users_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('mpi = "pmix"\nhet = false\nsetup = ["module load x"]\n[environment]\nA = "1"\n')
    found = site.load(str(file))
    assert (found.name, found.mpi, found.het, found.setup, found.environment) == (
        "mine",
        "pmix",
        False,
        ["module load x"],
        {"A": "1"},
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mpii = 'pmi2'", "keys of a profile: .*mpi"),
        ("het = 'yes please'", "het"),
        ("mpi =", "not valid TOML"),
        (f"a = {'9' * 5000}", "not valid TOML"),
        ("# \udcff", "not UTF-8"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path, text, said):
    file = tmp_path / "mine.toml"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=said):
        site.load(str(file))


def test_unknown_name_offers_the_nearest():
    with pytest.raises(ConfigError, match="did you mean generic"):
        site.load("genric")
    with pytest.raises(ConfigError, match="no such file"):
        site.load("/nowhere/x.toml")
